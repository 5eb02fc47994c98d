"""What a chat request's tools and thoughts come to: sampling under a grammar, and how its answers are read.

Mirrors the parser and constraint choices of SGLang's OpenAIServingChat.
Imports: errors, function_call, messages, reasoning.
"""

from __future__ import annotations

import functools

import msgspec

from sgviz.errors import BadRequest
from sgviz.function_call import FORMATS, JsonArrayDetector, detector_of
from sgviz.messages import GenerateReqInput, SamplingParams
from sgviz.reasoning import ReasoningFormat, format_of
from sgviz.serving.answer_parts import AnswerPlan
from sgviz.serving.context import Tokenizer
from sgviz.serving.protocol import ChatCompletionRequest
from sgviz.serving.tools import check_tools, demanded, demanded_schema, mode_of

TAIL_TOKENS = 16  # of a prompt; enough for a marker and white space, in letters too


class ChatPlanner:
    """Plans requests for one server.

    Args:
        tool_call_parser, reasoning_parser: the server's formats, by name; None: it has none.
    """

    def __init__(
        self, tokenizer: Tokenizer, tool_call_parser: str | None, reasoning_parser: str | None
    ) -> None:
        self._tokenizer = tokenizer
        self._detector = None if tool_call_parser is None else detector_of(tool_call_parser)
        self._form = None if reasoning_parser is None else format_of(reasoning_parser)
        self._hides = functools.cache(self._is_special)

    def check(self, request: ChatCompletionRequest) -> None:
        """Raise BadRequest for tools, or a choice among them, that this server cannot answer."""
        check_tools(request.tools or [])
        auto = mode_of(request) == "auto"
        strict = next((at for at, tool in enumerate(request.tools or []) if tool.function.strict), None)
        if auto and strict is not None:
            where = f"tools[{strict}].function.strict"
            raise BadRequest(
                f"{where} is not supported yet with tool_choice 'auto'; 'required' and a named function hold to "
                "the schema",
                param=where,
            )
        if auto and self._detector is None:
            raise BadRequest(
                "tools with tool_choice 'auto' need a server that was started with --tool-call-parser "
                f"({', '.join(FORMATS)}); 'none', 'required' and a named function do without",
                param="tools",
            )

    def sampling(self, request: ChatCompletionRequest, params: SamplingParams) -> SamplingParams:
        """`params` as the request's tools and thoughts need them."""
        if mode_of(request) == "required":
            if params.grammar_key is not None:
                raise BadRequest(
                    "a call is demanded, which is JSON of its own kind: tool_choice 'required' or a named "
                    "function cannot be combined with another format of the output",
                    param="tool_choice",
                )
            params = msgspec.structs.replace(params, json_schema=demanded_schema(request))
        if any(map(self._hides, self._plan(request, params).markers)):
            params = msgspec.structs.replace(params, skip_special_tokens=False)
        return params

    def plan(self, request: ChatCompletionRequest, obj: GenerateReqInput) -> AnswerPlan:
        """How the answers to `obj`, made of `request`, are read."""
        assert isinstance(obj.sampling_params, SamplingParams)
        plan = self._plan(request, obj.sampling_params)
        if plan.form is None:
            return plan
        return msgspec.structs.replace(plan, inside=self._inside(plan.form, request, obj))

    def _plan(self, request: ChatCompletionRequest, params: SamplingParams) -> AnswerPlan:
        mode = mode_of(request)
        tools = demanded(request) if mode == "required" else [tool.function for tool in request.tools or []]
        detector = {"none": None, "auto": self._detector, "required": JsonArrayDetector}[mode]
        # under a grammar the answer begins at once
        thinks = request.separate_reasoning is not False and params.grammar_key is None
        return AnswerPlan(
            detector=detector,
            names=tuple(function.name for function in tools),
            one_call=request.parallel_tool_calls is False,
            form=self._form if thinks else None,
            stream_reasoning=request.stream_reasoning is not False,
        )

    def _inside(
        self, form: ReasoningFormat, request: ChatCompletionRequest, obj: GenerateReqInput
    ) -> bool | None:
        """Whether the prompt ends inside of thoughts, or right behind them; None: it does not say."""
        if request.continue_final_message:
            begun = request.messages[-1].text
            inside = form.inside_after(begun)
            if inside is not None:
                return inside
        tail = [token for token in (obj.input_ids or [])[-TAIL_TOKENS:] if isinstance(token, int)]
        return form.inside_at_end(self._tokenizer.decode(tail, skip_special_tokens=False))

    def _is_special(self, marker: str) -> bool:
        """Whether `skip_special_tokens` leaves `marker`, or a part of it, out of the text."""
        ids = self._tokenizer.encode(marker, add_special_tokens=False)
        decode = self._tokenizer.decode
        return decode(ids, skip_special_tokens=True) != decode(ids, skip_special_tokens=False)
