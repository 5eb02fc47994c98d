"""Named logit processors through a whole engine: all three bodies, unknown names, failures, refused settings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from sgviz.engine import Engine
from sgviz.errors import BadRequest, ConfigError, SgvizError, StartupError

EXAMPLE = Path(__file__).resolve().parents[2] / "data/logit_processors/only_these.py"
FAILS = """
class Fails:
    def __call__(self, logits, params):
        raise RuntimeError("nothing goes")
"""
NAME = "custom_logit_processor"
GREEDY = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
ONLY: dict[str, Any] = {NAME: "only_these", "custom_params": {"ids": [70, 71]}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6},
    "/v1/completions": {"prompt": "hi", "max_tokens": 6},
    "/generate": {"text": "hi", "sampling_params": {"max_new_tokens": 6}},
}


@pytest.fixture(scope="module", params=[True, False], ids=["normal", "overlap"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    fails = tmp_path_factory.mktemp("processors") / "fails.py"
    fails.write_text(FAILS)
    setting = f"only_these={EXAMPLE}:OnlyThese, fails={fails}:Fails"
    with Engine(
        "tiny-llama",
        torch_threads=1,
        max_total_tokens=2048,
        custom_logit_processors=setting,
        disable_overlap_schedule=request.param,
    ) as made:
        yield made


@pytest.fixture(scope="module")
def http(engine: Engine) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=engine.serve(port=0).url, timeout=60) as client:
        yield client


def test_only_its_own_requests_change(engine: Engine) -> None:
    plain = engine.generate(input_ids=[[5, 6, 7]], sampling_params=GREEDY)[0]["output_ids"]
    outs = [
        engine.async_generate(input_ids=[5, 6, 7], sampling_params={**GREEDY, **params}, **options)
        for params, options in (
            ({}, {}),
            ({"custom_params": {"ids": [70, 71]}}, {NAME: "only_these"}),
            ({"custom_params": {"ids": [99]}}, {NAME: "only_these"}),
        )
    ]
    found = [out["output_ids"] for out in _gathered(outs)]
    assert found[0] == plain
    assert set(found[1]) <= {70, 71} and found[2] == [99] * 6


def _gathered(calls: list[Any]) -> list[Any]:
    import asyncio

    async def all_of() -> list[Any]:
        return await asyncio.gather(*calls, return_exceptions=True)

    return asyncio.run(all_of())


@pytest.mark.parametrize("path", BODIES)
def test_in_every_body(http: httpx.Client, engine: Engine, path: str) -> None:
    answer = http.post(path, json={**BODIES[path], **ONLY})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    text = body["text"] if path == "/generate" else _text(body["choices"][0])
    assert text and set(text) <= set(engine.pipeline.tokenizer.decode([70, 71]))
    streamed = http.post(path, json={**BODIES[path], **ONLY, "stream": True})
    assert streamed.status_code == 200 and streamed.text.rstrip().endswith("[DONE]")


def _text(choice: dict[str, Any]) -> str:
    return choice["text"] if "text" in choice else choice["message"]["content"]


@pytest.mark.parametrize("path", BODIES)
def test_an_unknown_name_is_refused_with_those_there_are(http: httpx.Client, path: str) -> None:
    answer = http.post(path, json={**BODIES[path], NAME: "only_this"})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == NAME
    assert "only_these, fails" in error["message"] and "did you mean 'only_these'" in error["message"]
    assert http.post(path, json={**BODIES[path], NAME: {"code": "x"}}).status_code == 400


@pytest.mark.parametrize("path", BODIES)
def test_one_that_raises_ends_its_request_with_500(http: httpx.Client, path: str) -> None:
    answer = http.post(path, json={**BODIES[path], NAME: "fails"})
    assert answer.status_code == 500
    assert (
        "logit processor 'fails' failed after 0 tokens: RuntimeError: nothing goes"
        in answer.json()["error"]["message"]
    )
    assert http.post(path, json=BODIES[path]).status_code == 200


def test_the_rest_of_the_batch_goes_on(engine: Engine) -> None:
    params = {**GREEDY, "max_new_tokens": 30}
    alone = engine.generate(input_ids=[5, 6, 7], sampling_params=params)["output_ids"]
    calls = [engine.async_generate(input_ids=[5, 6, 7], sampling_params=params) for _ in range(3)]
    wrong = {**params, "custom_params": {"ids": [10**6]}}
    calls += [
        engine.async_generate(input_ids=[5, 6, 7], sampling_params=wrong, **{NAME: "only_these"}),
        engine.async_generate(
            input_ids=[8, 9],
            sampling_params={**params, "custom_params": {"ids": [4]}},
            **{NAME: "only_these"},
        ),
        engine.async_generate(input_ids=[5, 6, 7], sampling_params=params, **{NAME: "fails"}),
    ]
    outs = _gathered(calls)
    assert [out["output_ids"] for out in outs[:3]] == [alone] * 3
    assert outs[4]["output_ids"] == [4] * 30
    for error, status in ((outs[3], 400), (outs[5], 500)):
        assert isinstance(error, SgvizError) and error.status == status
    assert "ids must be integers from 0 to" in outs[3].message
    state = engine.internal_state()
    assert state["num_live_reqs"] == state["protected_tokens"] == state["private_tokens"] == 0


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("params", [None, {}, {"ids": []}, {"ids": ["a"]}, {"ids": [True]}])
def test_params_that_the_processor_does_not_take_are_refused(
    http: httpx.Client, path: str, params: object
) -> None:
    answer = http.post(path, json={**BODIES[path], NAME: "only_these", "custom_params": params})
    error = answer.json()["error"]
    where = "sampling_params.custom_params" if path == "/generate" else "custom_params"
    assert (answer.status_code, error["type"], error["param"]) == (400, "BadRequestError", where)
    assert "'only_these' refuses custom_params: ids must be" in error["message"]


def test_params_that_are_no_json_are_refused(engine: Engine) -> None:
    with pytest.raises(BadRequest, match="custom_params"):
        engine.generate("hi", {"custom_params": {"ids": {1j}}}, **{NAME: "only_these"})
    with pytest.raises(BadRequest, match="at most"):
        engine.generate("hi", {"custom_params": {"text": "x" * 100_000}}, **{NAME: "only_these"})


@pytest.mark.parametrize("device", ["cpu", "mock"])
def test_a_class_that_cannot_be_loaded_stops_the_start(device: str) -> None:
    with pytest.raises((ConfigError, StartupError), match="did you mean 'OnlyThese'"):
        Engine("tiny-llama", device=device, custom_logit_processors=f"x={EXAMPLE}:OnlyThose")
    with pytest.raises(ConfigError, match="must be name=module:Class"):
        Engine("tiny-llama", device=device, custom_logit_processors="x")


@pytest.mark.slow
def test_in_processes() -> None:
    setting = f"only_these={EXAMPLE}:OnlyThese"
    with Engine(
        "tiny-llama", mode="processes", custom_logit_processors=setting, max_total_tokens=512
    ) as engine:
        out = engine.generate(
            input_ids=[5, 6],
            sampling_params={**GREEDY, "custom_params": {"ids": [9]}},
            **{NAME: "only_these"},
        )
        assert out["output_ids"] == [9] * 6
