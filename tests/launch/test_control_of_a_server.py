"""A real server in processes: paused, given other weights and back, profiled; and what a death leaves of it all."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from jobs import Job
from other_weights import other_weights, without_a_tensor
from server_process import ServerProcess

pytestmark = pytest.mark.slow
PROMPTS = ["Once upon a time", "x", "The quick brown fox"]


@pytest.fixture(scope="module", params=["--disable-overlap-schedule", "--enable-overlap-schedule"])
def server(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    with ServerProcess(request.param) as running:
        yield running


def post(server: ServerProcess, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=60)


def answers_within(server: ServerProcess, seconds: float) -> bool:
    try:
        body = {"text": "x", "sampling_params": {"max_new_tokens": 1}}
        return httpx.post(f"{server.url}/generate", json=body, timeout=seconds).is_success
    except httpx.ReadTimeout:
        return False


def ids(server: ServerProcess, tokens: int = 24) -> list[list[int]]:
    params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    answer = post(server, "/generate", text=PROMPTS, sampling_params=params)
    assert answer.status_code == 200, answer.text
    return [output["output_ids"] for output in answer.json()]


def test_other_weights_there_and_back_are_as_in_a_server_of_their_own(
    server: ServerProcess, tmp_path: Path
) -> None:
    other = str(other_weights(tmp_path / "other"))
    own = ids(server)
    with ServerProcess(model=other) as fresh:
        wanted = ids(fresh)
    assert wanted != own
    for path, version, expected in ((other, "v2", wanted), ("tiny-llama", "v3", own)):
        answer = post(server, "/update_weights_from_disk", model_path=path, weight_version=version)
        assert answer.status_code == 200 and answer.json()["success"], answer.text
        assert ids(server) == expected
        assert httpx.get(f"{server.url}/get_weight_version").json() == {"weight_version": version}
    broken = str(without_a_tensor(tmp_path / "broken"))
    for path, words in (
        (broken, "model.norm.weight"),
        ("tiny-qwen2", "Qwen2ForCausalLM"),
        ("nowhere", "no model"),
    ):
        answer = post(server, "/update_weights_from_disk", model_path=path)
        assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text
        assert ids(server) == own


def test_a_profile_is_in_the_file_that_was_named(server: ServerProcess, tmp_path: Path) -> None:
    begun = post(server, "/start_profile", output_dir=str(tmp_path), num_steps=3, profile_id="run")
    path = Path(begun.json()["path"])
    assert path.parent == tmp_path and post(server, "/start_profile").status_code == 400
    ids(server)
    with gzip.open(path) as file:
        names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
    assert sum(name.startswith("launch #") for name in names) >= 3 and any("aten::" in name for name in names)
    post(server, "/start_profile", output_dir=str(tmp_path), profile_id="again")
    ids(server, 2)
    assert Path(post(server, "/stop_profile").json()["path"]).exists()
    assert post(server, "/stop_profile").status_code == 400


def test_a_paused_server_is_healthy_and_its_load_says_so(server: ServerProcess) -> None:
    whole = ids(server, 200)
    late = Job(ids, server, 200)
    paused = post(server, "/pause_generation", mode="in_place").json()["num_paused_requests"]
    assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200
    [load] = httpx.get(f"{server.url}/v1/loads").json()["loads"]
    assert load["queues"]["paused"] == paused
    assert post(server, "/continue_generation").status_code == 200
    assert late.result() == whole


def test_a_scheduler_that_dies_while_weights_wait_is_an_error_and_no_hang(
    tmp_path: Path,
) -> None:
    other = str(other_weights(tmp_path / "other"))
    with ServerProcess("--device", "mock", "--mock-step-ms", "20") as server:
        params = {"max_new_tokens": 1400, "ignore_eos": True}
        running = Job(lambda: post(server, "/generate", text="x", sampling_params=params))
        held = 0
        while not held:  # until it has begun
            held = httpx.get(f"{server.url}/get_load").json()[0]["num_reqs"]
        weights = Job(
            lambda: post(server, "/update_weights_from_disk", model_path=other)
        )  # waits for `running`
        while answers_within(server, 2.0):  # until it holds up those that come after it
            assert not weights.done
        server.children()["scheduler"].kill()
        for job in (weights, running):
            answer = job.result()
            assert answer.status_code == 503 and "scheduler died" in answer.json()["error"]["message"], (
                answer.text
            )
