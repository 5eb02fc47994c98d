"""Which request of one run is which of another: by rid, or, where rids are drawn anew, by prompt and order of arrival.

Clients over HTTP seldom name their requests, so two runs of one workload share no rid. Then the k-th request with a
prompt in one run is the k-th with that prompt in the other. Mirrors nothing of SGLang.

Imports: events, recording.requests.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from sgviz.events.schema import QueueEntered
from sgviz.recording.requests import RequestState

Prompt = tuple[int, bytes, str]
Requests = Mapping[str, RequestState]


class AlignedBy(StrEnum):
    """How the requests of two runs were paired."""

    RID = "rid"
    PROMPT = "prompt"

    @property
    def words(self) -> str:
        return "rid" if self is AlignedBy.RID else "prompt and order of arrival, for their rids differ"


@dataclass(frozen=True, slots=True)
class Alignment:
    """`pairs`: rid in `a` -> rid in `b`, in the order of `a`. `by`: how they were found."""

    by: AlignedBy
    pairs: dict[str, str]

    @property
    def of_b(self) -> dict[str, str]:
        """Rid in `b` -> what it is called in `a`."""
        return {theirs: ours for ours, theirs in self.pairs.items()}


def align(a: Requests, b: Requests) -> Alignment:
    """By rid if at least half of the smaller run's rids are in the other, else by prompt."""
    common = {rid: rid for rid in a if rid in b}
    if 2 * len(common) >= min(len(a), len(b)):
        return Alignment(AlignedBy.RID, common)
    ours, theirs = _by_prompt(a), _by_prompt(b)
    pairs: dict[str, str] = {}
    for prompt, rids in ours.items():
        pairs.update(zip(rids, theirs.get(prompt, [])))
    for rid, other in list(pairs.items()):  # what fanned out into samples has no prompt of its own
        parent, their_parent = a[rid].parent, b[other].parent
        if parent in a and their_parent in b:
            pairs.setdefault(parent, their_parent)
    return Alignment(AlignedBy.PROMPT, {rid: pairs[rid] for rid in a if rid in pairs})


def _by_prompt(requests: Requests) -> dict[Prompt, list[str]]:
    """The rids that reached the queue, by prompt, in the order in which they came there."""
    arrivals = []
    for rid, request in requests.items():
        event = request.marks.get("queue.entered")
        if event is not None and isinstance(event.body, QueueEntered):
            body = event.body
            arrivals.append((event.sort_key, (body.prompt_tokens, body.input_ids, body.extra_key), rid))
    found: defaultdict[Prompt, list[str]] = defaultdict(list)
    for _, prompt, rid in sorted(arrivals):
        found[prompt].append(rid)
    return found
