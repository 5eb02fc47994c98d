"""What the debugger's gate costs a turn of the scheduler while nobody is attached, and while somebody is.

Idle turns of a real Scheduler without sockets are the shortest there are, so the gate shows best in them; the gate
does the same in every other turn. Turns with and without a gate alternate in rounds; the smallest of the rounds counts,
in CPU time of the thread, so that other work on the machine matters little.

    python benchmarks/gate_cost.py --turns 20000 --rounds 15
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field

import msgspec

from sgviz.config import Settings
from sgviz.events import RingSink, Tracer, WallClock
from sgviz.messages import DebugReq, ShutdownReq, ToScheduler
from sgviz.messages.debug import AddBreakpoint, Attach
from sgviz.scheduler.gate import DebugHost
from sgviz.scheduler.scheduler import Scheduler
from sgviz.worker.mock_worker import MockWorker, mock_info

LIMIT_US = 5.0  # what a resume may cost more when nobody is attached


@dataclass
class Box:
    """An inbox that asks for the end after `turns` idle turns, and an outbox that keeps nothing."""

    turns: int
    messages: list[ToScheduler] = field(default_factory=list)

    def drain(self, limit: int = 1024) -> list[ToScheduler]:
        out, self.messages = self.messages, []
        return out

    def wait(self, timeout_ms: int) -> bool:
        self.turns -= 1
        if not self.turns:
            self.messages.append(ShutdownReq())
        return True

    def send(self, message: msgspec.Struct) -> None:
        pass


def turn_us(turns: int, *, gate: bool, attached: bool) -> float:
    """CPU microseconds of one idle turn."""
    inbox = Box(turns)
    if attached:
        for command in (Attach(lease_s=600.0), AddBreakpoint(text='refused and reason == "kv"')):
            inbox.messages.append(DebugReq(id="", session="bench", command=command))
    info = mock_info(vocab_size=97, context_len=256, max_total_num_tokens=4096)
    scheduler = Scheduler(
        Settings(),
        MockWorker(info, threaded=False),
        inbox=inbox,
        to_tokenizer=Box(0),
        to_detokenizer=Box(0),
        decode=lambda ids: "",
        trace=Tracer("scheduler", RingSink(1000)),
        debug=DebugHost(clock=WallClock()) if gate else None,
    )
    start = time.thread_time_ns()
    scheduler.run()
    return (time.thread_time_ns() - start) / 1e3 / turns


def main() -> None:
    parser = argparse.ArgumentParser(description="What the debugger's gate costs a turn.")
    parser.add_argument("--turns", type=int, default=20_000, help="idle turns of a round")
    parser.add_argument("--rounds", type=int, default=15, help="rounds; the smallest counts")
    args = parser.parse_args()
    cases = {
        "no gate": (False, False),
        "gate, nobody attached": (True, False),
        "gate, attached": (True, True),
    }
    best = dict.fromkeys(cases, float("inf"))
    for _ in range(args.rounds):
        for name, (gate, attached) in cases.items():
            best[name] = min(best[name], turn_us(args.turns, gate=gate, attached=attached))
    for name, value in best.items():
        print(f"{name:24} {value:7.3f} us a turn, {value - best['no gate']:+7.3f}")
    more = best["gate, nobody attached"] - best["no gate"]
    print(
        f"nobody attached: {more:.3f} us more a turn; allowed {LIMIT_US:g}: {'holds' if more < LIMIT_US else 'FAILS'}"
    )


if __name__ == "__main__":
    main()
