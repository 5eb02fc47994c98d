"""What a data parallel rank sends, with the rank on it. Imports: channel, messages."""

from __future__ import annotations

import msgspec

from sgviz.channel import Sender


class RankSender:
    """A Sender of the scheduler with number `rank`: whatever can tell its rank does."""

    def __init__(self, sender: Sender, rank: int) -> None:
        self._sender = sender
        self._rank = rank

    def send(self, message: msgspec.Struct) -> None:
        if "dp_rank" in message.__struct_fields__:
            message.dp_rank = self._rank  # type: ignore[attr-defined]
        self._sender.send(message)
