"""Whether a request could have been taken had certain others made way: counted by hand, not by the planner's code."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from rig import Rig

from sgviz.batch.req import Req

CLIP = 4096  # more output tokens than this are never promised


def could_be_taken(
    rig: Rig, head: Req, gone: Sequence[Req], running: Sequence[Req], ratio: float, riders: int
) -> bool:
    """Had `gone` given up all they have, and nothing else been planned.

    `running`: who ran when the queue was tried, `riders` of them in the same batch; `ratio`: of their output promised.
    """
    cache, page = rig.state.cache, rig.state.limits.page_size
    stay = [req for req in running if req not in gone]
    riders = len(stay) if riders else 0
    match = cache.match(head.fill_ids(), head.namespace, head.max_prefix_len)
    held = {node.id: len(node.key) for node in match.node.path()}
    for req in rig.holders():
        if req not in gone and req.kv.node is not None:
            held |= {node.id: len(node.key) for node in req.kv.node.path()}
    pages = [-(-(req.kv.allocated - req.kv.protected) // page) for req in rig.holders() if req not in gone]
    room = cache.total - sum(held.values()) - page * sum(pages)
    new = head.seqlen - match.length
    if not _fits_a_chunk(rig, match.length, new, riders):
        return False
    promised = Fraction(0)
    for req in stay:
        promised += _left(req) * Fraction(1.0 if req.sampling_params.ignore_eos else ratio)
    rest = room - promised - riders
    if head.sampling_params.ignore_eos and cache.disable_radix_cache:
        start = -(-new // page) * page + page
        return start <= min(rest, room - riders) and _lasts(head, stay, room - riders - start)
    return new + _left(head) + page < rest - Fraction(1, 1000)  # floats may see an edge as on either side


def _left(req: Req) -> int:
    return min(max(0, req.max_new_tokens - len(req.output_ids)), CLIP)


def _fits_a_chunk(rig: Rig, prefix: int, new: int, riders: int) -> bool:
    """A whole page of the prompt, or all of it."""
    size, page = rig.state.limits.chunked_prefill_size, rig.state.limits.page_size
    if size is None or -(-new // page) * page <= size - riders:
        return True
    return (prefix + (size - riders) // page * page) // page * page > prefix


def _lasts(head: Req, stay: Sequence[Req], free: int) -> bool:
    """Everybody gets a token a step: at each end there is more free than there are requests, itself included."""
    if not stay:
        return _left(head) <= free
    ends = sorted((_left(req), req.seqlen) for req in (*stay, head))
    for place, (steps, _) in enumerate(ends):
        alive, back = len(ends) - place, sum(tokens for _, tokens in ends[:place])
        if free + back - steps * alive <= alive:
            return False
    return True
