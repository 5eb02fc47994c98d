"""The endpoints that pause, reload, profile and measure: their bodies, their levels, SGLang's shapes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from scripted_control import ScriptedControl
from serving_tools import Served, error_of

from sgviz.errors import BadRequest, Unavailable
from sgviz.messages.flow import Load
from sgviz.serving import Keys, ServerState
from sgviz.serving.control_routes import ADMIN_PATHS

READ_PATHS = ("/get_load", "/v1/loads", "/get_weight_version", "/weight_version")


@pytest.fixture
def control(server: Served) -> ScriptedControl:
    return server.manager.control


def posted(server: Served, path: str, body: Any = None) -> Any:
    response = server.http.post(path, json=body) if body is not None else server.http.post(path)
    assert response.status_code == 200, response.text
    return response.json() if response.content else None


# ---------------------------------------------------------------- what they do


def test_pauses(server: Served, control: ScriptedControl) -> None:
    answers = [posted(server, "/pause_generation", body) for body in ({"mode": "retract"}, {}, None)]
    assert [answer["status"] for answer in answers] == ["ok"] * 3 and answers[0]["num_paused_requests"] == 2
    assert posted(server, "/continue_generation", {"torch_empty_cache": True})["status"] == "ok"
    assert posted(server, "/continue_generation")["status"] == "ok"
    calls = ["pause_generation"] * 3 + ["continue_generation"] * 2
    assert [name for name, _ in control.calls] == calls
    assert [arguments for _, arguments in control.calls[:3]] == [("retract",), ("abort",), ("abort",)]


def test_weights(server: Served, control: ScriptedControl) -> None:
    assert server.http.get("/get_weight_version").json() == {"weight_version": "default"}
    body = {"model_path": "other", "weight_version": "v2", "is_async": False, "keep_pause": False}
    answer = posted(server, "/update_weights_from_disk", body)
    assert answer == {"success": True, "message": "as asked", "num_paused_requests": 1}
    options = {"flush_cache": True, "abort_all_requests": False, "weight_version": "v2"}
    assert control.calls == [("update_weights_from_disk", ("other", None, options))]
    for path in ("/get_weight_version", "/weight_version"):
        assert server.http.get(path).json() == {"weight_version": "v2"}
    info = server.http.get("/model_info").json()
    assert (info["weight_version"], info["model_path"]) == ("v2", "other")
    named = posted(server, "/update_weight_version", {"new_version": "v3"})
    assert named["success"] and named["new_version"] == "v3"
    assert server.http.get("/get_weight_version").json() == {"weight_version": "v3"}


def test_weights_that_are_refused(server: Served, control: ScriptedControl) -> None:
    control.failure = BadRequest("hidden_size is 7, not 8", param="model_path")
    response = server.http.post("/update_weights_from_disk", json={"model_path": "other"})
    assert response.status_code == 400 and error_of(response)["param"] == "model_path"
    assert error_of(response)["message"] == "hidden_size is 7, not 8"


def test_profiles(server: Served, control: ScriptedControl) -> None:
    body = {
        "output_dir": "here",
        "num_steps": 2,
        "activities": ["CPU", "GPU"],
        "with_stack": True,
        "profile_id": "p",
    }
    assert posted(server, "/start_profile", body)["path"] == "trace"
    assert posted(server, "/start_profile")["path"] == "trace"
    assert (
        posted(server, "/stop_profile")["path"] == server.http.get("/stop_profile").json()["path"] == "trace"
    )
    options = {"with_stack": True, "record_shapes": False, "profile_id": "p"}
    assert control.calls[0] == ("start_profile", ("here", 2, ["CPU", "GPU"], options))


def test_slowness(server: Served, control: ScriptedControl) -> None:
    for body in ({"forward_sleep_time": 0.5}, {"forward_sleep_time": None}, {}):
        assert posted(server, "/slow_down", body) is None
    assert [arguments for _, arguments in control.calls] == [(0.5,), (None,), (None,)]


LOAD = Load(
    num_running_reqs=2, num_waiting_reqs=3, num_used_tokens=40, num_total_tokens=70, max_total_num_tokens=80,
    gen_throughput=12.5, cache_hit_rate=0.25, max_running_requests=4, grammar=1, paused=0, retracted=2,
    weight_bytes=1 << 30, kv_bytes=1 << 29,
)  # fmt: skip


def test_the_load_in_the_shape_of_old_releases(server: Served, control: ScriptedControl) -> None:
    control.load = LOAD
    assert server.http.get("/get_load").json() == [
        {"rid": None, "dp_rank": 0, "num_reqs": 5, "num_waiting_reqs": 3, "num_tokens": 70}
    ]


def test_the_load_by_sections(server: Served, control: ScriptedControl) -> None:
    control.load = LOAD
    answer = server.http.get("/v1/loads").json()
    assert {"timestamp", "version", "accelerator", "num_accelerators", "loads"} == answer.keys()
    [load] = answer["loads"]
    assert (load["dp_rank"], load["num_running_reqs"], load["token_usage"], load["utilization"]) == (
        0,
        2,
        0.5,
        0.5,
    )
    assert load["memory"] == {"weight_gb": 1.0, "kv_cache_gb": 0.5, "graph_gb": 0.0, "token_capacity": 80}
    assert load["queues"] == {"waiting": 2, "grammar": 1, "paused": 0, "retracted": 2}
    for include, sections in (
        ("core", set()),
        ("queues", {"queues"}),
        ("memory, queues", {"memory", "queues"}),
    ):
        [load] = server.http.get("/v1/loads", params={"include": include, "dp_rank": 0}).json()["loads"]
        assert load.keys() & {"memory", "queues"} == sections


def test_the_load_for_prometheus(server: Served, control: ScriptedControl) -> None:
    control.load = LOAD
    response = server.http.get("/v1/loads?format=prometheus")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = response.text.splitlines()
    assert (
        'sglang_num_running_reqs{dp_rank="0"} 2' in lines and 'sglang_queues_grammar{dp_rank="0"} 1' in lines
    )
    assert lines.count("# TYPE sglang_token_usage gauge") == 1 and len(lines) % 2 == 0


# ---------------------------------------------------------------- what they refuse


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/pause_generation", {"mode": "stop"}, "mode"),
        ("/pause_generation", {"mod": "abort"}, "mod"),
        ("/continue_generation", {"mode": "abort"}, "mode"),
        ("/update_weights_from_disk", {}, "model_path"),
        ("/update_weights_from_disk", {"model_path": 3}, "model_path"),
        ("/update_weights_from_disk", {"model_path": "m", "flush": True}, "flush"),
        ("/update_weights_from_disk", {"model_path": "m", "flush_cache": "yes"}, "flush_cache"),
        ("/update_weights_from_disk", {"model_path": "m", "is_async": True}, "is_async"),
        ("/update_weight_version", {"new_version": None}, "new_version"),
        ("/start_profile", {"num_steps": 1.5}, "num_steps"),
        ("/start_profile", {"activities": ["RPD"]}, "activities[0]"),
        ("/start_profile", {"profile_by_stage": True}, "profile_by_stage"),
        ("/start_profile", {"steps": 3}, "steps"),
        ("/slow_down", {"forward_sleep_time": "1"}, "forward_sleep_time"),
        ("/slow_down", {"seconds": 1}, "seconds"),
    ],
)
def test_unknown_fields_and_bad_values_are_named(
    server: Served, control: ScriptedControl, path: str, body: dict[str, Any], param: str
) -> None:
    response = server.http.post(path, json=body)
    assert response.status_code == 400 and error_of(response)["param"] == param, response.text
    assert param.partition("[")[0] in error_of(response)["message"] and control.calls == []


@pytest.mark.parametrize(
    ("query", "word"), [("include=core,x", "include"), ("dp_rank=1", "dp_rank"), ("format=xml", "format")]
)
def test_queries_for_a_load_that_is_not(server: Served, query: str, word: str) -> None:
    response = server.http.get(f"/v1/loads?{query}")
    assert response.status_code == 400 and word in error_of(response)["message"]


def test_a_dead_engine_is_told(server: Served, control: ScriptedControl) -> None:
    control.failure = Unavailable("the scheduler died (exit code -9)")
    for path in ADMIN_PATHS:
        body = {"model_path": "m"} if "disk" in path else {"new_version": "v"} if "version" in path else {}
        response = server.http.post(path, json=body)
        assert response.status_code == 503 and "the scheduler died" in error_of(response)["message"], path
    server.status.state, server.status.message = ServerState.UNHEALTHY, "the scheduler died"
    for path in ("/get_load", "/v1/loads"):
        assert server.http.get(path).status_code == 503


# ---------------------------------------------------------------- who may


@pytest.fixture(scope="module")
def locked() -> Iterator[Served]:
    served = Served(keys=Keys(api_key="user", admin_api_key="admin"))
    yield served
    served.close()


def test_changing_an_engine_takes_the_admin_key_and_looking_at_it_the_other(locked: Served) -> None:
    def status(path: str, key: str, method: str) -> int:
        headers = {"authorization": f"Bearer {key}"}
        return locked.http.request(
            method, path, headers=headers, json={} if method == "POST" else None
        ).status_code

    for path in ADMIN_PATHS:
        assert status(path, "user", "POST") == status(path, "none", "POST") == 401, path
        assert status(path, "admin", "POST") in (200, 400), path
    for path in READ_PATHS:
        assert status(path, "user", "GET") == 200 and status(path, "none", "GET") == 401, path
