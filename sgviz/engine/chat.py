"""What `Engine.chat` gives back. Imports: msgspec only."""

from __future__ import annotations

from typing import Any

import msgspec


class ChatReply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `Engine.chat`; prints as its text. `raw` is the whole OpenAI object, `rid` its id."""

    text: str
    rid: str
    finish_reason: str
    usage: dict[str, Any]
    raw: dict[str, Any]

    def __str__(self) -> str:
        return self.text

    @classmethod
    def of(cls, raw: dict[str, Any]) -> ChatReply:
        """From a chat.completion object with one choice or more; the first one counts."""
        choice = raw["choices"][0]
        return cls(
            text=choice["message"]["content"] or "",
            rid=raw["id"],
            finish_reason=choice["finish_reason"],
            usage=raw["usage"],
            raw=raw,
        )
