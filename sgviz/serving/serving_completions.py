"""POST /v1/completions: a prompt (or a list of them) as text or ids, and the answer as text chunks.

Mirrors SGLang's OpenAIServingCompletion. With `echo` the prompt stands before the answer, with
its own log-probabilities if such are wanted. Simplified: no suffix or best_of.
Imports: errors, messages.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import Any

import msgspec

from sgviz.errors import BadRequest
from sgviz.messages import GenerateReqInput
from sgviz.serving.arrivals import Arrival, text_chars
from sgviz.serving.context import EngineOutput
from sgviz.serving.later import On
from sgviz.serving.logprobs import TextOffsets, completion_logprobs, joined, prompt_logprobs
from sgviz.serving.openai_base import OpenAIServingBase
from sgviz.serving.openai_stream import OpenAIStream, SentSoFar, UsageSum
from sgviz.serving.protocol import CompletionRequest, batch_size, prompt_of
from sgviz.serving.reply import Reply
from sgviz.serving.sampling import SAMPLING_NAMES, openai_sampling
from sgviz.serving.serving_base import Exchange, extra_key_of

DEFAULT_MAX_TOKENS = 16


class OpenAIServingCompletion(OpenAIServingBase[CompletionRequest]):
    kind = CompletionRequest
    type_name = "CompletionRequest"
    rid_prefix = "cmpl-"
    object_name = "text_completion"
    chunk_name = "text_completion"
    fields = On.COMPLETION
    public_names = MappingProxyType(
        {**SAMPLING_NAMES, "text": "prompt", "input_ids": "prompt", "top_logprobs_num": "logprobs"}
    )

    def _batch_size(self, request: CompletionRequest) -> int | None:
        return batch_size(request.prompt)

    def _arrival(self, request: CompletionRequest, path: str) -> Arrival:
        prompt = request.prompt
        return Arrival(
            type=self.type_name,
            path=path,
            stream=bool(request.stream),
            model=request.model or self.context.facts.served_model_name,
            chars=text_chars([prompt] if isinstance(prompt, str) else prompt),
        )

    def _validate_request(self, request: CompletionRequest, body: dict[str, Any]) -> None:
        super()._validate_request(request, body)
        prompt_of(request.prompt)
        if request.best_of is not None and request.best_of < (request.n or 1):
            raise BadRequest(
                f"best_of must be at least n ({request.n or 1}), got {request.best_of}", param="best_of"
            )

    async def _convert_to_internal_request(self, request: CompletionRequest) -> GenerateReqInput:
        limit = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
        kind, prompt = prompt_of(request.prompt)
        return GenerateReqInput(
            text=prompt if kind == "text" else None,
            input_ids=prompt if kind == "input_ids" else None,
            sampling_params=openai_sampling(request, limit, self.context.facts.default_sampling),
            stream=bool(request.stream),
            return_logprob=request.logprobs is not None,
            top_logprobs_num=request.logprobs or 0,
            logprob_start_len=0 if request.echo and request.logprobs is not None else -1,
            return_text_in_logprobs=True,
            extra_key=extra_key_of(request),
            priority=request.priority,
            custom_logit_processor=request.custom_logit_processor,
            as_views=True,
        )

    def _choice(
        self, exchange: Exchange[CompletionRequest], index: int, output: EngineOutput
    ) -> dict[str, Any]:
        prefixes = self._echoed(exchange)
        prefix = prefixes[index // self._n(exchange)] if prefixes else ""
        offsets, with_tops = self._offsets(exchange), bool(exchange.request.logprobs)
        prompt = prompt_logprobs(output["meta_info"], offsets, with_tops)
        answer = completion_logprobs(output["meta_info"], offsets, with_tops=with_tops)
        return {"text": prefix + output["text"], "logprobs": joined(prompt, answer)}

    def _open_stream(self, exchange: Exchange[CompletionRequest]) -> CompletionStream:
        include, continuous = self._usage_options(exchange.request)
        return CompletionStream(
            self._head(exchange, self.chunk_name),
            self._usage(exchange),
            exchange.reply,
            include_usage=include,
            continuous=continuous,
            prefixes=self._echoed(exchange),
            n=self._n(exchange),
            with_tops=bool(exchange.request.logprobs),
            offsets=partial(self._offsets, exchange),
        )

    def _offsets(self, exchange: Exchange[CompletionRequest]) -> TextOffsets:
        """For one choice."""
        keep = exchange.request.skip_special_tokens is False
        return TextOffsets(partial(self.context.tokenizer.decode, skip_special_tokens=not keep))

    def _echoed(self, exchange: Exchange[CompletionRequest]) -> list[str]:
        """The text of each prompt, to go before its answers; none without `echo`."""
        if not exchange.request.echo:
            return []
        obj = exchange.obj
        if obj.text is not None:
            return [obj.text] if isinstance(obj.text, str) else obj.text
        ids = [obj.input_ids] if obj.is_single else obj.input_ids
        keep = exchange.request.skip_special_tokens is False
        decode = self.context.tokenizer.decode
        return [decode(prompt, skip_special_tokens=not keep) for prompt in ids or []]  # type: ignore[arg-type]


class CompletionStream(OpenAIStream):
    """The echoed prompt if asked for, deltas of text, finish."""

    def __init__(
        self,
        head: dict[str, Any],
        usage: UsageSum,
        reply: Reply,
        *,
        include_usage: bool,
        continuous: bool,
        prefixes: list[str],
        n: int,
        with_tops: bool,
        offsets: Callable[[], TextOffsets],
    ) -> None:
        super().__init__(head, usage, reply, include_usage=include_usage, continuous=continuous)
        self._prefixes = prefixes
        self._n = n
        self._with_tops = with_tops
        self._new_offsets = offsets
        self._offsets: dict[int, TextOffsets] = {}

    def _opening(self, index: int) -> tuple[str, bytes, int] | None:
        if not self._prefixes:
            return None
        prefix = self._prefixes[index // self._n]
        return "delta", self._delta_body(prefix), len(prefix)

    def _delta_body(self, text: str) -> bytes:
        return b'"text":' + msgspec.json.encode(text)

    def _finish_body(self) -> bytes:
        return b'"text":""'

    def _opening_logprobs(self, index: int, meta: dict[str, Any]) -> dict[str, Any] | None:
        offsets = self._offsets[index] = self._new_offsets()
        return prompt_logprobs(meta, offsets, self._with_tops)

    def _logprobs(self, index: int, meta: dict[str, Any], sent: SentSoFar) -> dict[str, Any] | None:
        logprobs = completion_logprobs(meta, self._offsets[index], sent.tokens, self._with_tops)
        if logprobs is not None:
            sent.tokens += len(logprobs["tokens"])
        return logprobs
