"""What a chat request's tools and thoughts come to: sampling under a grammar, and how its answers are read.

Mirrors the parser and constraint choices of SGLang's OpenAIServingChat.
Imports: errors, function_call, messages, reasoning.
"""

from __future__ import annotations

import functools
import json

import msgspec

from sgviz.errors import BadRequest
from sgviz.function_call import FORMATS, JsonArrayDetector, detector_of
from sgviz.messages import GenerateReqInput, SamplingParams
from sgviz.reasoning import ReasoningFormat, format_of
from sgviz.serving.answer_parts import AnswerPlan
from sgviz.serving.context import Tokenizer
from sgviz.serving.protocol import ChatCompletionRequest
from sgviz.serving.tools import (
    check_tools,
    demanded,
    demanded_schema,
    is_strict,
    mode_of,
    strict_specs,
)

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
        if mode_of(request) != "auto":
            return
        if self._detector is None:
            raise BadRequest(
                "tools with tool_choice 'auto' need a server that was started with --tool-call-parser "
                f"({', '.join(FORMATS)}); 'none', 'required' and a named function do without",
                param="tools",
            )
        strict = next((at for at, tool in enumerate(request.tools or []) if tool.function.strict), None)
        if strict is not None and self._detector.structure is None:
            where = f"tools[{strict}].function.strict"
            able = ", ".join(name for name, detector in FORMATS.items() if detector.structure is not None)
            raise BadRequest(
                f"{where} with tool_choice 'auto' needs calls in a format that a grammar can hold to a schema "
                f"(--tool-call-parser {able}), and this server's is none; 'required' and a named function hold to "
                "the schema in any case",
                param=where,
            )

    def sampling(self, request: ChatCompletionRequest, params: SamplingParams) -> SamplingParams:
        """`params` as the request's tools and thoughts need them."""
        mode = mode_of(request)
        if mode == "required":
            if params.grammar_key is not None:
                raise BadRequest(
                    "a call is demanded, which is JSON of its own kind: tool_choice 'required' or a named "
                    "function cannot be combined with another format of the output",
                    param="tool_choice",
                )
            params = msgspec.structs.replace(params, json_schema=demanded_schema(request))
        elif mode == "auto" and is_strict(request):
            params = self._strict(request, params)
        if any(map(self._hides, self._plan(request).markers)):
            params = msgspec.structs.replace(params, skip_special_tokens=False)
        return params

    def require_reasoning(self, request: ChatCompletionRequest, input_ids: list[int]) -> bool | None:
        """Whether the answer begins inside of thoughts, behind which a grammar holds; None: it may begin with some."""
        if self._form is None:
            return False
        inside = self._inside(self._form, request, input_ids)
        return True if inside is None and self._form.starts_inside else inside

    def plan(self, request: ChatCompletionRequest, obj: GenerateReqInput) -> AnswerPlan:
        """How the answers to `obj`, made of `request`, are read."""
        plan = self._plan(request)
        if plan.form is None:
            return plan
        ids = [token for token in obj.input_ids or [] if isinstance(token, int)]
        return msgspec.structs.replace(plan, inside=self._inside(plan.form, request, ids))

    def _strict(self, request: ChatCompletionRequest, params: SamplingParams) -> SamplingParams:
        """`params` under the grammar of the calls that strict tools allow."""
        assert self._detector is not None and self._detector.structure is not None
        if params.grammar_key is not None:
            raise BadRequest(
                "tools are strict, for which the output is under a grammar of their calls: they cannot be combined "
                "with another format of the output",
                param="tools",
            )
        several = request.parallel_tool_calls is not False
        tag = self._detector.structure(strict_specs(request), several=several)
        return msgspec.structs.replace(params, structural_tag=json.dumps({"format": tag}))

    def _plan(self, request: ChatCompletionRequest) -> AnswerPlan:
        mode = mode_of(request)
        tools = demanded(request) if mode == "required" else [tool.function for tool in request.tools or []]
        detector = {"none": None, "auto": self._detector, "required": JsonArrayDetector}[mode]
        return AnswerPlan(
            detector=detector,
            names=tuple(function.name for function in tools),
            one_call=request.parallel_tool_calls is False,
            form=None if request.separate_reasoning is False else self._form,
            stream_reasoning=request.stream_reasoning is not False,
        )

    def _inside(
        self, form: ReasoningFormat, request: ChatCompletionRequest, input_ids: list[int]
    ) -> bool | None:
        """Whether the prompt ends inside of thoughts, or right behind them; None: it does not say."""
        if request.continue_final_message:
            begun = request.messages[-1].text
            inside = form.inside_after(begun)
            if inside is not None:
                return inside
        return form.inside_at_end(self._tokenizer.decode(input_ids[-TAIL_TOKENS:], skip_special_tokens=False))

    def _is_special(self, marker: str) -> bool:
        """Whether `skip_special_tokens` leaves `marker`, or a part of it, out of the text."""
        ids = self._tokenizer.encode(marker, add_special_tokens=False)
        decode = self._tokenizer.decode
        return decode(ids, skip_special_tokens=True) != decode(ids, skip_special_tokens=False)
