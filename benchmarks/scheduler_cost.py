"""The scheduler's own time per decode iteration, by part, without the device.

    python benchmarks/scheduler_cost.py [--running 64] [--iterations 400] [--loop normal|overlap]
                                        [--stop-strings] [--no-events] [--json]

A real scheduler with real cache decodes `--running` requests on the mock worker, in one thread and without
sockets: messages are encoded as on the wire and dropped. The worker's time is taken out. Events go into a
publisher's buffer and are encoded, as in a scheduler process. The target is 1.5 ms per iteration at 64 running.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from sgviz.config import Settings
from sgviz.events import BufferSink, Event, TimeStats, Tracer
from sgviz.messages import SamplingParams, TokenizedGenerateReqInput
from sgviz.scheduler.scheduler import Scheduler
from sgviz.scheduler.stops import Stop
from sgviz.worker.mock_worker import MockWorker, mock_info

TARGET_MS = 1.5
PROMPT_TOKENS = 128
WARM_UP = 20


class Wire:
    """Inbox and outbox: what is sent is encoded and dropped, as far as the sender is concerned."""

    def __init__(self) -> None:
        self.waiting: list[Any] = []
        self.bytes = 0
        self._encode = msgspec.msgpack.Encoder().encode

    def drain(self, limit: int = 1024) -> list[Any]:
        out, self.waiting = self.waiting[:limit], self.waiting[limit:]
        return out

    def wait(self, timeout_ms: int) -> bool:
        return bool(self.waiting)

    def send(self, message: msgspec.Struct) -> None:
        self.bytes += len(self._encode(message))

    def send_events(self, events: list[Event]) -> bool:
        self.bytes += len(self._encode(events))
        return True


class Timer:
    """Adds up the time of wrapped calls, by name."""

    def __init__(self) -> None:
        self.ns: dict[str, int] = {}

    def wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter_ns()
            try:
                return call(*args, **kwargs)
            finally:
                self.ns[name] = self.ns.get(name, 0) + time.perf_counter_ns() - start

        return timed


def build(args: argparse.Namespace, timer: Timer) -> tuple[Scheduler, Wire]:
    """A scheduler with all requests submitted, and its parts wrapped in the timer."""
    wire = Wire()
    info = mock_info(vocab_size=32000, context_len=8192, max_total_num_tokens=400_000)
    trace = Tracer("scheduler", None if args.no_events else BufferSink(wire.send_events))
    settings = Settings.build(
        disable_overlap_schedule=args.loop == "normal",
        max_running_requests=args.running,
        chunked_prefill_size=-1,
    )
    worker = MockWorker(info, threaded=False)
    scheduler = Scheduler(
        settings, worker, inbox=wire, to_tokenizer=wire, to_detokenizer=wire, decode=_decode, trace=trace
    )
    worker.launch = timer.wrap("worker", worker.launch)  # type: ignore[method-assign]
    stops = ("\n\nnever", "</end>") if args.stop_strings else ()
    for i in range(args.running):
        params = SamplingParams(
            max_new_tokens=args.iterations + WARM_UP + 50, temperature=0.0, ignore_eos=True, stop=stops
        ).normalize()
        wire.waiting.append(
            TokenizedGenerateReqInput(
                rid=f"request-{i:04d}",
                input_ids=list(range(i, i + PROMPT_TOKENS)),
                sampling_params=params,
                stream=True,
                time_stats=TimeStats(created=1),
            )
        )
    return scheduler, wire


def _decode(ids: list[int]) -> str:
    return " ".join(map(str, ids))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds per decode iteration: the whole, and its parts by stop of the loop."""
    timer = Timer()
    scheduler, wire = build(args, timer)
    loop = scheduler.event_loop()
    names = {
        Stop.RECEIVED: "receive",
        Stop.PLANNED: "plan",
        Stop.LAUNCHED: "launch",
        Stop.PROCESSED: "process",
    }
    parts: dict[str, list[float]] = {name: [] for name in names.values()}
    turns: list[float] = []
    turn = 0.0
    while len(turns) < args.iterations + WARM_UP:
        device, start = timer.ns.get("worker", 0), time.perf_counter_ns()
        stop = next(loop)
        if stop is Stop.PROCESSED:
            scheduler.state.trace.flush()
        spent = time.perf_counter_ns() - start - (timer.ns.get("worker", 0) - device)
        parts[names[stop]].append(spent / 1e6)
        turn += spent / 1e6
        if stop is Stop.PROCESSED:
            turns.append(turn)
            turn = 0.0
    kept = {name: values[-args.iterations :] for name, values in parts.items()}
    trace = scheduler.state.trace
    return {
        "running": args.running,
        "loop": args.loop,
        "events": not args.no_events,
        "stop_strings": args.stop_strings,
        "iterations": args.iterations,
        "median_ms": statistics.median(turns[-args.iterations :]),
        "p95_ms": statistics.quantiles(turns[-args.iterations :], n=20)[-1],
        "parts_ms": {name: statistics.median(values) for name, values in kept.items()},
        "emit_and_flush_ms": trace.cost_ns / 1e6 / (args.iterations + WARM_UP),
        "wire_bytes_per_iteration": wire.bytes // (args.iterations + WARM_UP),
        "target_ms": TARGET_MS,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--running", type=int, default=64)
    parser.add_argument("--iterations", type=int, default=400)
    parser.add_argument("--loop", choices=("normal", "overlap"), default="normal")
    parser.add_argument("--stop-strings", action="store_true", help="every request has two stop strings")
    parser.add_argument("--no-events", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    result = measure(args)
    if args.json:
        print(json.dumps(result))
        return 0
    print(
        f"scheduler's own time per decode iteration, {args.running} running, {args.loop} loop, "
        f"events {'off' if args.no_events else 'on'}, device time taken out"
    )
    for name, value in result["parts_ms"].items():
        print(f"  {name:10} {value:8.3f} ms")
    print(f"  {'whole':10} {result['median_ms']:8.3f} ms  (p95 {result['p95_ms']:.3f}, target {TARGET_MS})")
    print(f"  of which emit and flush {result['emit_and_flush_ms']:.3f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
