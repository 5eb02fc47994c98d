"""What observing costs: throughput with events on over events off, on the same running engine.

    python benchmarks/overhead.py [--model smollm2-135m-instruct] [--pairs 9] [--json]

Two settings: the real model with 8 requests at a time, and the mock device (no device time) with 64, both
over HTTP `/generate`, not streamed, components in processes. Each pair runs the same requests once with
events and once without, in an order that alternates, so that drift falls on both. Printed: the median of
the pairwise ratios with its 95 % interval (bootstrap), the same for the CPU time a token costs in all
processes (which a busy neighbour disturbs less), and the share of run time spent in emit and flush (CPU time
of the emitting threads, all components). Targets: 0.99 (real model), 0.95 (mock), 1 % in emit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import httpx2
import psutil

from sgviz.engine import Engine
from sgviz.events import schema

TARGETS = {"real": 0.99, "mock": 0.95}
EMIT_TARGET = 0.01


async def load(url: str, running: int, requests: int, tokens: int) -> float:
    """Tokens a second of `requests` requests, `running` at a time."""
    gate = asyncio.Semaphore(running)
    limits = httpx2.Limits(max_connections=running)

    async def one(client: httpx2.AsyncClient, i: int) -> int:
        params = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        async with gate:
            answer = await client.post(
                "/generate", json={"input_ids": [100 + i] * 16, "sampling_params": params}
            )
        answer.raise_for_status()
        done: int = answer.json()["meta_info"]["completion_tokens"]
        return done

    async with httpx2.AsyncClient(base_url=url, timeout=None, limits=limits, trust_env=False) as client:
        start = time.perf_counter()
        counts = await asyncio.gather(*(one(client, i) for i in range(requests)))
        return sum(counts) / (time.perf_counter() - start)


def measure(engine: Engine, running: int, requests: int, tokens: int, pairs: int) -> dict[str, Any]:
    """Interleaved pairs on one engine; the first run of each kind is thrown away."""
    url = engine.serve(port=0).url
    seen: dict[bool, list[float]] = {True: [], False: []}
    cpu: dict[bool, list[float]] = {True: [], False: []}
    busy_s = 0.0
    cost_before = 0
    for pair in range(pairs + 1):
        for on in (True, False) if pair % 2 else (False, True):
            engine.set_events(on)
            engine.flush_cache()
            start, cpu_start = time.perf_counter(), _cpu_s()
            rate = asyncio.run(load(url, running, requests, tokens))
            if pair:
                seen[on].append(rate)
                cpu[on].append(_cpu_s() - cpu_start)
                busy_s += (time.perf_counter() - start) if on else 0.0
            elif on:
                cost_before = _cost_ns(engine)
            print(f"  pair {pair}/{pairs} events {'on ' if on else 'off'} {rate:8.1f} tok/s", file=sys.stderr)
    engine.set_events(True)
    ratios = [on / off for on, off in zip(seen[True], seen[False], strict=True)]
    low, high = interval(ratios)
    less = [off / on for on, off in zip(cpu[True], cpu[False], strict=True)]
    cpu_low, cpu_high = interval(less)
    return {
        "tok_s_on": statistics.median(seen[True]),
        "tok_s_off": statistics.median(seen[False]),
        "ratio": statistics.median(ratios),
        "ratio_low": low,
        "ratio_high": high,
        "cpu_ratio": statistics.median(less),
        "cpu_ratio_low": cpu_low,
        "cpu_ratio_high": cpu_high,
        "emit_share": (_cost_ns(engine) - cost_before) / 1e9 / busy_s,
    }


def _cpu_s() -> float:
    """CPU seconds so far of this process and the components."""
    own = psutil.Process()
    return sum(sum(each.cpu_times()[:2]) for each in (own, *own.children(recursive=True)))


def _cost_ns(engine: Engine) -> int:
    """The sum over components of the newest trace.cost."""
    time.sleep(0.3)
    newest = {
        event.component: event.body.cost_ns
        for event in engine.pipeline.ring.snapshot()
        if isinstance(event.body, schema.TraceCost)
    }
    own = sum(trace.cost_ns for trace in (engine.pipeline.trace, engine.pipeline.http_trace))
    return own + sum(cost for name, cost in newest.items() if name in ("scheduler", "detokenizer"))


def interval(ratios: Sequence[float], rounds: int = 2000) -> tuple[float, float]:
    """95 % bootstrap interval of the median."""
    draw = random.Random(1)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(rounds))
    return medians[int(rounds * 0.025)], medians[int(rounds * 0.975)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--only", choices=("real", "mock"))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    results = {}
    if args.only != "mock":
        with Engine(args.model, mode="processes", log_level="warning") as engine:
            results["real"] = measure(engine, running=8, requests=16, tokens=32, pairs=args.pairs)
    if args.only != "real":
        with Engine(args.model, mode="processes", device="mock", log_level="warning") as engine:
            results["mock"] = measure(engine, running=64, requests=1024, tokens=64, pairs=args.pairs)
    if args.json:
        print(json.dumps(results))
        return 0
    for name, found in results.items():
        print(
            f"{name}: events on/off {found['ratio']:.3f} [{found['ratio_low']:.3f}, {found['ratio_high']:.3f}] "
            f"(target {TARGETS[name]}), {found['tok_s_on']:.0f} against {found['tok_s_off']:.0f} tok/s, "
            f"CPU a token off/on {found['cpu_ratio']:.3f} [{found['cpu_ratio_low']:.3f}, "
            f"{found['cpu_ratio_high']:.3f}], emit {found['emit_share'] * 100:.2f} % of run time"
            + (f" (target {EMIT_TARGET * 100:.0f} %)" if name == "real" else "")
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
