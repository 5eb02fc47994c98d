"""`sgviz serve --tokenizer-worker-num 2`: one engine behind two processes on one port."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Any

import httpx
import pytest
from server_process import Background, ServerProcess
from worker_tools import LONG, WORKERS, eventually, idle, open_stream, post, recording_of, slow, state

import sgviz
from sgviz.events import schema
from sgviz.recording.explanation import Cause

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def full_speed(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "server" in request.fixturenames:
        slow(request.getfixturevalue("server"), None)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(*WORKERS, "--enable-debugger") as running:
        yield running


async def stream_of(url: str, number: int, **params: Any) -> tuple[list[int], str, int]:
    """Ids and text of a streamed answer, over a connection of its own; and how many pieces it came in."""
    body = {
        "text": f"prompt {number}",
        "stream": True,
        "rid": f"stream-{number}",
        "sampling_params": {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True, **params},
    }
    pieces = []
    async with (
        httpx.AsyncClient(timeout=60) as client,
        client.stream("POST", f"{url}/generate", json=body) as answer,
    ):
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                pieces.append(json.loads(line[6:]))
    return pieces[-1]["output_ids"], pieces[-1]["text"], len(pieces)


def streams(server: ServerProcess, count: int = 40) -> list[tuple[list[int], str, int]]:
    async def all_at_once() -> list[tuple[list[int], str, int]]:
        return await asyncio.gather(*(stream_of(server.url, number) for number in range(count)))

    return asyncio.run(all_at_once())


def brief(rid: str) -> dict[str, Any]:
    return {"text": "x", "rid": rid, "sampling_params": {"max_new_tokens": 3}}


def last_of(lines: Iterator[str]) -> dict[str, Any]:
    found = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    last: dict[str, Any] = found[-1]
    return last


def workers_of(recording: sgviz.Recording) -> dict[str, str]:
    """The component that tokenized each request, by rid."""
    return {
        event.body.rid: event.component
        for event in recording.stamped()
        if isinstance(event.body, schema.RequestDispatched)
    }


# ---------------------------------------------------------------- requests


def test_streams_reach_both_workers_and_are_those_of_one(server: ServerProcess) -> None:
    answers = streams(server)
    with ServerProcess() as alone:
        assert [each[:2] for each in answers] == [each[:2] for each in streams(alone)]
    assert all(pieces > 1 for _, _, pieces in answers)
    eventually(lambda: idle(server))
    recording = recording_of(server)
    tokenized = workers_of(recording)
    mine = {tokenized[f"stream-{number}"] for number in range(40)}
    assert mine == {"tokenizer_manager-1", "tokenizer_manager-2"}
    pids = {
        event.component: event.body.pid
        for event in recording.stamped()
        if isinstance(event.body, schema.ProcessStarted)
    }
    assert len({pids["http-1"], pids["http-2"], pids["scheduler"], pids["http"]}) == 4
    assert pids["http-1"] == pids["tokenizer_manager-1"]
    assert pids["http-1"] == server.children()["http-1"].pid


def test_what_was_recorded_is_whole(server: ServerProcess) -> None:
    streams(server, 8)
    eventually(lambda: idle(server))
    recording = recording_of(server)
    assert recording.check() == []
    assert recording.audit().balanced, recording.audit()
    table = recording.requests.set_index("rid")
    for number in range(8):
        rid = f"stream-{number}"
        assert table.loc[rid, "completion_tokens"] == 12
        assert recording.explain(rid) is not None
        components = [step.component for step in recording.journey(rid)]
        worker = workers_of(recording)[rid].rpartition("-")[2]
        assert {name for name in components if "-" in name} <= {
            f"http-{worker}",
            f"tokenizer_manager-{worker}",
        }


def test_samples_logprobs_vectors_and_sessions_come_back_whole(server: ServerProcess) -> None:
    params = {"max_new_tokens": 6, "temperature": 0.9, "ignore_eos": True, "n": 3}
    for _ in range(6):
        outputs = post(server, "/generate", text="x", sampling_params=params, return_logprob=True).json()
        assert [len(output["output_ids"]) for output in outputs] == [6, 6, 6]
        assert all(len(output["meta_info"]["output_token_logprobs"]) == 6 for output in outputs)
    batch = post(server, "/generate", text=["a", "b", "c", "d"], sampling_params={"max_new_tokens": 2})
    assert len(batch.json()) == 4
    session = post(server, "/open_session", capacity_of_str_len=1000).json()
    turn = {"id": session}
    for _ in range(4):  # of whichever worker
        answer = post(
            server,
            "/generate",
            input_ids=[5, 6],
            session_params=turn,
            sampling_params={"max_new_tokens": 2, "temperature": 0},
        )
        assert answer.status_code == 200, answer.text
        turn = {"id": session, "rid": answer.json()["meta_info"]["id"]}
    assert answer.json()["meta_info"]["prompt_tokens"] > 10
    assert post(server, "/close_session", session_id=session).status_code == 200


def test_a_client_that_leaves_is_gone_for_the_scheduler(server: ServerProcess) -> None:
    for number in range(4):
        with open_stream(server, f"left-{number}"):
            assert state(server)["num_running_reqs"] == 1
        eventually(lambda: idle(server))


def test_a_name_lives_once_and_ends_from_any_connection(server: ServerProcess) -> None:
    with open_stream(server, "mine") as lines:
        refused = [
            post(server, "/generate", text="x", rid="mine", sampling_params={"max_new_tokens": 1})
            for _ in range(8)
        ]
        assert {answer.status_code for answer in refused} == {400}
        assert all("already in use" in answer.json()["error"]["message"] for answer in refused)
        assert post(server, "/abort_request", rid="mine").status_code == 200
        assert last_of(lines)["meta_info"]["finish_reason"]["type"] == "abort"
    with open_stream(server, "fan", n=2) as lines:
        post(server, "/abort_request", rid="fan")
        last_of(lines)
    slow(server)
    with ThreadPoolExecutor(6) as pool:
        many = [
            pool.submit(post, server, "/generate", text="x", rid=f"all-{number}", sampling_params=LONG)
            for number in range(6)
        ]
        eventually(lambda: state(server)["num_running_reqs"] == 6)
        post(server, "/abort_request", abort_all=True)
        reasons = {job.result().json()["meta_info"]["finish_reason"]["type"] for job in many}
    assert reasons == {"abort"}
    eventually(lambda: idle(server))


# ---------------------------------------------------------------- control


def test_a_pause_holds_in_all_workers(server: ServerProcess) -> None:
    with open_stream(server, "held") as lines:
        paused = post(server, "/pause_generation", mode="in_place")
        assert paused.json()["num_paused_requests"] == 1
        late = [
            Background(partial(post, server, "/generate", **brief(f"late-{number}"))) for number in range(8)
        ]
        for _ in range(4):
            assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200
        assert all(job.is_alive() for job in late)
        # held at the doors: the scheduler has heard of none of them
        assert state(server)["num_waiting_reqs"] == 0 and state(server)["num_tokenizer_manager_reqs"] == 1
        assert post(server, "/continue_generation").status_code == 200
        for job in late:
            job.join(60)
            assert job.error is None and job.result is not None and job.result.status_code == 200
        assert post(server, "/pause_generation", mode="abort").json()["num_paused_requests"] == 0
        assert last_of(lines)["meta_info"]["finish_reason"]["type"] == "abort"
        post(server, "/continue_generation")
    eventually(lambda: idle(server))
    recording = recording_of(server)
    pauses = [event for event in recording.stamped() if isinstance(event.body, schema.GenerationPaused)]
    assert {event.component for event in pauses} == {"scheduler", "tokenizer_manager"}
    assert {event.body.requests for event in pauses if event.body.mode == "in_place"} == {1}
    assert recording.audit().balanced and recording.check() == []
    for number in range(8):
        told = recording.explain(f"late-{number}")
        assert told.by_cause()[Cause.PAUSED] > told.total_ns / 2
        ends = [(part.start_ns, part.start_ns + part.duration_ns) for part in told.parts]
        assert all(before[1] == after[0] for before, after in pairwise(ends))
        assert sum(part.duration_ns for part in told.parts) == told.total_ns


def test_weights_change_for_all_workers(server: ServerProcess) -> None:
    with open_stream(server, "across") as lines:
        late = Background(
            lambda: post(
                server,
                "/update_weights_from_disk",
                model_path="tiny-llama",
                weight_version="v2",
                abort_all_requests=True,
            )
        )
        assert last_of(lines)["meta_info"]["finish_reason"]["type"] == "abort"
        late.join(60)
        assert late.result is not None and late.result.json()["success"], late.error
    for version in ("v2", "v3"):
        versions = set()
        for _ in range(8):
            answer = post(server, "/generate", text="x", sampling_params={"max_new_tokens": 1})
            versions.add(answer.json()["meta_info"]["weight_version"])
        assert versions == {version}
        post(server, "/update_weight_version", new_version="v3", abort_all_requests=False)
    refused = post(server, "/update_weights_from_disk", model_path="nowhere")
    assert refused.status_code == 400
    assert (
        post(server, "/generate", text="x", sampling_params={"max_new_tokens": 1}).status_code == 200
    )  # not held
    assert post(server, "/flush_cache").status_code == 200


def test_requests_of_all_workers_are_in_the_log_as_it_is_told(server: ServerProcess) -> None:
    def logged() -> int:
        return server.text().count("request.received")

    for on in (True, False):
        answer = post(server, "/configure_logging", log_requests=on, log_requests_level=0)
        assert answer.json()["log_requests"] is on
        before = logged()
        for _ in range(8):
            post(server, "/generate", text="x", sampling_params={"max_new_tokens": 1})
        eventually(lambda before=before, on=on: logged() == before + (8 if on else 0))


def test_metrics_sum_over_all_workers(server: ServerProcess) -> None:
    def value(name: str, **labels: str) -> float:
        lines = httpx.get(f"{server.url}/metrics", timeout=60).text.splitlines()
        return sum(
            float(line.rpartition(" ")[2])
            for line in lines
            if line.startswith(f"sglang:{name}{{")
            and all(f'{key}="{text}"' in line for key, text in labels.items())
        )

    eventually(lambda: idle(server))
    here = {"endpoint": "/generate", "method": "POST"}
    before = (
        value("http_requests_total", **here),
        value("num_requests_total"),
        value("generation_tokens_total"),
    )
    for _ in range(12):
        post(server, "/generate", text="x", sampling_params={"max_new_tokens": 4, "ignore_eos": True})
    eventually(lambda: value("num_requests_total") == before[1] + 12)
    assert value("http_requests_total", **here) == before[0] + 12
    assert value("generation_tokens_total") == before[2] + 48
    eventually(lambda: value("http_requests_active", **here) == 0)
    assert value("http_responses_total", **here, status_code="200") >= 12


def test_what_the_main_process_owns_comes_through_any_worker(server: ServerProcess) -> None:
    for _ in range(4):
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert "<html" in httpx.get(f"{server.url}/viz").text
        assert httpx.get(f"{server.url}/sgviz/state").status_code == 200
        assert httpx.get(f"{server.url}/no/such/path").json()["error"]["type"] == "NotFoundError"
        assert httpx.head(f"{server.url}/health").status_code == 200
    with httpx.stream("GET", f"{server.url}/sgviz/events?seq=0", timeout=60) as feed:
        lines = feed.iter_lines()
        post(server, "/generate", text="x", rid="while-looking", sampling_params={"max_new_tokens": 1})
        assert any("while-looking" in line for line in lines)
    link = sgviz.connect(server.url)
    with link.debugger() as debugger:
        assert debugger.status.attached
