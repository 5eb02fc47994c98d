"""One request through the router: what both servers get, what the client gets, and what is retried."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from upstreams import CHUNKS, Upstream, error_of, rig

from sgviz.errors import ConfigError
from sgviz.recording import load
from sgviz.router.options import RouterOptions, address, prefill_of

JSON = {"content-type": "application/json"}


def test_both_servers_get_one_request_and_the_client_the_decode_sides_answer() -> None:
    async def run() -> None:
        async with rig() as it:
            response = await it.post()
            assert response.status_code == 200 and response.headers["x-side"] == "decode"
            (prefill,), (decode,) = it.prefill[0].asked, it.decode[0].asked
            assert prefill == decode and decode["text"] == "hi"
            assert response.json() == {"from": "decode", "rid": decode["rid"]}
            assert (decode["bootstrap_host"], decode["bootstrap_port"]) == ("127.0.0.1", 4321)
            assert 0 <= decode["bootstrap_room"] < 2**63

    asyncio.run(run())


def test_a_stream_comes_byte_for_byte() -> None:
    async def run() -> None:
        async with rig() as it:
            response = await it.post(stream=True)
            assert response.content == b"".join(CHUNKS)
            assert response.headers["content-type"].startswith("text/event-stream")
            while any(server.requests for server in it.router.router.watch.servers):
                await asyncio.sleep(0.01)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "body", "rooms"),
    [
        ("/generate", {"text": ["a", "b"]}, 2),
        ("/generate", {"input_ids": [1, 2]}, None),
        ("/generate", {"input_ids": [[1], [2], [3]], "sampling_params": {"n": 2}}, 6),
        ("/v1/completions", {"prompt": ["a"]}, 1),
        ("/v1/completions", {"prompt": "a", "n": 3}, 3),
        ("/v1/chat/completions", {"messages": [], "n": 2}, 2),
        ("/v1/chat/completions", {"messages": []}, None),
    ],
)
def test_each_answer_gets_a_room(path: str, body: dict[str, Any], rooms: int | None) -> None:
    async def run() -> None:
        async with rig() as it:
            await it.client.post(it.router.url + path, json=body)
            (asked,) = it.decode[0].asked
            room = asked["bootstrap_room"]
            assert isinstance(room, int) if rooms is None else len(set(room)) == rooms
            assert asked == it.prefill[0].asked[0] and asked.items() >= body.items()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("content", "param"),
    [
        (b"no json", None),
        (b"[1]", None),
        (b'{"text": "a", "bootstrap_room": 1}', "bootstrap_room"),
        (b'{"text": "a", "rid": "HEALTH_CHECK_1"}', "rid"),
        (b'{"text": "a", "rid": 5}', "rid"),
        (b'{"text": "a", "sampling_params": {"n": 1000000000}}', "n"),
    ],
)
def test_a_wrong_body_is_refused_before_any_server_sees_it(content: bytes, param: str | None) -> None:
    async def run() -> None:
        async with rig() as it:
            response = await it.client.post(it.router.url + "/generate", content=content, headers=JSON)
            assert response.status_code == 400 and error_of(response)["param"] == param
            assert not it.decode[0].asked and not it.prefill[0].asked

    asyncio.run(run())


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_unreachable_or_full_server_is_passed_by(side: str) -> None:
    async def run(kill: bool) -> None:
        prefill, decode = [Upstream("prefill"), Upstream("prefill")], [Upstream("decode"), Upstream("decode")]
        async with rig(prefill, decode, health_interval=60.0) as it:
            first = (prefill if side == "prefill" else decode)[0]
            if kill:
                await first.stop()
            else:
                first.status = 503
            assert [(await it.post()).status_code for _ in range(4)] == [200] * 4

    asyncio.run(run(kill=True))
    asyncio.run(run(kill=False))


@pytest.mark.parametrize(
    ("side", "status"), [("prefill", 400), ("prefill", 500), ("decode", 400), ("decode", 500)]
)
def test_a_refusal_goes_to_the_client_and_ends_the_other_side(side: str, status: int) -> None:
    async def run() -> None:
        async with rig() as it:
            sides = {"prefill": it.prefill[0], "decode": it.decode[0]}
            refusing, other = sides.pop(side), next(iter(sides.values()))
            refusing.status, other.hold = status, asyncio.Event()
            response = await it.post(rid="mine")
            words = (
                f"{refusing.url} answered {status}: {side} refuses" if status == 500 else f"{side} refuses"
            )
            assert response.status_code == status and words in error_of(response)["message"]
            await asyncio.wait_for(other.hold.wait(), 10.0)
            assert other.aborted == ["mine"] and len(other.asked) == 1

    asyncio.run(run())


def test_both_are_told_where_both_fail_and_the_status_is_that_of_the_prefill_side() -> None:
    async def run() -> None:
        async with rig([Upstream("prefill", status=507)], [Upstream("decode", status=500)]) as it:
            response = await it.post()
            words = error_of(response)["message"]
            assert "prefill refuses" in words and "decode refuses" in words and response.status_code == 507

    asyncio.run(run())


def test_a_lone_pair_without_its_server_is_a_503_that_names_it_and_it_is_used_again() -> None:
    async def run() -> None:
        async with rig() as it:
            prefill = it.prefill[0]
            assert prefill.handle is not None
            port = prefill.handle.port
            await prefill.stop()
            response = await it.post()
            assert response.status_code == 503 and prefill.url in error_of(response)["message"]
            health = await it.client.get(it.router.url + "/health")
            assert health.status_code == 503 and "prefill" in error_of(health)["message"]
            await prefill.start(port)
            while not it.router.router.has_pair:
                await asyncio.sleep(0.02)
            assert (await it.post()).status_code == 200
            assert (await it.client.get(it.router.url + "/health")).status_code == 200

    asyncio.run(run())


def test_a_stream_that_breaks_off_ends_with_an_error_behind_whole_events() -> None:
    async def run() -> None:
        async with rig([Upstream("prefill", hold=asyncio.Event())], [Upstream("decode", die_after=2)]) as it:
            content = (await it.post(stream=True)).content
            *events, last, nothing = content.split(b"\n\n")
            assert not nothing and events == [CHUNKS[0].strip(), b'data: {"b":1}']
            error = json.loads(last.removeprefix(b"data: "))["error"]
            assert error["code"] == 503 and it.decode[0].url in error["message"]
            assert it.prefill[0].hold is not None
            await asyncio.wait_for(it.prefill[0].hold.wait(), 10.0)  # it was told to abort

    asyncio.run(run())


def test_a_client_that_leaves_ends_both_sides() -> None:
    async def run() -> None:
        prefill, decode = (Upstream(side, hold=asyncio.Event()) for side in ("prefill", "decode"))
        async with rig([prefill], [decode]) as it:
            task = asyncio.create_task(it.post(rid="mine"))
            while not (prefill.asked and decode.asked):
                await asyncio.sleep(0.01)
            task.cancel()
            assert prefill.hold is not None and decode.hold is not None
            await asyncio.wait_for(asyncio.gather(prefill.hold.wait(), decode.hold.wait()), 10.0)
            assert prefill.aborted == decode.aborted == ["mine"]
            while any(server.requests for server in it.router.router.watch.servers):
                await asyncio.sleep(0.01)

    asyncio.run(run())


def test_a_server_of_the_wrong_kind_gets_nothing() -> None:
    async def run() -> None:
        async with rig([Upstream("prefill", mode="null")]) as it:
            response = await it.post()
            assert (
                response.status_code == 503 and "disaggregation_mode is null" in error_of(response)["message"]
            )
            assert not it.decode[0].asked

    asyncio.run(run())


def test_an_answer_that_does_not_begin_in_time_is_a_504() -> None:
    async def run() -> None:
        async with rig(decode=[Upstream("decode", hold=asyncio.Event())], request_timeout=0.3) as it:
            response = await it.post()
            assert response.status_code == 504 and "0.3" in error_of(response)["message"]

    asyncio.run(run())


def test_the_rest_is_passed_on_or_refused() -> None:
    async def run() -> None:
        async with rig() as it:
            models = await it.client.get(it.router.url + "/v1/models")
            assert models.json() == {"data": [{"id": "decode"}]}
            account = (await it.client.get(it.router.url + "/server_info")).json()
            assert account["healthy"] and account["prefill"][0]["bootstrap_port"] == 4321
            refused = await it.client.post(it.router.url + "/pause_generation", json={})
            assert refused.status_code == 404 and "/pause_generation" in error_of(refused)["message"]
            await it.client.post(it.router.url + "/abort_request", json={"rid": "x"})
            assert it.prefill[0].aborted == it.decode[0].aborted == ["x"]

    asyncio.run(run())


def test_the_recording_says_who_got_what(tmp_path: Path) -> None:
    async def run() -> None:
        async with rig(record=str(tmp_path / "router.sgv"), policy="least_requests") as it:
            await it.client.post(it.router.url + "/v1/completions", json={"prompt": ["a", "b"], "rid": "r"})
            (asked,) = it.decode[0].asked
            asks.append((asked["bootstrap_room"], it.prefill[0].url, it.decode[0].url))

    asks: list[tuple[list[int], str, str]] = []
    asyncio.run(run())
    rooms, prefill, decode = asks[0]
    events = load(tmp_path / "router.sgv")._events
    assert {event.component for event in events} == {"router"}
    paired = [event.body for event in events if type(event.body).__name__ == "RouterPaired"]
    assert [(body.rid, body.room) for body in paired] == [("r_0", rooms[0]), ("r_1", rooms[1])]
    assert {(body.prefill, body.decode, body.policy) for body in paired} == {
        (prefill, decode, "least_requests")
    }
    assert paired[0].candidates == ((prefill, "prefill", True, 0), (decode, "decode", True, 0))


def test_the_event_has_the_loads_of_that_moment_and_who_is_lost(tmp_path: Path) -> None:
    async def run() -> list[Any]:
        decode = [
            Upstream("decode", hold=asyncio.Event()),
            Upstream("decode"),
            Upstream("decode", mode="null"),
        ]
        async with rig(
            decode=decode, record=str(tmp_path / "r.sgv"), policy="least_requests", health_interval=60.0
        ) as it:
            task = asyncio.create_task(it.post())
            while not decode[0].asked:
                await asyncio.sleep(0.01)
            await it.post()
            assert decode[0].hold is not None
            decode[0].hold.set()
            await task
            return [(each.url, each.side) for each in (*it.prefill, *decode)]

    servers = asyncio.run(run())
    first, second = [each.body for each in load(tmp_path / "r.sgv")._events if each.kind == "router.paired"]
    loads = [(True, 0), (True, 0), (True, 0), (False, 0)], [(True, 0), (True, 1), (True, 0), (False, 0)]
    for body, expected in zip((first, second), loads):
        found = tuple((*server, *load) for server, load in zip(servers, expected))
        # the first request may have left the prefill server already
        assert [each for each in body.candidates if each[1] == "decode"] == list(found[1:])  # type: ignore[union-attr]
        assert body.candidates[0][:3] == found[0][:3]  # type: ignore[union-attr]
    assert second.decode == servers[2][0]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"prefill": ()}, "--prefill"),
        ({"policy": "best"}, "round_robin"),
        ({"retries": -1}, "--retries"),
        ({"health_interval": 0.0}, "--health-interval"),
        ({"decode": ("http://a:1", "http://a:1")}, "twice"),
        ({"decode": ("http://p:1",)}, "both"),
    ],
)
def test_options_that_cannot_be_are_named(change: dict[str, Any], part: str) -> None:
    good: dict[str, Any] = {"prefill": (("http://p:1", None),), "decode": ("http://d:1",)}
    with pytest.raises(ConfigError, match=part):
        RouterOptions(**{**good, **change})


def test_addresses() -> None:
    assert address("http://a:1/v1/") == "http://a:1"
    assert address("HTTP://A:80") == address("http://a") == "http://a"  # or one server could be given twice
    assert address("https://[FD00::1]:8000/") == "https://[fd00::1]:8000"
    assert prefill_of(["http://a:1", "8998"]) == ("http://a:1", 8998)
    for words in (
        ["a:1"],
        ["http://a:1", "x"],
        ["http://a:1/x"],
        ["http://a:1", "1", "2"],
        ["http://a:99999"],
        ["http://a:1?x=1"],
        ["http://a:1#x"],
        ["http://me:secret@a:1"],
        ["http://a b:1"],
        ["http://:1"],
        ["ftp://a:1"],
        [""],
    ):
        with pytest.raises(ConfigError):
            prefill_of(words)
