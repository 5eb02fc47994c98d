"""What Python callers give wrongly is refused at once, by the name of the argument."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sgviz.engine import Engine
from sgviz.errors import BadRequest, ConfigError, NeverFits, Unavailable


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine("tiny-llama", device="mock", max_total_tokens=4096) as running:
        yield running


@pytest.mark.parametrize(
    ("call", "param", "said"),
    [
        (lambda e: e.generate(5), "prompt", "got 5"),
        (lambda e: e.generate(["a", 5]), "prompt", "['a', 5]"),
        (lambda e: e.generate(b"abc"), "prompt", "b'abc'"),
        (lambda e: e.generate(input_ids="abc"), "input_ids", "'abc'"),
        (lambda e: e.generate("a", rid="x" * 513), "rid", "513"),
        (lambda e: e.generate("a", rid="\ud800"), "rid", "surrogate"),
        (lambda e: e.generate("a", {"stop": "x" * 4097}), "stop", "4097"),
        (lambda e: e.chat(None), "messages", "None"),
        (lambda e: e.chat("\ud800"), "messages", "surrogate"),
        (lambda e: e.chat("hi", max_tokes=3), "max_tokes", "did you mean 'max_tokens'"),
        (lambda e: e.chat("hi", stream=True), "stream", "stream_sync"),
        (
            lambda e: e.update_weights_from_disk("m", flush_cash=True),
            "flush_cash",
            "did you mean 'flush_cache'",
        ),
        (lambda e: e.start_profile(with_stacks=True), "with_stacks", "did you mean 'with_stack'"),
        (lambda e: e.encode("a", dimension=3), "dimension", "did you mean 'dimensions'"),
        (lambda e: e.slow_down(-1.0), "forward_sleep_time", "between 0 and"),
    ],
)
def test_a_wrong_argument_is_named(
    engine: Engine, call: Callable[[Engine], Any], param: str, said: str
) -> None:
    with pytest.raises(BadRequest) as caught:
        call(engine)
    assert caught.value.param is not None and caught.value.param.split(".")[-1] == param
    assert said in caught.value.message


def test_what_openai_has_and_no_answer_depends_on_is_taken(engine: Engine) -> None:
    reply = engine.chat("hi", max_tokens=2, user="somebody", store=False, temperature=0)
    assert reply.usage["completion_tokens"] == 2


def test_the_default_limit_is_cut_at_the_end_of_the_context_but_a_given_one_refused(engine: Engine) -> None:
    longest = engine.pipeline.manager.limits.max_req_input_len
    ids = [1] * longest
    left = engine.pipeline.manager.limits.most_new_tokens(longest)
    assert 0 < left < 128
    params = {"ignore_eos": True}
    out = engine.generate(input_ids=ids, sampling_params=params)
    assert out["meta_info"]["completion_tokens"] == left
    with pytest.raises(NeverFits, match=f"at most {left}"):
        engine.generate(input_ids=ids, sampling_params={**params, "max_new_tokens": left + 1})
    short = engine.generate("a", params)
    assert short["meta_info"]["completion_tokens"] == 128


@pytest.mark.parametrize("params", [5, "x", [5], [{}, "x"]])
def test_sampling_params_are_dicts(engine: Engine, params: Any) -> None:
    with pytest.raises(BadRequest, match="sampling_params must be a dict"):
        engine.generate(["a", "b"] if isinstance(params, list) else "a", params)


def test_of_several_replies_all_are_in_raw(engine: Engine) -> None:
    reply = engine.chat("hi", n=2, max_tokens=2)
    assert [choice["index"] for choice in reply.raw["choices"]] == [0, 1]
    assert reply.text == (reply.raw["choices"][0]["message"]["content"] or "")


def test_a_text_that_no_cut_makes_fit_is_refused_before_it_is_tokenized(engine: Engine) -> None:
    context = engine.pipeline.manager.limits.context_len
    encode, calls = engine.pipeline.tokenizer.encode, []
    engine.pipeline.tokenizer.encode = lambda *a, **k: calls.append(a) or encode(*a, **k)  # type: ignore[method-assign]
    try:
        with pytest.raises(NeverFits, match=f"at most {256 * context} characters"):
            engine.generate("x" * (256 * context + 1))
        with pytest.raises(BadRequest, match="the messages have"):
            engine.chat("x" * (256 * context + 1))
    finally:
        engine.pipeline.tokenizer.encode = encode  # type: ignore[method-assign]
    assert calls == []


def test_a_closed_engine_says_so() -> None:
    engine = Engine("tiny-llama", device="mock")
    engine.close()
    for use in (
        lambda: engine.abort("x"),
        engine.__enter__,
        lambda: engine.generate("a"),
        lambda: engine.chat("a"),
    ):
        with pytest.raises(Unavailable, match="the engine is closed"):
            use()
    assert "closed" in repr(engine)


def test_a_port_is_a_port(engine: Engine) -> None:
    for port in (-1, 65536):
        with pytest.raises(ConfigError, match="port must be between 0 and 65535"):
            engine.serve(port=port)


def test_a_slower_device_and_another_name_of_the_weights_are_decisions_in_the_recording(
    engine: Engine,
) -> None:
    engine.slow_down(0.001)
    engine.slow_down(None)
    engine.update_weight_version("v2")
    assert engine.generate("a", {"max_new_tokens": 2})["meta_info"]["weight_version"] == "v2"
    for _ in range(200):
        rows = engine.recording().freeze().decisions
        told = rows[rows.verdict.isin(["slowed down", "weights renamed"])]
        if len(told) == 3:
            break
        time.sleep(0.02)
    assert sorted(told.reason) == [
        "each forward waits 0 s",
        "each forward waits 0.001 s",
        "v2, before default",
    ]
    assert engine.recording().freeze().audit().balanced and engine.recording().freeze().check() == []
