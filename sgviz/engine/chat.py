"""What `Engine.chat` takes and gives back. Imports: errors, messages, serving (the names of the body)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from sgviz.errors import BadRequest, suggest
from sgviz.messages.rids import check_unicode
from sgviz.serving.later import TABLE, On
from sgviz.serving.protocol import ChatCompletionRequest

# what OpenAI's body has besides and an answer here does not depend on
IGNORED = ("metadata", "prediction", "service_tier", "store", "user", "verbosity")


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


def chat_body(messages: str | Sequence[Mapping[str, Any]], params: Mapping[str, Any]) -> dict[str, Any]:
    """The body of an unstreamed chat completion.

    Over HTTP unknown fields are ignored, as clients expect; here one is a slip of the pen.

    Raises:
        BadRequest: no messages, half a surrogate pair in one, or an unknown parameter.
    """
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, Sequence):
        raise BadRequest(f"messages must be a text or a list of messages, got {messages!r}", param="messages")
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, str):
            check_unicode("messages", content)
    later = [line.field for line in TABLE if line.on & On.CHAT]
    known = {*ChatCompletionRequest.__struct_fields__, *later, *IGNORED} - {"messages", "stream"}
    unknown = next((name for name in params if name not in known), None)
    if unknown is not None:
        hint = "; `stream_sync` streams" if unknown == "stream" else suggest(unknown, sorted(known))
        raise BadRequest(f"chat: unknown parameter {unknown!r}{hint}", param=unknown)
    return {"messages": list(messages), **params, "stream": False}
