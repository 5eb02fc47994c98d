"""Virtual time: how fast a long trace runs through the real scheduler on a simulated device.

    python benchmarks/virtual_time.py TRACE.csv [--requests 2000] [--loop overlap|normal] [--host measured|modelled]
    python benchmarks/virtual_time.py --generated          # a workload of the same shape, made here

The trace has columns arrived_at (s), num_prefill_tokens, num_decode_tokens. Prompts are cut at what the
simulated context holds. Tokenizer, detokenizer and events are on. The target is 2,000 requests of a
conversation trace (424 s of arrivals) on sim:h100-sxm with llama-3-8b in under 60 s on two cores.
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import time
from collections.abc import Sequence

import pandas as pd

from sgviz.config import Settings
from sgviz.recording.overlap_account import overlap_account
from sgviz.virtual import Arrival, run_virtual

MAX_PROMPT, MAX_OUTPUT = 7000, 1000
TARGET_S = 60.0


def from_trace(path: str, requests: int) -> list[Arrival]:
    rows = pd.read_csv(path).head(requests)
    triples = zip(rows["arrived_at"], rows["num_prefill_tokens"], rows["num_decode_tokens"], strict=True)
    return [arrival(i, at, prompt, output) for i, (at, prompt, output) in enumerate(triples)]


def generated(requests: int) -> list[Arrival]:
    """Exponential gaps over 424 s per 2,000 requests, log-normal lengths with means near 1,000 and 200."""
    draw, at, out = random.Random(7), 0.0, []
    for i in range(requests):
        at += draw.expovariate(2000 / 424)
        out.append(
            arrival(i, at, int(draw.lognormvariate(6.5, 0.9)) + 2, int(draw.lognormvariate(5.0, 0.8)) + 2)
        )
    return out


def arrival(i: int, at: float, prompt: int, output: int) -> Arrival:
    return Arrival(
        at_ns=int(at * 1e9),
        rid=f"request-{i:05d}",
        prompt=max(2, min(int(prompt), MAX_PROMPT)),
        output_tokens=max(1, min(int(output), MAX_OUTPUT)),
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", nargs="?")
    parser.add_argument("--generated", action="store_true")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--loop", choices=("overlap", "normal"), default="overlap")
    parser.add_argument("--host", choices=("measured", "modelled"), default="measured")
    args = parser.parse_args(argv)
    if bool(args.trace) == args.generated:
        parser.error("give a trace file or --generated")
    arrivals = generated(args.requests) if args.generated else from_trace(args.trace, args.requests)
    settings = Settings.build(
        device="sim:h100-sxm", sim_model="llama-3-8b", disable_overlap_schedule=args.loop == "normal"
    )
    start = time.perf_counter()
    run = run_virtual(settings, arrivals, host=args.host)
    wall = time.perf_counter() - start
    cpu = resource.getrusage(resource.RUSAGE_SELF)
    account = overlap_account(run.recording.stamped()).row()
    print(
        f"{len(arrivals)} requests, {arrivals[-1].at_ns / 1e9:.0f} s of arrivals, {args.loop} loop, host {args.host}: "
        f"{wall:.1f} s (target {TARGET_S:.0f}), CPU {cpu.ru_utime:.1f} + {cpu.ru_stime:.1f} s, "
        f"{len(run.recording)} events, {len(run.failures)} failures"
    )
    print(
        f"simulated: {run.virtual_s:.1f} s of virtual time, host hidden {account['hidden_share']:.1%}, "
        f"device idle {account['device_idle_share']:.2%}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
