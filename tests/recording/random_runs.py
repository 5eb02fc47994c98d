"""Random workloads on the timed rig, with the engine's true state kept at every stop."""

from __future__ import annotations

from hypothesis import strategies as st
from timed_rig import TimedRig
from true_state import Truth
from workload import CONTEXT, EOS_EVERY, VOCAB, Abort, Flush, Run, Step, Submit, settings, steps, submit

from sgviz.messages import FlushCacheReqInput
from sgviz.scheduler.stops import Stop

MOST_STOPS = 20_000


def run(
    config: dict[str, object], todo: list[Step], make: type[TimedRig] = TimedRig
) -> tuple[TimedRig, list[Truth]]:
    """Play a workload until the scheduler is idle."""
    rig = make(context_len=CONTEXT, vocab_size=VOCAB, eos_every=EOS_EVERY, **config)
    truths: list[Truth] = []
    count = 0
    for step in todo:
        match step:
            case Submit():
                submit(rig, step, f"r{count}")
                count += 1
            case Abort(which) if which < count:
                rig.abort(f"r{count - 1 - which}")
            case Run(stops):
                for _ in range(stops):
                    rig.stop()
                    truths.append(Truth.of(rig))
            case Flush():
                rig.inbox.send(FlushCacheReqInput(id="f"))
    for _ in range(MOST_STOPS):
        stop = rig.stop()
        truths.append(Truth.of(rig))
        if stop is Stop.IDLE and rig.state.is_fully_idle and not rig.inbox.messages:
            return rig, truths
    raise AssertionError("not idle")


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[str, object], list[Step]]:
    return draw(settings()), draw(steps)
