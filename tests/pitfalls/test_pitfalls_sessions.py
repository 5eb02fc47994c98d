"""The session API over HTTP: what the next turn sees, what is refused, and that nothing stays behind."""

from __future__ import annotations

import pytest
from pitfall_tools import Served, opened, serving

from sgviz.engine import Engine
from sgviz.errors import BadRequest
from sgviz.events.schema import SessionClosed, SessionTurn

pytestmark = pytest.mark.slow
GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
FIRST, SECOND = [10, 11, 12, 13, 14], [20, 21]


def open_session(server: Served, **more: object) -> str:
    answer = server.post("/open_session", {"capacity_of_str_len": 5000, **more})
    assert answer.status_code == 200, answer.text
    name = answer.json()
    assert isinstance(name, str) and name
    return name


def turn(server: Served, ids: list[int], rid: str, /, **params: object) -> dict:
    return server.generate(ids, params=GREEDY, rid=rid, session_params=params)


def test_a_conversation_equals_one_that_the_client_puts_together(server: Served) -> None:
    """And its prefix is a hit, token for token."""
    name = open_session(server)
    one = turn(server, FIRST, "s1-a", id=name)
    two = turn(server, SECOND, "s1-b", id=name, rid="s1-a")
    whole = FIRST + one["output_ids"] + SECOND
    assert two["meta_info"]["prompt_tokens"] == len(whole)
    assert two["meta_info"]["cached_tokens"] >= len(FIRST) + len(one["output_ids"]) - 1
    assert two["output_ids"] == server.generate(whole, params=GREEDY)["output_ids"]
    branch = turn(server, [30], "s1-c", id=name, rid="s1-a", drop_previous_output=True)
    assert branch["output_ids"] == server.generate([*FIRST, 30], params=GREEDY)["output_ids"]
    cut = turn(server, [30], "s1-d", id=name, rid="s1-b", offset=3)
    assert cut["output_ids"] == server.generate([*FIRST[:3], 30], params=GREEDY)["output_ids"]
    steps = {step.type: step.holds for step in server.engine.recording().journey("s1-b")}
    assert f"{name}: {len(whole) - 2} ids of s1-a, then 2 own" == steps["Req"]["session"]
    assert server.post("/close_session", {"session_id": name}).status_code == 200


def test_closed_and_unknown_ids_give_400(server: Served) -> None:
    """sgl-project/sglang#36475, sgl-project/sglang#36552"""
    name = open_session(server, session_id="mine")
    assert name == "mine"
    assert server.post("/open_session", {"capacity_of_str_len": 5, "session_id": "mine"}).status_code == 400
    turn(server, FIRST, "s2-a", id=name)

    def refused(stream: bool = False, **params: object) -> str:
        body = {"input_ids": SECOND, "sampling_params": GREEDY, "session_params": params, "stream": stream}
        answer = server.post("/generate", body)
        assert answer.status_code == 400 or stream, answer.text
        assert stream or answer.json()["error"]["param"].startswith("session_params"), answer.text
        return answer.text

    assert "'nobody'" in refused(id="nobody")
    assert "'nobody'" in refused(id=name, rid="nobody")
    assert '"code":400' in refused(True, id="nobody").replace(" ", "")
    more = ({"offset": "x"}, {"extra": 1}, {"replace": 1}, {"rid": 5})
    for wrong in ({}, {"id": ""}, {"id": 3}, *({"id": name, **field} for field in more)):
        assert "session_params" in refused(**wrong)
    both = {"input_ids": SECOND, "sampling_params": {**GREEDY, "n": 2}, "session_params": {"id": name}}
    assert server.post("/generate", both).status_code == 400
    assert server.post("/close_session", {"session_id": name}).status_code == 200
    assert "'mine'" in refused(id=name, rid="s2-a")
    assert server.post("/close_session", {"session_id": name}).status_code == 400
    size = "capacity_of_str_len"
    for wrong in ({}, {size: 0}, {size: "many"}, {size: 9, "timeout": -1}, {size: 9, "session_id": ""}):
        assert server.post("/open_session", wrong).status_code == 400
    chat = {
        "model": "tiny-llama",
        "messages": [{"role": "user", "content": "a"}],
        "session_params": {"id": name},
    }
    assert server.post("/v1/chat/completions", chat).status_code == 400


def test_a_client_that_leaves_during_a_turn_leaves_what_is_documented(server: Served) -> None:
    """The aborted turn is a turn with what it had; the one before is as it was. sgl-project/sglang#36475"""
    name = open_session(server)
    one = turn(server, FIRST, "s3-a", id=name)
    left = {
        "input_ids": SECOND, "sampling_params": {**GREEDY, "max_new_tokens": 1500}, "stream": True, "rid": "s3-b",
        "session_params": {"id": name, "rid": "s3-a"},
    }  # fmt: skip
    connection = opened(server.url, "/generate", left)
    server.until(num_running_reqs=1)
    connection.recv(4096)
    connection.close()
    server.until_idle()
    before = FIRST + one["output_ids"] + SECOND
    after = turn(server, [40], "s3-c", id=name, rid="s3-b")
    turns = {told.rid: told for told in server.events_of(SessionTurn)}
    had = turns["s3-c"].context_tokens - len(before)
    assert had > 0 and after["meta_info"]["prompt_tokens"] == len(before) + had + 1
    again = turn(server, SECOND, "s3-d", id=name, rid="s3-a")
    assert again["output_ids"] == server.generate(before, params=GREEDY)["output_ids"]
    assert server.post("/close_session", {"session_id": name}).status_code == 200
    assert server.post("/flush_cache", {}).status_code == 200


def test_a_streaming_session_goes_on_from_the_last_whole_turn(server: Served) -> None:
    name = open_session(server, streaming=True)
    one = turn(server, FIRST, "s4-a", id=name)
    two = turn(server, SECOND, "s4-b", id=name)
    whole = FIRST + one["output_ids"] + SECOND
    assert two["output_ids"] == server.generate(whole, params=GREEDY)["output_ids"]
    assert server.post("/close_session", {"session_id": name}).status_code == 200


def test_python_says_the_same_and_sessions_end_with_the_engine() -> None:
    engine = Engine("tiny-llama", torch_threads=1, max_total_tokens=2048)
    try:
        name = engine.open_session(1000)
        one = engine.generate(input_ids=FIRST, sampling_params=GREEDY, rid="a", session_params={"id": name})
        two = engine.generate(
            input_ids=[SECOND, [50]],
            sampling_params=GREEDY,
            rid=["b", "c"],
            session_params={"id": name, "rid": "a"},
        )
        plain = engine.generate(
            input_ids=[FIRST + one["output_ids"] + own for own in (SECOND, [50])], sampling_params=GREEDY
        )
        assert [out["output_ids"] for out in two] == [out["output_ids"] for out in plain]
        with pytest.raises(BadRequest, match="has no turn"):
            engine.generate(input_ids=[1], session_params={"id": name, "rid": "zzz"})
        with pytest.raises(BadRequest, match="10 characters"):
            small = engine.open_session(4)
            engine.generate(input_ids=list(range(97, 107)), session_params={"id": small})
        with pytest.raises(BadRequest, match="'zzz'"):
            engine.close_session("zzz")
        ring = engine.pipeline.ring
    finally:
        engine.close()
    closed = [e.body for e in ring.snapshot() if isinstance(e.body, SessionClosed)]
    assert {body.session_id: body.why for body in closed} == dict.fromkeys((name, small), "the engine stops")


def test_sessions_in_processes() -> None:
    """The same over sockets."""
    with serving(mode="processes", max_total_tokens=2048) as served:
        name = open_session(served, timeout=60)
        one = turn(served, FIRST, "p-a", id=name)
        two = turn(served, SECOND, "p-b", id=name, rid="p-a")
        assert two["meta_info"]["prompt_tokens"] == len(FIRST) + len(one["output_ids"]) + 2
        assert served.post("/close_session", {"session_id": name}).status_code == 200
        served.assert_empty()
