"""Servers that fail before, at and after the first token, and clients that leave: who hears of it, and what is told."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import random
import socket
from pathlib import Path

import httpx2
import openai
import pytest
from upstreams import CHUNKS, Rig, Upstream, error_of, rig

from sgviz.recording import load
from sgviz.router.options import RouterOptions
from sgviz.router.router import _found_dead
from sgviz.router.servers import SILENT_LOOKS, Watch

QUICK = {"health_interval": 0.05, "health_timeout": 0.2}


async def idle(it: Rig) -> None:
    """Until no request is under way, neither here nor there."""
    router = it.router.router
    async with asyncio.timeout(10.0):
        while (
            any(server.requests for server in router.watch.servers) or len(router.rooms) or len(router.names)
        ):
            await asyncio.sleep(0.01)


def test_attempts_are_bounded_and_each_has_its_own_pair_and_room(tmp_path: Path) -> None:
    async def run() -> None:
        full = [Upstream("decode", status=503) for _ in range(5)]
        async with rig(decode=full, retries=3, record=str(tmp_path / "r.sgv")) as it:
            response = await it.post(rid="mine")
            assert response.status_code == 503 and error_of(response)["message"] == "decode refuses"
            await idle(it)
            assert sorted(len(each.asked) for each in full) == [0, 1, 1, 1, 1]
            rooms = [asked["bootstrap_room"] for asked in it.prefill[0].asked]
            assert len(set(rooms)) == 4 and it.prefill[0].aborted.count("mine") <= 4

    asyncio.run(run())
    paired = [each.body for each in load(tmp_path / "r.sgv")._events if each.kind == "router.paired"]
    assert [body.attempt for body in paired] == [1, 2, 3, 4]  # type: ignore[union-attr]
    assert len({body.decode for body in paired}) == 4  # type: ignore[union-attr]


def test_no_retries_means_one_attempt() -> None:
    async def run() -> None:
        async with rig(decode=[Upstream("decode", status=503), Upstream("decode")], retries=0) as it:
            assert [(await it.post()).status_code for _ in range(2)] == [503, 200]

    asyncio.run(run())


def test_a_full_decode_server_is_not_mistaken_for_the_prefill_sides_failure() -> None:
    async def run() -> None:
        prefill = Upstream("prefill", status=500)
        async with rig(
            [prefill], [Upstream("decode", status=503), Upstream("decode", hold=asyncio.Event())]
        ) as it:
            prefill.status = 200
            it.decode[0].hold = asyncio.Event()
            task = asyncio.create_task(it.post())
            while not it.decode[0].asked:
                await asyncio.sleep(0.01)
            it.decode[0].hold.set()  # it says 503 now
            while not it.decode[1].asked:
                await asyncio.sleep(0.01)
            assert it.decode[1].hold is not None
            it.decode[1].hold.set()
            assert (await task).status_code == 200

    asyncio.run(run())


def test_a_lost_server_is_left_out_and_taken_back() -> None:
    async def run() -> None:
        async with rig(decode=[Upstream("decode"), Upstream("decode")], **QUICK) as it:
            first = it.decode[0]
            assert first.handle is not None
            port = first.handle.port
            server = it.router.router.watch.decode[0]
            await first.stop()
            async with asyncio.timeout(10.0):
                while server.healthy:
                    await asyncio.sleep(0.02)
            assert [(await it.post()).status_code for _ in range(3)] == [200] * 3 and server.given == 0
            await first.start(port)
            async with asyncio.timeout(10.0):
                while not server.healthy:
                    await asyncio.sleep(0.02)
            for _ in range(4):
                await it.post()
            assert len(first.asked) == 2

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_hangs_before_the_first_token_is_left_for_another(stream: bool) -> None:
    async def run() -> None:
        stuck = Upstream("decode", hold=asyncio.Event())
        async with rig(decode=[stuck, Upstream("decode")], **QUICK) as it:
            task = asyncio.create_task(it.post(stream=stream))
            while not stuck.asked:
                await asyncio.sleep(0.01)
            stuck.quiet = True
            response = await asyncio.wait_for(task, 20.0)
            assert response.status_code == 200 and len(it.decode[1].asked) == 1
            await idle(it)

    asyncio.run(run())


def test_a_stream_of_a_server_that_hangs_ends_with_an_error() -> None:
    async def run() -> None:
        stuck = Upstream("decode", stuck=True)
        async with rig(decode=[stuck], **QUICK) as it:
            task = asyncio.create_task(it.post(stream=True))
            while not stuck.asked:
                await asyncio.sleep(0.01)
            stuck.quiet = True
            content = (await asyncio.wait_for(task, 20.0)).content
            assert content.startswith(CHUNKS[0])
            error = json.loads(content.split(b"\n\n")[-2].removeprefix(b"data: "))["error"]
            assert error["code"] == 503 and stuck.url in error["message"]
            await idle(it)

    asyncio.run(run())


def test_a_server_that_is_slow_but_alive_is_waited_for() -> None:
    async def run() -> None:
        async with rig(decode=[Upstream("decode", hold=asyncio.Event())], **QUICK) as it:
            task = asyncio.create_task(it.post())
            await asyncio.sleep(1.0)  # more than three looks take
            assert not task.done() and it.decode[0].hold is not None
            it.decode[0].hold.set()
            assert (await task).status_code == 200

    asyncio.run(run())


def test_an_answer_that_takes_too_long_is_ended_on_both_sides() -> None:
    async def run() -> None:
        sides = [Upstream(side, hold=asyncio.Event()) for side in ("prefill", "decode")]
        async with rig([sides[0]], [sides[1]], request_timeout=0.3) as it:
            assert (await it.post(rid="slow", stream=True)).status_code == 504
            await idle(it)
            assert all(side.aborted == ["slow"] and len(side.asked) == 1 for side in sides)

    asyncio.run(run())


def test_a_client_that_leaves_a_stream_ends_it_at_the_servers() -> None:
    async def run() -> None:
        prefill, decode = Upstream("prefill", hold=asyncio.Event()), Upstream("decode", stuck=True)
        async with rig([prefill], [decode]) as it:
            body = {"text": "hi", "stream": True, "rid": "mine"}
            async with it.client.stream("POST", it.router.url + "/generate", json=body) as response:
                assert await anext(response.aiter_raw()) == CHUNKS[0]
            await idle(it)
            assert prefill.aborted == ["mine"]
            async with asyncio.timeout(10.0):
                while not decode.left:
                    await asyncio.sleep(0.01)

    asyncio.run(run())


def test_each_rid_of_a_batch_is_aborted_on_both_sides() -> None:
    async def run() -> None:
        sides = [Upstream(side, hold=asyncio.Event()) for side in ("prefill", "decode")]
        async with rig([sides[0]], [sides[1]]) as it:
            task = asyncio.create_task(it.post(text=["a", "b"], rid=["one", "two"]))
            while not all(side.asked for side in sides):
                await asyncio.sleep(0.01)
            task.cancel()
            await idle(it)
            assert all(side.aborted == ["one", "two"] for side in sides)

    asyncio.run(run())


def test_a_name_in_use_is_refused_and_its_owner_goes_on() -> None:
    async def run() -> None:
        sides = [Upstream(side, hold=asyncio.Event()) for side in ("prefill", "decode")]
        async with rig([sides[0]], [sides[1]]) as it:
            task = asyncio.create_task(it.post(text=["a", "b"], rid="mine"))
            while not all(side.asked for side in sides):
                await asyncio.sleep(0.01)
            for taken in ("mine", "mine_1", ["other", "mine_0"]):
                text = ["a", "b"] if isinstance(taken, list) else "a"
                response = await it.post(text=text, rid=taken)
                assert response.status_code == 400 and error_of(response)["param"] == "rid"
                assert "is already in use" in error_of(response)["message"]
            for side in sides:
                assert len(side.asked) == 1 and not side.aborted and side.hold is not None
                side.hold.set()
            assert (await task).status_code == 200
            await idle(it)
            for _ in range(3):  # and free at once when its answer is there
                assert (await it.post(rid="mine")).status_code == 200
            assert (await it.post(rid="mine", stream=True)).status_code == 200
            assert (await it.post(rid=["mine"], text=["a"])).status_code == 200

    asyncio.run(run())


def test_rooms_are_free_again_after_good_and_bad_ends() -> None:
    async def run() -> None:
        async with rig() as it:
            await it.post(text=["a", "b"], stream=True)
            it.decode[0].status = 400
            await it.post(text=["a", "b"])
            await idle(it)

    asyncio.run(run())


def test_a_router_that_stops_ends_streams_with_an_error_event() -> None:
    async def run() -> bytes:
        async with rig(decode=[Upstream("decode", stuck=True)]) as it:
            response = it.client.stream(
                "POST", it.router.url + "/generate", json={"text": "hi", "stream": True}
            )
            async with response as stream:
                pieces = stream.aiter_raw()
                got = await anext(pieces)
                stop = asyncio.create_task(it.router.server.stop(0.1))
                async with asyncio.timeout(20.0):
                    async for piece in pieces:
                        got += piece
                await stop
            return got

    *_, last, nothing = asyncio.run(run()).split(b"\n\n")
    error = json.loads(last.removeprefix(b"data: "))["error"]
    assert not nothing and error["code"] == 503 and "shutting down" in error["message"]


def test_a_router_that_stops_refuses_what_has_not_begun() -> None:
    async def run() -> None:
        async with rig(decode=[Upstream("decode", hold=asyncio.Event())]) as it:
            task = asyncio.create_task(it.post())
            while not it.decode[0].asked:
                await asyncio.sleep(0.01)
            await it.router.server.stop(0.1)
            response = await asyncio.wait_for(task, 20.0)
            assert response.status_code == 503 and "shutting down" in error_of(response)["message"]

    asyncio.run(run())


def test_an_openai_client_sees_the_error_of_a_stream_that_breaks_off() -> None:
    async def run() -> None:
        async with rig(decode=[Upstream("decode", die_after=1)]) as it:
            client = openai.AsyncOpenAI(base_url=f"{it.router.url}/v1", api_key="key", max_retries=0)
            stream = await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "a"}], stream=True
            )
            with pytest.raises(openai.APIError, match="broke off in the middle"):
                async for _ in stream:
                    pass
            assert it.decode[0].heads[0]["authorization"] == "Bearer key"
            await client.close()

    asyncio.run(run())


def test_requests_at_once_all_get_their_own_answers() -> None:
    async def run() -> None:
        sides = [[Upstream(side) for _ in range(2)] for side in ("prefill", "decode")]
        async with rig(*sides, policy="least_requests") as it:
            answers = await asyncio.gather(*[it.post(rid=f"r{number}") for number in range(40)])
            assert [answer.json()["rid"] for answer in answers] == [f"r{number}" for number in range(40)]
            await idle(it)
            given = [server.given for server in it.router.router.watch.servers]
            assert sum(given) == 80 and all(10 <= count <= 30 for count in given)

    asyncio.run(run())


def test_a_client_that_sends_half_a_body_leaves_nothing() -> None:
    async def run() -> None:
        async with rig() as it:
            host, port = it.router.url.removeprefix("http://").split(":")
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"POST /generate HTTP/1.1\r\nhost: a\r\ncontent-length: 100\r\n\r\n{")
            await writer.drain()
            writer.close()
            await idle(it)
            assert (await it.post()).status_code == 200 and len(it.decode[0].asked) == 1

    asyncio.run(run())


def test_the_connections_of_a_router_find_out_that_a_host_vanished() -> None:
    with socket.socket() as some:
        for option in _found_dead():
            some.setsockopt(*option)
        assert some.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)

    async def run() -> None:
        async with rig() as it:
            await it.post()
            pool = it.router.router.client._transport._pool  # type: ignore[attr-defined]
            kept = [each._connection._network_stream for each in pool.connections]
            sockets = [stream.get_extra_info("socket") for stream in kept]
            assert sockets
            assert all(each.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) for each in sockets)

    asyncio.run(run())


@pytest.mark.parametrize(("number", "cut"), [(errno.EHOSTUNREACH, True), (errno.ECONNREFUSED, False)])
def test_no_way_to_a_server_is_silence_and_a_refusal_is_not(number: int, cut: bool) -> None:
    """One that ends orderly refuses new connections, and its streams go on."""

    class Way(httpx2.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
            try:
                raise OSError(number, "as the system says it")
            except OSError as error:
                raise httpx2.ConnectError(str(error)) from error

    async def run() -> None:
        options = RouterOptions(prefill=(("http://h1:1", None),), decode=("http://h2:2",))
        async with httpx2.AsyncClient(transport=Way()) as client:
            watch = Watch(options, client)
            server = watch.decode[0]
            for _ in range(SILENT_LOOKS):
                await watch._look(server)
            assert not server.healthy and server.hangs.is_set() == cut

    asyncio.run(run())


def test_the_next_pair_does_not_wait_until_the_lost_server_was_looked_at() -> None:
    async def run() -> None:
        async with rig(
            decode=[Upstream("decode"), Upstream("decode")], health_interval=60.0, health_timeout=50.0
        ) as it:
            first, server = it.decode[0], it.router.router.watch.decode[0]
            first.quiet, first.hold = True, asyncio.Event()
            task = asyncio.create_task(it.post())
            while not first.asked:
                await asyncio.sleep(0.01)
            server.hangs.set()  # as three looks would
            assert (await asyncio.wait_for(task, 20.0)).status_code == 200
            assert not server.healthy

    asyncio.run(run())


def test_clients_that_leave_at_any_moment_leave_nothing() -> None:
    async def run() -> None:
        rng = random.Random(5)
        sides = [[Upstream(side) for _ in range(2)] for side in ("prefill", "decode")]
        async with rig(*sides, policy="power_of_two") as it:

            async def one(number: int) -> None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(rng.random() * 0.5):
                        await it.post(rid=f"r{number}", stream=rng.random() < 0.5)

            await asyncio.gather(*map(one, range(60)))
            await idle(it)
            pool = it.router.router.client._transport._pool  # type: ignore[attr-defined]
            async with asyncio.timeout(10.0):
                while not all(each.is_idle() or each.is_closed() for each in pool.connections):
                    await asyncio.sleep(0.01)
            assert (await it.post(rid="r0")).status_code == 200

    asyncio.run(run())
