"""POST /v1/chat/completions: messages -> chat template -> prompt ids, and the answer as chat chunks.

Mirrors SGLang's OpenAIServingChat. Simplified: no multimodal content yet (it is refused).
Imports: errors, messages.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any

from sgviz.errors import BadRequest, NeverFits, suggest
from sgviz.messages import GenerateReqInput
from sgviz.messages.generate import MAX_TOKEN_CHARS
from sgviz.serving.arrivals import Arrival
from sgviz.serving.chat_plan import ChatPlanner
from sgviz.serving.chat_stream import ChatStream, finish_reason_of, message_of
from sgviz.serving.context import EngineOutput, ServingContext
from sgviz.serving.later import On
from sgviz.serving.logprobs import chat_logprobs
from sgviz.serving.openai_base import OpenAIServingBase
from sgviz.serving.protocol import ChatCompletionRequest, ChatMessage, ContentPart
from sgviz.serving.response_format import grammar_of
from sgviz.serving.sampling import SAMPLING_NAMES, openai_sampling
from sgviz.serving.serving_base import Exchange, extra_key_of
from sgviz.serving.tools import calls_for_template, mode_of, tools_for_template

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
        self._planner = ChatPlanner(context.tokenizer, context.tool_call_parser, context.reasoning_parser)
        # templates are slow enough to hold up the event loop; one thread, as they gain nothing from more
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
            chars=[sum(len(message.text) for message in request.messages)],
        )

    def _public_name(self, param: str, request: ChatCompletionRequest) -> str:
        if param == "max_new_tokens" and request.max_completion_tokens is not None:
            return "max_completion_tokens"
        if (param, mode_of(request)) in (("json_schema", "required"), ("structural_tag", "auto")):
            return "tools" if request.tools and grammar_of(request) == {} else param
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
        self._planner.check(request)

    async def _convert_to_internal_request(self, request: ChatCompletionRequest) -> GenerateReqInput:
        limit = request.max_completion_tokens
        limit = request.max_tokens if limit is None else limit
        sampling = openai_sampling(request, limit, self.context.facts.default_sampling)
        sampling = self._planner.sampling(request, sampling)
        messages = [_for_template(message, number) for number, message in enumerate(request.messages)]
        self._check_chars(request)
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
            priority=request.priority,
            custom_logit_processor=request.custom_logit_processor,
            as_views=True,
            require_reasoning=sampling.grammar_key is not None
            and self._planner.require_reasoning(request, input_ids),
        )

    def _check_chars(self, request: ChatCompletionRequest) -> None:
        """Refuse what can't fit however it is cut into tokens, before a template and a tokenizer work on it."""
        context = self.context.facts.context_len
        chars, most = sum(len(message.text) for message in request.messages), context * MAX_TOKEN_CHARS
        if chars > most:
            raise NeverFits(
                f"the messages have {chars} characters; this model's maximum context length is {context} tokens, "
                f"which is at most {most} characters",
                param="messages",
            )

    def _apply_template(self, request: ChatCompletionRequest, messages: list[dict[str, Any]]) -> list[int]:
        options = dict(request.chat_template_kwargs or {})
        if request.reasoning_effort is not None:
            options.setdefault("reasoning_effort", request.reasoning_effort)
        if request.tools and mode_of(request) != "none":
            options["tools"] = tools_for_template(request.tools)
        begun = messages.pop()["content"] if request.continue_final_message else ""
        ids = self.context.templates.apply(messages, add_generation_prompt=True, **options)
        return ids + self.context.tokenizer.encode(begun, add_special_tokens=False) if begun else ids

    def _choice(
        self, exchange: Exchange[ChatCompletionRequest], index: int, output: EngineOutput
    ) -> dict[str, Any]:
        plan = self._planner.plan(exchange.request, exchange.obj)
        message = message_of(plan, self.context.tokenizer, output)
        logprobs = chat_logprobs(output["meta_info"]) if exchange.request.logprobs else None
        return {"message": message, "logprobs": logprobs}

    def _finish_reason(self, content: dict[str, Any], reason: str) -> str:
        return finish_reason_of(reason, calls=bool(content["message"]["tool_calls"]))

    def _open_stream(self, exchange: Exchange[ChatCompletionRequest]) -> ChatStream:
        include, continuous = self._usage_options(exchange.request)
        return ChatStream(
            self._head(exchange, self.chunk_name),
            self._usage(exchange),
            exchange.reply,
            include_usage=include,
            continuous=continuous,
            plan=self._planner.plan(exchange.request, exchange.obj),
            codec=self.context.tokenizer,
        )


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
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            out[name] = value
    if message.tool_calls is not None:
        out["tool_calls"] = calls_for_template(message.tool_calls)
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
