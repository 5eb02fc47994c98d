"""Bodies made of the protocol's own structs: right, nearly right and wrong values, and texts that are hardly JSON.

A field that is added to a struct is in the bodies from then on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec import inspect

from sgviz.messages import SamplingParams
from sgviz.serving import control_protocol as control
from sgviz.serving import protocol
from sgviz.serving import vector_protocol as vectors
from sgviz.serving.later import TABLE
from sgviz.serving.session_routes import CloseSessionRequest, OpenSessionRequest

Json = dict[str, Any]
Values = st.SearchStrategy[Any]

INTS = [
    0,
    1,
    2,
    3,
    -1,
    7,
    64,
    128,
    129,
    311,
    312,
    10**6,
    2**31,
    2**53 + 1,
    2**63 - 1,
    2**63,
    2**64,
    -(2**63) - 1,
    10**40,
]
FLOATS = [
    0.0,
    -0.0,
    0.5,
    1.0,
    1.0000001,
    2.5,
    -3.0,
    1e-9,
    5e-324,
    1e308,
    1,
    1.5,
    0.1,
    math.nan,
    math.inf,
    -math.inf,
]
TEXTS = [
    "", " ", "a", "hi", "\x00", "\ud800", "\ufffe", "\u202e", "é" * 40, "🙂" * 9, "a" * 3000, "\n" * 99,
    "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", '{"a":', "[1,", "NaN", "null", "default",
    "%s%n", "{{ 7*7 }}", "{% for x in range(10**9) %}", "[a-z", "(a*)*b", "(a|a)*" * 9, ".{1,9999}", '{"$ref":"#"}',
    "root ::= root", 'root ::= "a" | root "b"', "start: /a*/", "data: [DONE]\n\n", "auto", "required", "none",
]  # fmt: skip
SCHEMAS: list[Any] = [
    {}, True, False, {"$ref": "#"}, {"$ref": "#/$defs/a"}, {"$ref": "http://x/y"}, {"type": "nothing"}, {"type": []},
    {"type": "object", "properties": {"a": {"$ref": "#"}}}, {"allOf": [{"$ref": "#"}]}, {"not": {}}, {"enum": []},
    {"type": "string", "pattern": "(a*)*["}, {"type": "integer", "minimum": 9, "maximum": 1}, {"const": math.nan},
    {"type": "array", "minItems": 10**9}, {"anyOf": [{"type": "string"}] * 50}, {"properties": 5}, {"required": "a"},
    {"type": "string", "maxLength": 10**12}, {"type": "object", "additionalProperties": {"type": "integer"}},
]  # fmt: skip
TAGS: list[Any] = [
    {"structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}], "triggers": ["<f"]},
    {"format": {"type": "any_text", "excludes": ["a"]}}, {"format": {"type": "sequence", "elements": []}},
    {"format": {"type": "tag", "begin": "", "content": {"type": "regex", "pattern": "["}, "end": ""}}, {"format": None},
]  # fmt: skip

numbers = st.one_of(st.sampled_from(INTS), st.integers(-5, 400), st.integers())
floats = st.one_of(st.sampled_from(FLOATS), st.floats(0, 2), st.floats(allow_nan=False, allow_infinity=False))
texts = st.one_of(st.sampled_from(TEXTS), st.text(max_size=12), st.text("ab 1", max_size=6))
scalars = st.one_of(st.none(), st.booleans(), numbers, floats, texts)
anything: Values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=6,
)


def values_of(kind: inspect.Type) -> Values:
    """Values of a field's type, in and out of its limits."""
    match kind:
        case inspect.Metadata():
            return values_of(kind.type)
        case inspect.UnionType():
            return st.one_of([values_of(each) for each in kind.types])
        case inspect.StructType():
            return struct_of(kind.cls)
        case inspect.ListType() | inspect.VarTupleType():
            return st.lists(values_of(kind.item_type), max_size=4)
        case inspect.DictType():
            return st.one_of(st.sampled_from([*SCHEMAS, *TAGS]), st.dictionaries(texts, anything, max_size=3))
        case inspect.LiteralType():
            return st.sampled_from(kind.values)
        case inspect.BoolType():
            return st.booleans()
        case inspect.IntType():
            return numbers
        case inspect.FloatType():
            return st.one_of(floats, st.integers(-3, 3))
        case inspect.StrType():
            return texts
        case inspect.NoneType():
            return st.none()
    return anything


def seldom(one_in: int) -> st.SearchStrategy[bool]:
    return st.sampled_from([False] * (one_in - 1) + [True])


def mostly(right: Values) -> Values:
    """A right value in most cases, else any."""
    return seldom(16).flatmap(lambda wrong: anything if wrong else right)


@st.composite
def struct_of(draw: st.DrawFn, cls: type[msgspec.Struct]) -> Json:
    """All required fields, and some of the others."""
    info = inspect.type_info(cls)
    assert isinstance(info, inspect.StructType)
    needed = [field for field in info.fields if field.required]
    others = [field for field in info.fields if not field.required]
    chosen = (
        draw(st.lists(st.sampled_from(others), max_size=3, unique_by=lambda field: field.name))
        if others
        else []
    )
    return {field.encode_name: draw(mostly(values_of(field.type))) for field in (*needed, *chosen)}


MESSAGES: Json = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
ENDPOINTS: dict[str, tuple[type[msgspec.Struct], list[Json]]] = {
    "/v1/chat/completions": (
        protocol.ChatCompletionRequest,
        [
            MESSAGES,
            {**MESSAGES, "stream": True},
            {**MESSAGES, "tools": [TOOL]},
            {**MESSAGES, "regex": "[0-9]{2}"},
        ],
    ),
    "/v1/completions": (
        protocol.CompletionRequest,
        [
            {"prompt": "hi", "max_tokens": 3},
            {"prompt": ["a", "b"], "max_tokens": 2, "stream": True},
            {"prompt": [5]},
        ],
    ),
    "/generate": (
        protocol.GenerateRequest,
        [
            {"text": "hi", "sampling_params": {"max_new_tokens": 3}},
            {"input_ids": [[5, 6], [7]], "stream": True},
        ],
    ),
    "/tokenize": (protocol.TokenizeRequest, [{"prompt": "hi"}, {"prompt": ["a", ""]}]),
    "/detokenize": (protocol.DetokenizeRequest, [{"tokens": [5, 6]}, {"tokens": [[5], []]}]),
    "/parse_function_call": (protocol.ParseFunctionCallRequest, [{"text": "<tool_call>{", "tools": [TOOL]}]),
    "/separate_reasoning": (protocol.SeparateReasoningRequest, [{"text": "<think>a</think>b"}]),
    "/abort_request": (protocol.AbortRequest, [{"rid": "nobody"}]),
    "/open_session": (OpenSessionRequest, [{"capacity_of_str_len": 100}]),
    "/close_session": (CloseSessionRequest, [{"session_id": "nobody"}]),
    "/v1/embeddings": (vectors.EmbeddingRequest, [{"input": "hi"}, {"input": [[5], [6, 7]]}]),
    "/encode": (vectors.EncodeRequest, [{"text": ["a", "b"]}, {"input_ids": [5]}]),
    "/v1/score": (vectors.ScoringRequest, [{"query": "a", "items": ["b"], "label_token_ids": [5, 6]}]),
    "/v1/rerank": (vectors.RerankRequest, [{"query": "a", "documents": ["b", "c"]}]),
    "/continue_generation": (control.ContinueRequest, [{}]),
    "/update_weight_version": (control.WeightVersionRequest, [{"new_version": "2"}]),
    "/update_weights_from_disk": (control.UpdateWeightsRequest, [{"model_path": "/nowhere"}]),
}
LATER = [line.field for line in TABLE]
SAMPLING = inspect.type_info(SamplingParams)


@st.composite
def body_of(draw: st.DrawFn, path: str) -> Json:
    """A good body with some fields more, changed or gone."""
    cls, good = ENDPOINTS[path]
    body = draw(struct_of(cls))
    if not draw(seldom(4)):
        base = draw(st.sampled_from(good))
        body = {**base, **body, **base} if not draw(seldom(3)) else {**base, **body}
    if path == "/generate" and draw(seldom(2)):
        body["sampling_params"] = draw(struct_of(SamplingParams))
    if draw(seldom(8)):
        body[draw(st.sampled_from([*LATER, "unknown", "", "\ud800"]))] = draw(anything)
    if body and draw(seldom(12)):
        del body[draw(st.sampled_from(sorted(body)))]
    return body


def _twice(text: str, at: int) -> str:
    return "{" + text[1:-1] + ("," if len(text) > 2 else "") + text[1:]


def _deep(text: str, at: int) -> str:
    depth = (10, 200, 5_000, 100_000)[at % 4]
    opened, closed = (("[", "]"), ('{"a":', "}"))[at % 2]
    nested = opened * depth + "1" + closed * depth
    name = ("response_format", "messages", "json_schema", "x", "logit_bias", "tools")[at % 6]
    return f'{{"{name}":{nested},{text[1:]}' if text != "{}" else nested


def _number(text: str, at: int) -> str:
    """Some digit of the text becomes what is hardly a number."""
    digits = [place for place, char in enumerate(text) if char.isdigit()]
    new = ("NaN", "-Infinity", "1e999", "1" * 5000, "0x10", "-", "01", "1.", "1_0", "2e-400")[at % 10]
    place = digits[at % len(digits)] if digits else len(text) - 1
    return text[:place] + new + text[place + 1 :]


MUTATIONS: list[Callable[[str, int], str]] = [
    _twice,
    _deep,
    _number,
    lambda text, at: text[: at % (len(text) + 1)],
    lambda text, at: text + ("}", "x", "\x00", "{}", ",")[at % 5],
    lambda text, at: "\ufeff" + text,
    lambda text, at: text.replace('"', "'"),
    lambda text, at: text.replace("a", ("\\ud83d", "\\u0000", "\\uDC00\\uD800", "\\x")[at % 4], 1),
    lambda text, at: " " * (at % 50_000) + text,
    lambda text, at: ("null", "[]", '"a"', "1", "true", "", "[" * 100_000)[at % 7],
    lambda text, at: text[: at % len(text)] + chr(at % 0xD800) + text[at % len(text) :] if text else text,
]


@st.composite
def payload_of(draw: st.DrawFn, path: str) -> bytes:
    """The bytes of a request; most are JSON."""
    text = json.dumps(draw(body_of(path)), ensure_ascii=not draw(seldom(6)))
    if draw(seldom(8)):
        text = draw(st.sampled_from(MUTATIONS))(text, draw(st.integers(0, 10**6)))
    raw = text.encode("utf-8", "surrogatepass")
    if draw(seldom(40)):
        at = draw(st.integers(0, len(raw)))
        raw = raw[:at] + draw(st.sampled_from([b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf8"])) + raw[at:]
    return raw
