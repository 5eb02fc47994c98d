"""What the overlap loop buys on a simulated device: wall clock against virtual time, normal against overlap.

    python benchmarks/overlap.py [--device sim:h100-sxm] [--sim-model llama-3-8b] [--requests 64] [--tokens 256]
    python benchmarks/overlap.py --device cpu --torch-threads 1        # the real CPU worker

Non-streamed requests that all arrive at once, components in processes. Targets on sim:h100-sxm with
llama-3-8b at 64 running: overlap hides at least 80 % of host time, device idle under 5 %; wall clock and
virtual time agree within 5 % on throughput.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from sgviz.config import Settings
from sgviz.engine import Engine
from sgviz.events.schema import BatchFinished
from sgviz.recording import Recording
from sgviz.recording.overlap_account import overlap_account
from sgviz.virtual import Arrival, fitted_host, run_virtual


def prompts(count: int) -> list[str]:
    return [f"request number {i} asks about cats and dogs " + "very " * (i % 200) for i in range(count)]


def show(name: str, recording: Recording, tokens: int) -> None:
    events = recording.freeze().stamped()
    account = overlap_account(events).row()
    ran = [event.body for event in events if isinstance(event.body, BatchFinished)]
    seconds = (max(body.end_ns for body in ran) - min(body.start_ns for body in ran)) / 1e9
    print(
        f"{name:32} host hidden {account['host_hidden_s']:.3f} s, exposed {account['host_exposed_s']:.3f} s "
        f"(hidden {account['hidden_share']:6.1%})  device idle {account['device_idle_share']:6.2%}  "
        f"{tokens / seconds:8.1f} tok/s",
        flush=True,
    )


def on_the_wall(args: argparse.Namespace, loop: Any, settings: dict[str, Any]) -> Recording:
    params = {"max_new_tokens": args.tokens, "ignore_eos": True, "temperature": 0}
    with Engine(mode="processes", event_loop=loop, log_level="warning", **settings) as engine:
        engine.generate(prompts(args.requests), params)
        return engine.recording().freeze()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="sim:h100-sxm")
    parser.add_argument("--sim-model", default="llama-3-8b")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--torch-threads", type=int)
    args = parser.parse_args(argv)
    simulated = args.device.startswith("sim:")
    settings: dict[str, Any] = {"device": args.device}
    settings |= {"sim_model": args.sim_model} if simulated else {"torch_threads": args.torch_threads}
    total = args.requests * args.tokens
    print(
        f"{args.requests} requests of {args.tokens} tokens on {args.device}"
        + (" (simulated)" if simulated else "")
    )
    real = {loop: on_the_wall(args, loop, settings) for loop in ("normal", "overlap")}
    for loop, recording in real.items():
        show(f"wall clock, {loop}", recording, total)
    # fitted: to the wall's normal loop, so that of the other loop it is a forecast
    hosts: dict[str, Any] = {"measured": "measured", "modelled": "modelled"}
    if simulated:
        hosts["fitted"] = fitted_host(real["normal"])
    for name, host in hosts.items() if simulated else ():
        for loop in ("normal", "overlap"):
            chosen = Settings.build(disable_overlap_schedule=loop == "normal", **settings)
            arrivals = [
                Arrival(at_ns=0, rid=f"r{i}", prompt=text, output_tokens=args.tokens)
                for i, text in enumerate(prompts(args.requests))
            ]
            show(f"virtual, host {name}, {loop}", run_virtual(chosen, arrivals, host=host).recording, total)
    return 0


if __name__ == "__main__":
    sys.exit(main())
