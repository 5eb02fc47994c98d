"""A HostModel from a run on the wall clock: what the scheduler's stages cost there, with all else that goes on.

Measured CPU time leaves out what a real run pays besides: caches gone cold while the device computed, cores that other
components hold, wake-ups. Imports: errors, recording, virtual.host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from sgviz.errors import BadRequest
from sgviz.events.schema import BatchPlanned
from sgviz.recording import Recording
from sgviz.recording.overlap_account import overlap_account
from sgviz.virtual.host import US, HostModel

# a cost of HostModel -> the stages of the overlap account that it stands for
_STAGES: Mapping[str, tuple[str, ...]] = {
    "turn": ("receive", "plan", "loop"),
    "launch": ("launch",),
    "process": ("process", "stream"),
}


def fitted_host(recording: Recording, base: HostModel | None = None) -> HostModel:
    """`base` (default: the constants) with the scheduler's costs scaled to the means of `recording`.

    Of each cost the constant and the slope are scaled alike, as one run does not tell them apart. Tokenizer,
    detokenizer and hops stay as they are.

    Raises:
        BadRequest: the recording has no launch to learn from.
    """
    base = base or HostModel()
    events = recording.freeze().stamped()
    account = overlap_account(events)
    rows = [len(event.body.rids) for event in events if isinstance(event.body, BatchPlanned)]
    if not account.launches or not rows:
        raise BadRequest("the recording has no batch to learn the host's costs from")
    mean_rows = sum(rows) / len(rows)
    changed: dict[str, float] = {}
    for cost, stages in _STAGES.items():
        seconds = sum(each.busy_s for each in account.stages if each.stage in stages)
        constant, slope = getattr(base, f"{cost}_us"), getattr(base, f"{cost}_per_request_us")
        factor = seconds / account.launches * 1e9 / ((constant + slope * mean_rows) * US)
        changed |= {f"{cost}_us": constant * factor, f"{cost}_per_request_us": slope * factor}
    return dataclasses.replace(base, **changed)
