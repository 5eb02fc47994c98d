"""What an engine does at its limits, and when something behind it goes wrong."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from leftovers import assert_nothing_left, snapshot

from sgviz.config import Settings
from sgviz.engine import Engine
from sgviz.errors import BadRequest, ConfigError, SgvizError, Unavailable
from sgviz.messages import FlushCacheReqInput

GREEDY = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}


def mock(**settings: Any) -> Engine:
    return Engine("tiny-llama", device="mock", **{"max_total_tokens": 4096, **settings})


def until(condition: Any, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return bool(condition())


def test_an_engine_that_receives_nothing_any_more_counts_as_dead() -> None:
    before = snapshot()
    with mock() as engine:
        server = engine.serve(port=0)
        # a message that belongs to another end, as a fault of the wire would bring
        engine.pipeline.loop.call(_send_to_itself(engine))
        assert engine.pipeline.dead.wait(10)
        assert httpx.get(f"{server.url}/health").status_code == 503
        assert "tokenizer_manager died" in engine.pipeline.status.message
        with pytest.raises(Unavailable, match="receiving from the engine failed"):
            engine.generate("x", GREEDY)
    assert_nothing_left(before, more_files=4)


async def _send_to_itself(engine: Engine) -> None:
    from sgviz.channel import Sender

    pipeline = engine.pipeline
    sender = Sender(pipeline.zmq, pipeline.ports.tokenizer_ipc_name)
    sender.send(FlushCacheReqInput(id="astray"))
    sender.close(1000)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{% if %}", "is no Jinja template"),
        (b"hello", "does not use `messages`"),
        (b"\xff\xfe", "is no UTF-8 text"),
        (None, "cannot be read"),
    ],
)
def test_a_broken_chat_template_stops_the_start(tmp_path: Path, content: bytes | None, words: str) -> None:
    file = tmp_path / "template.jinja"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=words) as caught:
        mock(chat_template=str(file))
    assert caught.value.param == "chat_template" and str(file) in caught.value.message


def test_a_chat_template_of_one_s_own_is_read_once(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    with mock(chat_template=str(file)) as engine:
        file.write_text("{{ nothing.of.this }}")
        reply = engine.chat("abc", max_tokens=2)
        assert reply.usage["prompt_tokens"] == len(engine.pipeline.tokenizer.encode("abc"))


@pytest.mark.parametrize("context_length", [8, 9, 10])
def test_the_smallest_contexts_start(context_length: int) -> None:
    with mock(context_length=context_length) as engine:
        assert engine.generate(input_ids=[1, 2], sampling_params={"max_new_tokens": 3})["output_ids"]


@pytest.mark.parametrize(
    "settings",
    [
        {"context_length": 40, "page_size": 1},
        {"max_total_tokens": 32, "page_size": 1},
        {"max_total_tokens": 32, "page_size": 4},
    ],
)
def test_what_is_asked_for_comes_or_is_refused(settings: dict[str, Any]) -> None:
    with mock(**settings) as engine:
        prompt, limits = [5] * 6, engine.pipeline.manager.limits
        unlimited = engine.chat("x", ignore_eos=True).usage
        assert unlimited["completion_tokens"] == limits.most_new_tokens(unlimited["prompt_tokens"])
        count = limits.most_new_tokens(len(prompt))
        exact = {"max_new_tokens": count, "ignore_eos": True}
        assert len(engine.generate(input_ids=prompt, sampling_params=exact)["output_ids"]) == count
        with pytest.raises(BadRequest, match=f"leave at most {count}") as caught:
            engine.generate(input_ids=prompt, sampling_params={**exact, "max_new_tokens": count + 1})
        assert caught.value.param == "max_new_tokens"


def test_samples_tell_what_was_cached_before_their_request() -> None:
    with mock(enable_cache_report=True) as engine:
        prompt = list(range(10, 30))
        cold = engine.generate(input_ids=prompt, sampling_params={**GREEDY, "n": 3})
        assert [out["meta_info"]["cached_tokens"] for out in cold] == [0, 0, 0]
        warm = engine.generate(input_ids=prompt, sampling_params={**GREEDY, "n": 2})
        alone = engine.generate(input_ids=prompt, sampling_params=GREEDY)
        cached = alone["meta_info"]["cached_tokens"]
        assert [out["meta_info"]["cached_tokens"] for out in warm] == [cached] * 2 and cached == 19
        reply = engine.chat("something new", max_tokens=2, n=2)
        again = engine.chat("something new", max_tokens=2)
        first, second = (r.usage["prompt_tokens_details"]["cached_tokens"] for r in (reply, again))
        assert first < second == reply.usage["prompt_tokens"] - 1


def test_health_probes_are_no_requests_of_the_recording() -> None:
    with mock() as engine:
        server = engine.serve(port=0)
        rid = engine.generate("x", GREEDY)["meta_info"]["id"]
        assert httpx.get(f"{server.url}/health_generate").status_code == 200
        recording = engine.recording()
        assert until(lambda: recording.refresh().batches.rid.str.startswith("HEALTH_CHECK_").any())
        assert recording.rids == list(recording.requests.rid) == [rid]
        probe = next(name for name in recording.batches.rid if name.startswith("HEALTH_CHECK_"))
        assert recording.request(probe).rid == probe and recording.check() == []
        metrics = httpx.get(f"{server.url}/metrics").text
        assert "num_requests" in metrics


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_of_a_list_over_http_are_recorded_one_by_one(stream: bool) -> None:
    with mock() as engine:
        url = engine.serve(port=0).url
        body = {"model": "default", "prompt": ["a", "bcd"], "rid": "R", "max_tokens": 3, "stream": stream}
        assert httpx.post(f"{url}/v1/completions", json=body).status_code == 200
        recording = engine.recording()
        assert until(lambda: set(recording.refresh().requests.status) == {200})
        assert list(recording.requests.rid) == ["R_0", "R_1"]
        for rid, size in (("R_0", 1), ("R_1", 3)):
            types = [step.type for step in recording.journey(rid)]
            assert types[:3] == ["CompletionRequest", "GenerateReqInput", "TokenizedGenerateReqInput"]
            assert f"{size} chars" in recording.journey(rid)[1].holds["prompt"]


def test_server_info_shows_no_key() -> None:
    with mock(api_key="secret-a", admin_api_key="secret-b") as engine:
        server = engine.serve(port=0)
        answer = httpx.get(f"{server.url}/server_info", headers={"Authorization": "Bearer secret-a"})
        assert answer.json()["api_key"] == "***" and "secret" not in answer.text


def test_a_fault_while_draining_is_logged_and_everything_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = mock()

    def broken(reason: str) -> None:
        raise RuntimeError("broken on purpose")

    before_close = snapshot()
    monkeypatch.setattr(engine.pipeline.manager, "refuse_new", broken)
    with caplog.at_level(logging.ERROR):
        engine.pipeline._drain(1.0)
    assert [r.exc_info[1].args for r in caplog.records if r.exc_info] == [("broken on purpose",)]
    monkeypatch.undo()
    engine.close()
    assert before_close
    with pytest.raises((Unavailable, SgvizError, RuntimeError)):
        engine.generate("after", GREEDY)


def test_a_recording_without_events_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no events to record") as caught:
        Settings.build(disable_events=True, record=str(tmp_path / "run.sgv"))
    assert caught.value.param == "record"
    assert Settings.build(disable_events=True).observe.record is None
