"""SamplingParams: how the next token is chosen and when a request stops.

Field names, defaults and limits are SGLang's. `normalize` and `verify` run once, in the
TokenizerManager; everybody after it may rely on them. Imports: errors.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from sgviz.errors import BadRequest

TOP_K_ALL = 1 << 30
MAX_STOP_STRINGS = 32
MAX_N = 128
GREEDY_BELOW = 1e-6
DEFAULT_NEW_TOKENS = 128  # of SGLang's native request
MAX_STOP_CHARS = 4096  # of one stop string
GRAMMAR_FIELDS = ("json_schema", "regex", "ebnf", "structural_tag")  # at most one of them
JSON_GRAMMARS = ("json_schema", "structural_tag")  # those whose text is JSON
MAX_GRAMMAR_CHARS = 1 << 18  # of the one given
MAX_CUSTOM_BYTES = 1 << 16  # of custom_params, encoded


class SamplingParams(msgspec.Struct, kw_only=True, frozen=True):
    """One request's sampling settings.

    `max_new_tokens` None means up to the end of the context. After `normalize`: `stop` is a tuple,
    greedy is `top_k == 1`, "all" is `TOP_K_ALL`.

    One of `GRAMMAR_FIELDS` puts the output under a grammar: `json_schema` and `structural_tag` are JSON text,
    `regex` must match the whole output, `ebnf` is a grammar text. Whether it compiles is found out by the scheduler.

    `custom_params` are for the request's logit processor, which alone knows what they mean.
    """

    max_new_tokens: int | None = DEFAULT_NEW_TOKENS
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[str, float] | None = None
    stop: str | tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    stream_interval: int | None = None
    n: int = 1
    sampling_seed: int | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    custom_params: dict[str, Any] | None = None

    @property
    def is_greedy(self) -> bool:
        return self.top_k == 1

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings as a tuple (empty when there are none)."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else self.stop

    @property
    def grammar_key(self) -> tuple[str, str] | None:
        """`(field, text)` of the grammar that the output is under, if it is under one."""
        for name in GRAMMAR_FIELDS:
            text = getattr(self, name)
            if text is not None:
                return name, text
        return None

    def normalize(self) -> SamplingParams:
        """Settle the special values."""
        greedy = 0.0 <= self.temperature < GREEDY_BELOW
        top_k = 1 if greedy else (TOP_K_ALL if self.top_k == -1 else self.top_k)
        return msgspec.structs.replace(
            self,
            stop=self.stop_strings,
            stop_token_ids=tuple(sorted(set(self.stop_token_ids or ()))),
            temperature=1.0 if greedy else self.temperature,
            top_k=top_k,
        )

    def verify(self, vocab_size: int) -> None:
        """Raise BadRequest for the first value that is not allowed."""
        for name, low, high, low_open in _RANGES:
            _check_range(name, getattr(self, name), low, high, low_open)
        if self.top_k < 1 and self.top_k != -1:
            raise BadRequest(f"top_k must be -1 (all) or at least 1, got {self.top_k}", param="top_k")
        if self.max_new_tokens is not None and self.max_new_tokens < 0:
            raise BadRequest(
                f"max_new_tokens must be 0 or more, got {self.max_new_tokens}", param="max_new_tokens"
            )
        if self.min_new_tokens < 0 or (
            self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens
        ):
            raise BadRequest(
                f"min_new_tokens must be between 0 and max_new_tokens ({self.max_new_tokens}), "
                f"got {self.min_new_tokens}",
                param="min_new_tokens",
            )
        if not 1 <= self.n <= MAX_N:
            raise BadRequest(f"n must be between 1 and {MAX_N}, got {self.n}", param="n")
        if self.stream_interval is not None and self.stream_interval < 1:
            raise BadRequest(
                f"stream_interval must be at least 1, got {self.stream_interval}", param="stream_interval"
            )
        if len(self.stop_strings) > MAX_STOP_STRINGS:
            raise BadRequest(
                f"at most {MAX_STOP_STRINGS} stop strings, got {len(self.stop_strings)}", param="stop"
            )
        if any(not text for text in self.stop_strings):
            raise BadRequest("a stop string must not be empty", param="stop")
        longest = max(map(len, self.stop_strings), default=0)
        if longest > MAX_STOP_CHARS:
            raise BadRequest(
                f"a stop string may have at most {MAX_STOP_CHARS} characters, got one of {longest}",
                param="stop",
            )
        _check_ids("stop_token_ids", self.stop_token_ids or (), vocab_size)
        _check_bias(self.logit_bias, vocab_size)
        _check_grammar(self)
        _check_custom(self.custom_params)


_RANGES = (
    ("temperature", 0.0, math.inf, False),
    ("top_p", 0.0, 1.0, True),
    ("min_p", 0.0, 1.0, False),
    ("frequency_penalty", -2.0, 2.0, False),
    ("presence_penalty", -2.0, 2.0, False),
    ("repetition_penalty", 0.0, 2.0, True),
)


def _check_range(name: str, value: float, low: float, high: float, low_open: bool) -> None:
    fits = math.isfinite(value) and (value > low if low_open else value >= low) and value <= high
    if not fits:
        left = "(" if low_open else "["
        right = "inf)" if high == math.inf else f"{high:g}]"
        raise BadRequest(f"{name} must be in {left}{low:g}, {right}, got {value}", param=name)


def _check_ids(name: str, ids: tuple[int, ...], vocab_size: int) -> None:
    bad = next((token for token in ids if not 0 <= token < vocab_size), None)
    if bad is not None:
        raise BadRequest(
            f"{name}: token id {bad} is outside the vocabulary (0 to {vocab_size - 1})", param=name
        )


def _check_bias(bias: dict[str, float] | None, vocab_size: int) -> None:
    for key, value in (bias or {}).items():
        longest = len(str(vocab_size))
        if not key.isascii() or not key.isdigit() or len(key) > longest or int(key) >= vocab_size:
            raise BadRequest(
                f"logit_bias: {key[:40]!r} is not a token id (0 to {vocab_size - 1})", param="logit_bias"
            )
        _check_range("logit_bias", value, -100.0, 100.0, False)


def _check_grammar(params: SamplingParams) -> None:
    given = [name for name in GRAMMAR_FIELDS if getattr(params, name) is not None]
    if len(given) > 1:
        raise BadRequest(
            f"at most one of {', '.join(GRAMMAR_FIELDS)}, got {' and '.join(given)}", param=given[1]
        )
    for name in given:
        size = len(getattr(params, name))
        if size > MAX_GRAMMAR_CHARS:
            raise BadRequest(
                f"{name} may have at most {MAX_GRAMMAR_CHARS} characters, got {size}", param=name
            )
        if not size and name != "regex":
            raise BadRequest(f"{name} must not be empty", param=name)
        if name in JSON_GRAMMARS:
            _check_json(name, getattr(params, name))


def _check_custom(params: dict[str, Any] | None) -> None:
    if params is None:
        return
    name = "custom_params"
    try:
        size = len(msgspec.msgpack.encode(params))
    except (TypeError, ValueError, OverflowError, RecursionError, NotImplementedError) as error:
        raise BadRequest(f"{name} must be plain JSON values: {error}", param=name) from None
    if size > MAX_CUSTOM_BYTES:
        raise BadRequest(f"{name} may take at most {MAX_CUSTOM_BYTES} bytes, got {size}", param=name)


def _check_json(name: str, text: str) -> None:
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequest(f"{name} must be JSON: {error}", param=name) from None
    if not isinstance(value, dict) and not (isinstance(value, bool) and name == "json_schema"):
        raise BadRequest(f"{name} must be a JSON object, got {text[:60]}", param=name)
