"""POST /v1/chat/completions: messages -> chat template -> prompt ids, and the answer as chat chunks.

Mirrors SGLang's OpenAIServingChat. Simplified: no tools, reasoning parser, multimodal content or
structured output yet (`later` refuses them).
Imports: errors, messages.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any

import msgspec

from sgviz.errors import BadRequest, suggest
from sgviz.messages import GenerateReqInput
from sgviz.serving.arrivals import Arrival
from sgviz.serving.context import EngineOutput, ServingContext
from sgviz.serving.later import On
from sgviz.serving.logprobs import chat_logprobs
from sgviz.serving.openai_base import OpenAIServingBase
from sgviz.serving.openai_stream import OpenAIStream, SentSoFar
from sgviz.serving.protocol import ChatCompletionRequest, ChatMessage, ContentPart
from sgviz.serving.sampling import SAMPLING_NAMES, openai_sampling
from sgviz.serving.serving_base import Exchange, extra_key_of

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# what chat_template_kwargs may not set: each has its own field, is not supported, or is the server's
RESERVED_OPTIONS = ("messages", "tools", "chat_template", "add_generation_prompt", "tokenize")
LATER_PARTS = ("image_url", "input_image", "video_url", "input_audio", "audio_url", "file", "input_file")


class OpenAIServingChat(OpenAIServingBase[ChatCompletionRequest]):
    kind = ChatCompletionRequest
    type_name = "ChatCompletionRequest"
    rid_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    fields = On.CHAT
    public_names = MappingProxyType(
        {**SAMPLING_NAMES, "input_ids": "messages", "top_logprobs_num": "top_logprobs"}
    )

    def __init__(self, context: ServingContext) -> None:
        super().__init__(context)
        # templates are slow enough to hold up the event loop; one thread, as tokenizers are not reentrant
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="chat-template")

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _batch_size(self, request: ChatCompletionRequest) -> None:
        return None

    def _arrival(self, request: ChatCompletionRequest, path: str) -> Arrival:
        return Arrival(
            type=self.type_name,
            path=path,
            stream=bool(request.stream),
            model=request.model or self.context.facts.served_model_name,
            messages=len(request.messages),
            chars=[sum(_chars(message) for message in request.messages)],
        )

    def _public_name(self, param: str, request: ChatCompletionRequest) -> str:
        if param == "max_new_tokens" and request.max_completion_tokens is not None:
            return "max_completion_tokens"
        return super()._public_name(param, request)

    def _validate_request(self, request: ChatCompletionRequest, body: dict[str, Any]) -> None:
        super()._validate_request(request, body)
        if not request.messages:
            raise BadRequest("messages must not be empty", param="messages")
        if request.top_logprobs and not request.logprobs:
            raise BadRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        reserved = next(
            (name for name in RESERVED_OPTIONS if name in (request.chat_template_kwargs or {})), None
        )
        if reserved is not None:
            where = f"chat_template_kwargs.{reserved}"
            raise BadRequest(f"{where} cannot be set by a request", param=where)
        if request.continue_final_message and request.messages[-1].role != "assistant":
            raise BadRequest(
                f"continue_final_message needs a last message of the assistant, "
                f"got one of role {request.messages[-1].role!r}",
                param="continue_final_message",
            )

    async def _convert_to_internal_request(self, request: ChatCompletionRequest) -> GenerateReqInput:
        limit = request.max_completion_tokens
        limit = request.max_tokens if limit is None else limit
        sampling = openai_sampling(request, limit, self.context.facts.default_sampling)
        messages = [_for_template(message, number) for number, message in enumerate(request.messages)]
        loop = asyncio.get_running_loop()
        input_ids = await loop.run_in_executor(self._thread, self._apply_template, request, messages)
        return GenerateReqInput(
            input_ids=input_ids,
            sampling_params=sampling,
            stream=bool(request.stream),
            return_logprob=bool(request.logprobs),
            top_logprobs_num=request.top_logprobs or 0,
            return_text_in_logprobs=True,
            extra_key=extra_key_of(request),
        )

    def _apply_template(self, request: ChatCompletionRequest, messages: list[dict[str, Any]]) -> list[int]:
        options = dict(request.chat_template_kwargs or {})
        if request.reasoning_effort is not None:
            options.setdefault("reasoning_effort", request.reasoning_effort)
        begun = messages.pop()["content"] if request.continue_final_message else ""
        ids = self.context.templates.apply(messages, add_generation_prompt=True, **options)
        return ids + self.context.tokenizer.encode(begun, add_special_tokens=False) if begun else ids

    def _choice(
        self, exchange: Exchange[ChatCompletionRequest], index: int, output: EngineOutput
    ) -> dict[str, Any]:
        message = {
            "role": "assistant",
            "content": output["text"],
            "reasoning_content": None,
            "tool_calls": None,
        }
        logprobs = chat_logprobs(output["meta_info"]) if exchange.request.logprobs else None
        return {"message": message, "logprobs": logprobs}

    def _open_stream(self, exchange: Exchange[ChatCompletionRequest]) -> ChatStream:
        include, continuous = self._usage_options(exchange.request)
        return ChatStream(
            self._head(exchange, self.chunk_name),
            self._usage(exchange),
            exchange.reply,
            include_usage=include,
            continuous=continuous,
        )


class ChatStream(OpenAIStream):
    """Role, deltas of content, finish."""

    def _opening(self, index: int) -> tuple[str, bytes, int] | None:
        return "role", b'"delta":{"role":"assistant","content":""}', 0

    def _delta_body(self, text: str) -> bytes:
        return b'"delta":{"content":' + msgspec.json.encode(text) + b"}"

    def _finish_body(self) -> bytes:
        return b'"delta":{}'

    def _logprobs(self, meta: dict[str, Any], sent: SentSoFar) -> dict[str, Any] | None:
        logprobs = chat_logprobs(meta, sent.tokens)
        if logprobs is not None:
            sent.tokens += len(logprobs["content"])
        return logprobs


def _chars(message: ChatMessage) -> int:
    if isinstance(message.content, list):
        return sum(len(part.text or "") for part in message.content)
    return len(message.content or "")


def _for_template(message: ChatMessage, number: int) -> dict[str, Any]:
    """The message as templates expect it: content always one string, developer as system."""
    where = f"messages[{number}]"
    if message.role not in ROLES:
        allowed = ", ".join(ROLES)
        hint = suggest(message.role, ROLES)
        raise BadRequest(
            f"{where}.role must be one of {allowed}, got {message.role!r}{hint}", param=f"{where}.role"
        )
    out: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _text_of(message.content, f"{where}.content"),
    }
    for name in ("name", "tool_call_id", "tool_calls", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            out[name] = value
    return out


def _text_of(content: str | list[ContentPart] | None, where: str) -> str:
    if isinstance(content, list):
        return "".join(_text_of_part(part, f"{where}[{number}]") for number, part in enumerate(content))
    return content or ""


def _text_of_part(part: ContentPart, where: str) -> str:
    if part.type in LATER_PARTS:
        raise BadRequest(f"{where}: {part.type} is not supported yet (multimodal input)", param=where)
    if part.type != "text":
        raise BadRequest(f"{where}.type must be 'text', got {part.type!r}", param=f"{where}.type")
    if part.text is None:
        raise BadRequest(f"{where}.text: this field is required", param=f"{where}.text")
    return part.text
