"""The parts of chat answers: deltas of content, thoughts and calls in a stream, and the message of a whole one.

Mirrors the streaming half of SGLang's OpenAIServingChat.
Imports: function_call, reasoning.
"""

from __future__ import annotations

import uuid
from typing import Any

import msgspec

from sgviz.function_call import CallArguments, CallStart, Content, gather
from sgviz.reasoning import Thought
from sgviz.serving.answer_parts import AnswerParser, AnswerPlan, Codec, Part, ThoughtCount
from sgviz.serving.context import EngineOutput
from sgviz.serving.logprobs import chat_logprobs
from sgviz.serving.openai_stream import Delta, OpenAIStream, SentSoFar, UsageSum
from sgviz.serving.reply import Reply

encode = msgspec.json.encode
TOOL_CALLS = "tool_calls"  # finish_reason of an answer that ended by itself and calls functions


def new_call_id() -> str:
    """A fresh id of a call."""
    return f"call_{uuid.uuid4().hex[:24]}"


def finish_reason_of(reason: str, calls: bool) -> str:
    """The finish_reason of an answer with or without calls, `reason` being the engine's."""
    return TOOL_CALLS if calls and reason == "stop" else reason


class ChoiceReader:
    """Parser and count of one choice."""

    def __init__(self, plan: AnswerPlan, codec: Codec) -> None:
        self._parser = AnswerParser(plan)
        self._count = None if plan.form is None else ThoughtCount(plan.form, codec)
        self.calls = 0

    def read(self, text: str, output: EngineOutput) -> list[Part]:
        """What new `text` comes to; `meta_info` of `output` gets the tokens of reasoning so far."""
        meta = output["meta_info"]
        parts = self._parser.feed(text)
        if meta["finish_reason"]:
            parts += self._parser.finish()
        self.calls += sum(isinstance(part, CallStart) for part in parts)
        if self._count is not None and self._parser.reasoning is not None:
            tokens = self._count.of(self._parser.reasoning, output["output_ids"])
            output["meta_info"] = {**meta, "reasoning_tokens": tokens}
        return parts


def message_of(plan: AnswerPlan, codec: Codec, output: EngineOutput) -> dict[str, Any]:
    """The message of a whole answer."""
    parts = ChoiceReader(plan, codec).read(output["text"], output)
    thoughts = "".join(part.text for part in parts if isinstance(part, Thought))
    content, calls = gather(part for part in parts if not isinstance(part, Thought))
    return {
        "role": "assistant",
        "content": content or (None if calls else ""),
        "reasoning_content": thoughts or None,
        "tool_calls": [
            {
                "id": new_call_id(),
                "type": "function",
                "function": {"name": call.name, "arguments": call.parameters},
            }
            for call in calls
        ]
        or None,
    }


class ChatStream(OpenAIStream):
    """Role, deltas, finish."""

    def __init__(
        self,
        head: dict[str, Any],
        usage: UsageSum,
        reply: Reply,
        *,
        include_usage: bool,
        continuous: bool,
        plan: AnswerPlan,
        codec: Codec,
    ) -> None:
        super().__init__(head, usage, reply, include_usage=include_usage, continuous=continuous)
        self._plan = plan
        self._codec = codec
        self._readers: dict[int, ChoiceReader] = {}

    def _opening(self, index: int) -> Delta:
        return "role", b'"delta":{"role":"assistant","content":""}', 0

    def _delta_body(self, text: str) -> bytes:
        return b'"delta":{"content":' + encode(text) + b"}" if text or self._plan.plain else b'"delta":{}'

    def _finish_body(self) -> bytes:
        return b'"delta":{}'

    def _deltas(self, index: int, text: str, output: EngineOutput) -> list[Delta]:
        if self._plan.plain:
            return super()._deltas(index, text, output)
        reader = self._readers.get(index)
        if reader is None:
            reader = self._readers[index] = ChoiceReader(self._plan, self._codec)
        parts = reader.read(text, output)
        self._usage.note(index, output["meta_info"])
        return [self._delta(part) for part in parts]

    def _delta(self, part: Part) -> Delta:
        match part:
            case Thought(text):
                return "reasoning", b'"delta":{"reasoning_content":' + encode(text) + b"}", len(text)
            case CallStart(index, name):
                return "tool_call", _call(encode(_opened_call(index, name))), len(name)
            case CallArguments(index, text):
                return (
                    "tool_call",
                    _call(b'{"index":%d,"function":{"arguments":%b}}' % (index, encode(text))),
                    len(text),
                )
            case Content(text):
                return "delta", self._delta_body(text), len(text)

    def _finish_reason(self, index: int, reason: str) -> str:
        reader = self._readers.get(index)
        return finish_reason_of(reason, reader is not None and reader.calls > 0)

    def _logprobs(self, index: int, meta: dict[str, Any], sent: SentSoFar) -> dict[str, Any] | None:
        logprobs = chat_logprobs(meta, sent.tokens)
        if logprobs is not None:
            sent.tokens += len(logprobs["content"])
        return logprobs


def _call(content: bytes) -> bytes:
    return b'"delta":{"tool_calls":[' + content + b"]}"


def _opened_call(index: int, name: str) -> dict[str, Any]:
    function = {"name": name, "arguments": ""}
    return {"index": index, "id": new_call_id(), "type": "function", "function": function}
