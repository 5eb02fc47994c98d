"""POST /generate: SGLang's native request and answer, the engine's dicts as they are.

Mirrors the `/generate` handler of SGLang's http_server and the checks of `GenerateReqInput`.
Imports: errors, messages.
"""

from __future__ import annotations

from typing import Any

from sgviz.errors import BadRequest
from sgviz.messages import GenerateReqInput, SamplingParams
from sgviz.messages.generate import new_rid
from sgviz.messages.sampling import DEFAULT_NEW_TOKENS
from sgviz.messages.session import session_params_of
from sgviz.serving.arrivals import Arrival, text_chars
from sgviz.serving.context import EngineOutput
from sgviz.serving.later import On, refuse_later
from sgviz.serving.protocol import GenerateRequest, batch_size, ids_of
from sgviz.serving.reply import Reply
from sgviz.serving.sampling import NATIVE_NAMES, native_sampling
from sgviz.serving.serving_base import DONE, Exchange, ServingBase, extra_key_of, sse

# fields that may be lists, one entry a prompt; token_ids_logprob is one in any case
PER_PROMPT = (
    "rid",
    "sampling_params",
    "return_logprob",
    "top_logprobs_num",
    "logprob_start_len",
    "session_params",
)


class ServingGenerate(ServingBase[GenerateRequest]):
    kind = GenerateRequest
    type_name = "GenerateReqInput"

    public_names = NATIVE_NAMES

    def _rid(self, request: GenerateRequest) -> str | list[str]:
        return request.rid or new_rid()

    def _batch_size(self, request: GenerateRequest) -> int | None:
        return batch_size(request.input_ids if request.text is None else request.text)

    def _arrival(self, request: GenerateRequest, path: str) -> Arrival:
        return Arrival(
            type=self.type_name,
            path=path,
            stream=bool(request.stream),
            model=self.context.facts.served_model_name,
            chars=text_chars([request.text] if isinstance(request.text, str) else request.text or []),
        )

    def _validate_request(self, request: GenerateRequest, body: dict[str, Any]) -> None:
        refuse_later(body, On.GENERATE)
        if (request.text is None) == (request.input_ids is None):
            given = "neither" if request.text is None else "both"
            raise BadRequest(f"give exactly one of text and input_ids, got {given}", param="text")
        if request.text == []:
            raise BadRequest("text must not be an empty list", param="text")
        if request.input_ids is not None:
            ids_of(request.input_ids, "input_ids")
        size = self._batch_size(request)
        for name in PER_PROMPT:
            _check_length(name, getattr(request, name), size)
        _check_top_logprobs(request.top_logprobs_num, self.context.facts.vocab_size)

    async def _convert_to_internal_request(self, request: GenerateRequest) -> GenerateReqInput:
        return GenerateReqInput(
            text=request.text,
            input_ids=request.input_ids,
            sampling_params=_sampling(request.sampling_params, request.custom_params),
            stream=bool(request.stream),
            return_logprob=request.return_logprob or False,
            top_logprobs_num=request.top_logprobs_num or 0,
            logprob_start_len=-1 if request.logprob_start_len is None else request.logprob_start_len,
            token_ids_logprob=request.token_ids_logprob,
            return_text_in_logprobs=bool(request.return_text_in_logprobs),
            extra_key=extra_key_of(request),
            priority=request.priority,
            session_params=session_params_of(request.session_params),
            custom_logit_processor=request.custom_logit_processor,
            require_reasoning=bool(request.require_reasoning),
            default_new_tokens=DEFAULT_NEW_TOKENS,
        )

    def _whole_answer(self, exchange: Exchange[GenerateRequest], outputs: list[EngineOutput]) -> Any:
        params = exchange.obj.sampling_params
        fans_out = (params[0] if isinstance(params, list) else params).n > 1
        return outputs[0] if exchange.obj.is_single and not fans_out else outputs

    def _open_stream(self, exchange: Exchange[GenerateRequest]) -> NativeStream:
        return NativeStream(exchange.reply)


class NativeStream:
    """Each output as one event; text is cumulative, as in SGLang."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._chars: dict[int, int] = {}

    def events_of(self, output: EngineOutput) -> bytes:
        index = output.get("index") or 0
        meta = output["meta_info"]
        chars = len(output.get("text") or "")
        part = "finish" if meta["finish_reason"] else "delta"
        self._reply.sent(meta["id"], index, part, chars - self._chars.get(index, 0))
        self._chars[index] = chars
        return sse(output)

    def closing(self) -> bytes:
        self._reply.sent(self._reply.rid, 0, "done")
        return DONE


def _check_length(name: str, value: object, size: int | None) -> None:
    if not isinstance(value, list):
        return
    if size is None:
        raise BadRequest(f"{name} must not be a list for a single prompt", param=name)
    if len(value) != size:
        raise BadRequest(f"{name} has {len(value)} entries for {size} prompts", param=name)


def _check_top_logprobs(value: int | list[int] | None, vocab_size: int) -> None:
    for number in value if isinstance(value, list) else [value or 0]:
        if not 0 <= number <= vocab_size:
            raise BadRequest(
                f"top_logprobs_num must be between 0 and {vocab_size}, got {number}", param="top_logprobs_num"
            )


def _sampling(
    given: dict[str, Any] | list[dict[str, Any]] | None, custom_params: dict[str, Any] | None
) -> SamplingParams | list[SamplingParams]:
    """`custom_params` are for those that bring none of their own."""
    common = {"custom_params": custom_params}
    if isinstance(given, list):
        return [
            native_sampling({**common, **params}, f"sampling_params[{number}]")
            for number, params in enumerate(given)
        ]
    return native_sampling({**common, **(given or {})})
