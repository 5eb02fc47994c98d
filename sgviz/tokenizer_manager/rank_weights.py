"""RankWeights: other weights for all data parallel ranks, or for none of them.

SGLang joins the answers of its ranks and leaves those that took the weights with them. Here they go back to what the
others run, and one that cannot gets no requests until an update succeeds on all. Imports: messages, errors, this
folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from sgviz.errors import Unavailable
from sgviz.messages.flow import UpdateWeightFromDiskReqInput, UpdateWeightFromDiskReqOutput
from sgviz.messages.generate import new_rid
from sgviz.tokenizer_manager.merge import JOINT, merged
from sgviz.tokenizer_manager.ranks import Ranks
from sgviz.tokenizer_manager.replies import Replies
from sgviz.tokenizer_manager.weights import Weights

Parts = Mapping[int, UpdateWeightFromDiskReqOutput]


class RankWeights:
    """No request runs while a change is under way; whoever asks for one sees to that.

    Args:
        tell: passes on which ranks are set aside.
    """

    def __init__(self, replies: Replies, ranks: Ranks, tell: Callable[[], None]) -> None:
        self._replies = replies
        self._ranks = ranks
        self._tell = tell

    async def change(
        self, question: UpdateWeightFromDiskReqInput, before: Weights, timeout: float
    ) -> UpdateWeightFromDiskReqOutput:
        """The answer of all as one; without success the ranks in use all run the weights `before`.

        Raises:
            Unavailable: a rank did not answer within `timeout` seconds, so what it runs is not known.
        """
        parts = await self._ask(question, timeout)
        changed = {rank: part for rank, part in parts.items() if part.success}
        failed = {rank: part for rank, part in parts.items() if not part.success}
        if not failed:
            self._set_aside(changed, {})
            reply = merged(list(changed.values()))
            assert isinstance(reply, UpdateWeightFromDiskReqOutput)
            return reply
        odd = await self._take_back(changed, question, before, timeout)
        self._set_aside(changed, odd)
        first = next(iter(failed.values()))
        progress = {rid: count for rank in odd for rid, count in changed[rank].progress.items()}
        return msgspec.structs.replace(
            first, message=_account(failed, changed, odd, before), progress=progress
        )

    async def _ask(self, question: UpdateWeightFromDiskReqInput, timeout: float) -> Parts:
        parts = await self._replies.ask_each(question, timeout)
        return {rank: part for rank, part in parts.items() if isinstance(part, UpdateWeightFromDiskReqOutput)}

    async def _take_back(
        self, changed: Parts, question: UpdateWeightFromDiskReqInput, before: Weights, timeout: float
    ) -> dict[int, str]:
        """Give the ranks that changed what they had; those that could not take it, and why."""
        if not changed:
            return {}
        back = UpdateWeightFromDiskReqInput(
            id=new_rid(), model_path=before.model_path, weight_version=before.version,
            flush_cache=question.flush_cache, ranks=tuple(changed),
        )  # fmt: skip
        try:
            parts = await self._ask(back, timeout)
        except Unavailable as error:
            return {rank: error.message for rank in changed if rank not in self._ranks.lost}
        return {rank: part.message for rank, part in parts.items() if not part.success}

    def _set_aside(self, changed: Parts, odd: Mapping[int, str]) -> None:
        """Of the ranks that changed, `odd` ones run what the others do not; the rest runs what all run."""
        aside = {rank: why for rank, why in self._ranks.aside.items() if rank not in changed} | dict(odd)
        if aside != self._ranks.aside:
            self._ranks.aside = aside
            self._tell()


def _account(failed: Parts, changed: Parts, odd: Mapping[int, str], before: Weights) -> str:
    """What became of each rank, in words."""
    whys = dict.fromkeys(part.message for part in failed.values())
    if not changed and len(whys) == 1:
        return next(iter(whys))
    text = JOINT.join(f"data parallel rank {rank}: {part.message}" for rank, part in failed.items())
    back = [str(rank) for rank in changed if rank not in odd]
    if back:
        text += f"; so rank {', '.join(back)} went back to {before.model_path}, version {before.version!r}"
    for rank, why in odd.items():
        text += f"; rank {rank} took them and could not go back ({why}): it gets no requests until an update succeeds"
    return text
