"""Pauses over HTTP: a paused answer equals an uninterrupted one, and a flush that cannot be is refused, not a crash."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs import Job
from other_weights import other_weights
from pitfall_tools import Json, Served, serving

from sgviz.recording import Cause

LENGTH = 60
PROMPTS = ("Once upon a time", "x", "The quick brown fox jumps over the lazy dog")
loops = pytest.mark.parametrize("loop", ["normal", "overlap"])


@pytest.fixture(params=["normal", "overlap"])
def tiny(request: pytest.FixtureRequest) -> Iterator[Served]:
    with serving(event_loop=request.param, chunked_prefill_size=16) as served:
        yield served
        served.assert_empty()


def body(prompt: str, rid: str, **more: Any) -> Json:
    params = {"temperature": 0, "max_new_tokens": LENGTH, "ignore_eos": True}
    return {"text": prompt, "rid": rid, "sampling_params": params, **more}


def asked(served: Served, name: str, **more: Any) -> list[Job]:
    """Every prompt on its way, and begun."""
    jobs = [
        Job(served.post, "/generate", body(prompt, f"{name}{i}", **more)) for i, prompt in enumerate(PROMPTS)
    ]
    served.until(num_running_reqs=len(PROMPTS))
    return jobs


def posted(served: Served, path: str, **fields: Any) -> Json:
    answer = served.post(path, fields)
    assert answer.status_code == 200, answer.text
    found: Json = answer.json()
    return found


def slowed(served: Served) -> None:
    """Ten milliseconds a forward, so that a pause comes in the middle."""
    assert served.post("/slow_down", {"forward_sleep_time": 0.01}).status_code == 200


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_paused_and_continued_the_answers_are_those_of_an_uninterrupted_run(tiny: Served, mode: str) -> None:
    """sgl-project/sglang#10071, sgl-project/sglang#30673"""
    whole = [tiny.generate(prompt, params={"max_new_tokens": LENGTH})["output_ids"] for prompt in PROMPTS]
    slowed(tiny)
    jobs = asked(tiny, mode)
    held = posted(tiny, "/pause_generation", mode=mode)["num_paused_requests"]
    assert held == len(PROMPTS)
    late = Job(tiny.post, "/generate", body(PROMPTS[0], f"{mode}-late"))
    tiny.until(num_tokenizer_manager_reqs=len(PROMPTS) + 1)
    before = tiny.state()
    assert before["num_paused_reqs"] == len(PROMPTS) and not late.done
    assert tiny.http.get("/health").status_code == 200
    assert tiny.state()["forward_ct"] == before["forward_ct"]
    posted(tiny, "/continue_generation")
    tiny.post("/slow_down", {})
    assert [job.result().json()["output_ids"] for job in jobs] == whole
    assert late.result().json()["output_ids"] == whole[0]
    recording = tiny.engine.recording()
    assert recording.audit().balanced and recording.check() == []
    for rid in (f"{mode}0", f"{mode}-late"):
        explanation = recording.explain(rid)
        assert explanation.by_cause()[Cause.PAUSED] > 0
        assert sum(part.duration_ns for part in explanation.parts) == explanation.total_ns


def test_paused_in_mode_abort_everybody_gets_a_last_word(tiny: Served) -> None:
    """sgl-project/sglang#10071"""
    slowed(tiny)
    jobs = asked(tiny, "a")
    posted(tiny, "/pause_generation", mode="abort")
    for job in jobs:
        answer = job.result().json()
        assert answer["meta_info"]["finish_reason"]["type"] == "abort" and len(answer["output_ids"]) < LENGTH
    tiny.post("/slow_down", {})
    waiting = Job(tiny.post, "/generate", body("x", "later"))
    tiny.until(num_tokenizer_manager_reqs=1)
    assert tiny.post("/flush_cache", {}).status_code == 200  # nobody holds anything
    posted(tiny, "/continue_generation")
    assert len(waiting.result().json()["output_ids"]) == LENGTH


def test_a_flush_while_requests_hold_kv_is_refused_and_they_go_on(tiny: Served) -> None:
    """sgl-project/sglang#12099"""
    slowed(tiny)
    whole = tiny.generate("x", params={"max_new_tokens": LENGTH})["output_ids"]
    jobs = asked(tiny, "f")
    posted(tiny, "/pause_generation", mode="in_place")
    refused = tiny.post("/flush_cache", {})
    assert refused.status_code == 400 and "3 run" in refused.json()["error"]["message"]
    posted(tiny, "/pause_generation", mode="retract")
    assert tiny.post("/flush_cache", {}).status_code == 200
    assert tiny.state()["available_tokens"] == tiny.state()["max_total_num_tokens"]
    posted(tiny, "/continue_generation")
    tiny.post("/slow_down", {})
    assert jobs[1].result().json()["output_ids"] == whole
    assert all(len(job.result().json()["output_ids"]) == LENGTH for job in jobs)


def test_other_weights_in_a_pause_go_on_with_what_was_said(tiny: Served, tmp_path: Path) -> None:
    """The tokens before are those of the old weights, those after of the new, and the answer says where."""
    other = str(other_weights(tmp_path / "other"))
    whole = tiny.generate(PROMPTS[0], params={"max_new_tokens": LENGTH})
    assert whole["meta_info"]["weight_version"] == "default"
    slowed(tiny)
    jobs = asked(tiny, "w")
    posted(tiny, "/pause_generation", mode="retract")
    told = posted(tiny, "/update_weights_from_disk", model_path=other, weight_version="v2")
    assert told["num_paused_requests"] == len(PROMPTS)
    posted(tiny, "/continue_generation")
    tiny.post("/slow_down", {})
    answer = jobs[0].result().json()
    [[place, version]] = answer["meta_info"]["weight_version_changes"]
    assert (version, answer["meta_info"]["weight_version"]) == ("v2", "v2")
    assert answer["output_ids"][:place] == whole["output_ids"][:place]
    prompt = tiny.engine.pipeline.tokenizer.encode(PROMPTS[0]) + answer["output_ids"][:place]
    rest = tiny.generate(prompt, params={"max_new_tokens": LENGTH - place})["output_ids"]
    assert answer["output_ids"][place:] == rest != whole["output_ids"][place:]
    for job in jobs:
        job.result()


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_other_weights_in_a_pause_may_end_everybody_first(tiny: Served, tmp_path: Path, mode: str) -> None:
    """With the flush that is the default, though paused requests held KV when it was asked for."""
    other = str(other_weights(tmp_path / "other"))
    slowed(tiny)
    jobs = asked(tiny, "e")
    posted(tiny, "/pause_generation", mode=mode)
    told = posted(tiny, "/update_weights_from_disk", model_path=other, abort_all_requests=True)
    assert told["num_paused_requests"] == 0
    for job in jobs:
        meta = job.result().json()["meta_info"]
        assert meta["finish_reason"]["type"] == "abort" and "weight_version_changes" not in meta
    posted(tiny, "/continue_generation")
    tiny.post("/slow_down", {})
    assert len(tiny.generate("x", params={"max_new_tokens": LENGTH})["output_ids"]) == LENGTH
