"""How long a recording of a million events takes to load, fold, jump in and explain.

The events are those of a real run on the mock device, laid end to end as often as it takes (with rids, batch
numbers, sequence numbers and times of their own; each piece ends with an empty cache). Times are CPU seconds
of this process, and wall seconds beside them: other work on the machine moves only the latter.

    python benchmarks/recording_speed.py --events 1000000
    python benchmarks/recording_speed.py --trace TRACE.csv    # explain 500 requests of a trace, simulated
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

import sgviz
from sgviz.config import Settings
from sgviz.events import Event
from sgviz.recording import Recording
from sgviz.virtual import run_virtual


def base_run(requests: int) -> list[Event]:
    """Events of a run with chunks, shared prefixes and evictions, from an empty to an empty cache."""
    settings: dict[str, Any] = {"max_total_tokens": 4096, "chunked_prefill_size": 256, "mock_step_ms": 0.0}
    with sgviz.Engine("tiny-llama", device="mock", **settings) as engine:
        prompts = [
            f"{'shared beginning ' * (n % 5)} prompt number {n} " * (1 + n % 4) for n in range(requests)
        ]
        engine.generate(prompts, sampling_params={"max_new_tokens": 40})
        while not engine.flush_cache():
            pass
        return list(engine.recording().freeze().stamped())


def tiled(events: list[Event], count: int) -> Iterator[Event]:
    """`events` again and again, as if the engine had gone on, until there are `count`."""
    span = events[-1].t - events[0].t + 1_000_000
    lengths: dict[str, int] = {}
    for event in events:
        lengths[event.component] = max(event.seq, lengths.get(event.component, 0))
    turns = max(event.iteration for event in events)
    bids = max((event.body.bid for event in events if hasattr(event.body, "bid")), default=0)
    made = piece = 0
    while made < count:
        for event in events:
            if piece and event.kind in ("process.started", "engine.configured"):
                event = Event(event.seq, event.t, event.component, event.iteration, events[0].body)
            yield _moved(event, piece, span, lengths[event.component], turns, bids)
            made += 1
            if made == count:
                return
        piece += 1


def _moved(event: Event, piece: int, span: int, seqs: int, turns: int, bids: int) -> Event:
    body, shift = event.body, piece * span
    changes: dict[str, object] = {}
    for name in body.__struct_fields__:
        value = getattr(body, name)
        if name == "rid" and value:
            changes[name] = f"{value}-{piece}"
        elif name == "rids" or (name == "finished" and event.kind == "batch.processed"):
            changes[name] = tuple([f"{rid}-{piece}" for rid in value])
        elif name == "holders":
            changes[name] = tuple([(f"{rid}-{piece}", amount) for rid, amount in value])
        elif name == "moves":
            changes[name] = tuple([(f"{rid}-{piece}", old, new) for rid, old, new in value])
        elif name == "bid":
            changes[name] = value + piece * bids
        elif name.endswith("_ns") and name != "unix_ns" and value:
            changes[name] = value + shift
    if changes:
        body = msgspec.structs.replace(body, **changes)
    iteration = event.iteration + piece * turns if event.iteration else 0
    return Event(event.seq + piece * seqs, event.t + shift, event.component, iteration, body)


def timed(words: str, work: object) -> object:
    """Run `work`, print its CPU and wall seconds, return what it gives."""
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()  # type: ignore[operator]
    spent = time.process_time() - cpu
    print(f"{words:<44} {spent:8.2f} s CPU  {time.perf_counter() - wall:8.2f} s wall", flush=True)
    return result


def jumps(rec: Recording, count: int) -> str:
    """Median and worst CPU milliseconds of a jump to a random moment."""
    rng, spent = random.Random(0), []
    for _ in range(count):
        at = rng.randrange(len(rec))
        start = time.process_time()
        rec.at(count=at)
        spent.append((time.process_time() - start) * 1e3)
    return f"{statistics.median(spent):.1f} ms median, {max(spent):.1f} ms worst CPU of {count} jumps"


def explain_trace(path: str, requests: int) -> None:
    """Explain every request of a trace that ran through the whole engine on a simulated device."""
    from virtual_time import from_trace

    settings = Settings.build(device="sim:h100-sxm", sim_model="llama-3-8b")
    rec = run_virtual(settings, from_trace(path, requests), host="modelled").recording
    timed("fold", rec.fold)
    found = timed(f"explain {requests} requests", lambda: [rec.explain(rid) for rid in rec.rids])
    assert isinstance(found, list)
    exact = all(sum(part.duration_ns for part in each.parts) == each.total_ns for each in found)
    worst = max(each.unexplained_ns / each.total_ns for each in found)
    parts = sum(len(each.parts) for each in found)
    print(
        f"{len(rec):,} events, {parts:,} intervals, every sum exact: {exact}, unexplained at most {worst:.3%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--requests", type=int, default=600, help="requests in the run that is repeated")
    parser.add_argument("--trace", metavar="CSV", help="explain 500 requests of this trace instead")
    args = parser.parse_args()
    if args.trace:
        explain_trace(args.trace, 500)
        return
    events = base_run(args.requests)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.sgv"
        Recording(list(tiled(events, args.events))).save(path)
        print(f"{args.events:,} events, {path.stat().st_size / 1e6:,.1f} MB, from a run of {len(events):,}")
        rec = timed("load", lambda: sgviz.load(path))
        assert isinstance(rec, Recording)
        timed("fold (state, KV history, keyframes)", rec.fold)
        print(f"{'jump':<44} {jumps(rec, 200)}")
        timed("requests table with waits", lambda: rec.requests)
        rids = rec.rids[:500]
        timed("explain 500 requests", lambda: [rec.explain(rid) for rid in rids])
        for name in ("iterations", "batches", "kv", "decisions", "tokens", "events"):
            timed(f"{name} table", lambda name=name: getattr(rec, name))
        timed("audit", rec.audit)


if __name__ == "__main__":
    main()
