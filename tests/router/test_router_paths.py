"""Which paths a router takes, who answers them, and what passes with them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families
from upstreams import Rig, Upstream, error_of, rig

from sgviz.router.paths import PATHS, Who

JSON = {"content-type": "application/json"}


def two(side: str) -> list[Upstream]:
    return [Upstream(side), Upstream(side)]


async def call(it: Rig, method: str, path: str, **more: Any) -> httpx2.Response:
    return await it.client.request(method, it.router.url + path, **more)


def test_one_decode_server_or_all_servers_get_what_needs_no_pair() -> None:
    async def run() -> None:
        async with rig(two("prefill"), two("decode")) as it:
            sides = (it.prefill, it.decode)
            for path, (who, methods) in PATHS.items():
                real = path.replace("{model_id:path}", "a/b")
                for method in methods if who in (Who.ONE, Who.ALL) else ():
                    if real in ("/v1/models", "/abort_request"):  # these upstreams answer them otherwise
                        continue
                    response = await call(it, method, real + "?q=%2F")
                    assert response.status_code == 200, (path, method)
                    counts = [sum(f"{method} {real}" in each.paths for each in side) for side in sides]
                    assert counts == ([2, 2] if who is Who.ALL else [0, 1]), (path, method)
                    for each in (*it.prefill, *it.decode):
                        each.paths.clear()

    asyncio.run(run())


def test_what_is_not_for_a_router_is_refused_by_name_and_a_wrong_method_is_a_405() -> None:
    async def run() -> None:
        async with rig() as it:
            for method, path in (
                ("POST", "/pause_generation"), ("GET", "/sgviz/events"), ("GET", "/viz"), ("GET", "/stop_profile"),
                ("POST", "/update_weights_from_disk"), ("GET", "/open_session"), ("DELETE", "/x"), ("GET", "/"),
            ):  # fmt: skip
                response = await call(it, method, path)
                assert response.status_code == 404 and path in error_of(response)["message"]
            for method, path, allowed in (
                ("GET", "/v1/chat/completions", "POST"),
                ("DELETE", "/generate", "POST, PUT"),
                ("POST", "/v1/models", "GET, HEAD"),
                ("GET", "/tokenize", "POST"),
            ):
                response = await call(it, method, path)
                assert response.status_code == 405 and response.headers["allow"] == allowed
                assert allowed in error_of(response)["message"]
            assert not it.decode[0].asked and not it.decode[0].paths and not it.prefill[0].paths
            put = await call(it, "PUT", "/generate", json={"text": "hi"})
            assert put.status_code == 200 and it.decode[0].asked == it.prefill[0].asked != []

    asyncio.run(run())


def test_questions_take_nobodys_turn_and_pass_a_lost_server_by() -> None:
    async def run() -> None:
        async with rig(decode=two("decode"), health_interval=60.0) as it:
            for _ in range(4):
                await it.post()
                await call(it, "POST", "/tokenize", json={})
            assert [len(each.asked) for each in it.decode] == [2, 2]
            await it.decode[0].stop()
            for _ in range(3):
                assert (await call(it, "GET", "/model_info")).json() == {"from": it.decode[1].url}
            await it.decode[1].stop()
            response = await call(it, "GET", "/model_info")
            assert response.status_code == 503 and it.decode[1].url in error_of(response)["message"]

    asyncio.run(run())


def test_a_client_that_leaves_a_question_ends_it() -> None:
    async def run() -> None:
        hold = asyncio.Event()
        async with rig(decode=[Upstream("decode", hold=hold)]) as it:
            with pytest.raises(httpx2.ReadTimeout):
                await call(it, "POST", "/tokenize", json={}, timeout=0.3)
            hold.set()
            assert (await call(it, "POST", "/tokenize", json={})).status_code == 200

    asyncio.run(run())


def test_all_servers_are_asked_but_the_lost_and_each_answer_is_shown() -> None:
    async def run() -> None:
        async with rig(two("prefill"), health_interval=60.0) as it:
            answer = await call(it, "POST", "/flush_cache")
            assert answer.status_code == 200 and answer.json()["success"]
            servers = answer.json()["servers"]
            assert servers == {
                each.url: {"status": 200, "body": {"from": each.url}} for each in (*it.prefill, *it.decode)
            }
            gone = it.prefill[0].url
            await it.prefill[0].stop()
            it.router.router.watch.prefill[0].lose("it is gone")
            answer = await call(it, "GET", "/flush_cache")
            assert answer.status_code == 200 and not answer.json()["success"]
            assert answer.json()["servers"][gone] == {"status": 503, "body": "it is gone"}

    asyncio.run(run())


def test_headers_of_the_client_reach_both_sides_and_those_of_the_hop_do_not() -> None:
    async def run() -> None:
        sent = {
            "authorization": "Bearer key", "x-request-id": "r1", "traceparent": "00-1-2-01", "user-agent": "me",
            "x-data-parallel-rank": "1", "x-hop": "1", "connection": "x-hop", "proxy-authorization": "no",
            "te": "trailers", "accept-encoding": "gzip",
        }  # fmt: skip
        async with rig() as it:
            await call(it, "POST", "/generate", json={"text": "hi"}, headers=sent)
            (prefill,), (decode,) = it.prefill[0].heads, it.decode[0].heads
            for heads in (prefill, decode):
                for name in ("authorization", "x-request-id", "traceparent", "user-agent"):
                    assert heads[name] == sent[name]
                for name in ("x-hop", "proxy-authorization", "te"):
                    assert name not in heads
                assert heads["accept-encoding"] == "identity"
            assert decode["x-data-parallel-rank"] == "1" and "x-data-parallel-rank" not in prefill
            assert prefill["host"] == it.prefill[0].url.removeprefix("http://")

    asyncio.run(run())


def test_cookies_of_one_client_are_not_sent_for_another() -> None:
    async def run() -> None:
        async with rig() as it:
            first = await call(it, "GET", "/model_info")
            assert first.headers["set-cookie"] == "secret=1" and first.headers["x-side"] == "decode"
            async with httpx2.AsyncClient() as other:
                await other.get(it.router.url + "/model_info")
            assert len(it.decode[0].heads) == 2
            assert all("cookie" not in heads for heads in it.decode[0].heads)

    asyncio.run(run())


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("status", [400, 401, 422, 429, 500])
def test_a_refusal_is_passed_on_unchanged(side: str, status: int) -> None:
    async def run() -> None:
        body = b'{"error" : {"message":"\xc3\xa9", "code": 1}}\n'
        async with rig([Upstream("prefill", hold=None)]) as it:
            refusing = (it.prefill if side == "prefill" else it.decode)[0]
            refusing.status, refusing.refusal = status, body
            if side == "prefill":
                it.decode[0].hold = asyncio.Event()
            response = await it.post(stream=True)
            assert (response.status_code, response.content) == (status, body)
            assert response.headers["content-type"] == "application/problem+json"
            assert response.headers["x-why"] == "so" and len(refusing.asked) == 1

    asyncio.run(run())


@pytest.mark.parametrize(
    ("content", "kind", "words"),
    [
        (b'{"text": ', "application/json", "the body is not valid JSON"),
        (b'["a"]', "application/json", "must be a JSON object, got list"),
        (b'{"text": "\xff"}', "application/json", "the body is not valid JSON"),
        (b'{"text": ' + b"[" * 5000, "application/json", "nested too deeply"),
        (b'{"text": "a"}', "text/plain", "content type must be application/json"),
        (b"", "application/json", "the body is not valid JSON"),
    ],
)
def test_a_body_that_is_no_json_object_is_refused_as_by_a_server(
    content: bytes, kind: str, words: str
) -> None:
    async def run() -> None:
        async with rig() as it:
            response = await call(it, "POST", "/generate", content=content, headers={"content-type": kind})
            assert response.status_code == 400 and words in error_of(response)["message"]
            assert error_of(response)["type"] == "BadRequestError" and not it.decode[0].asked

    asyncio.run(run())


def test_a_large_body_goes_through_and_one_too_large_is_a_413() -> None:
    async def run() -> None:
        async with rig(max_body_mb=4.0) as it:
            text = "é" * (1 << 20)
            assert (await it.post(text=text)).status_code == 200
            assert it.decode[0].asked[0]["text"] == it.prefill[0].asked[0]["text"] == text

            async def pieces() -> AsyncIterator[bytes]:
                for _ in range(5):
                    yield b" " * (1 << 20)

            for content in (b" " * (5 << 20), pieces()):
                response = await call(it, "POST", "/generate", content=content, headers=JSON)
                assert response.status_code == 413 and "max_body_mb" in error_of(response)["message"]

    asyncio.run(run())


def test_health_generate_asks_the_servers_and_health_only_the_router() -> None:
    async def run() -> None:
        async with rig(two("prefill")) as it:
            it.prefill[0].generates = False
            assert (await call(it, "GET", "/health_generate")).status_code == 200
            it.decode[0].generates = False
            response = await call(it, "GET", "/health_generate")
            assert response.status_code == 503 and it.decode[0].url in error_of(response)["message"]
            for path in ("/health", "/ready", "/ping"):
                assert (await call(it, "GET", path)).status_code == 200
                assert (await call(it, "HEAD", path)).content == b""

    asyncio.run(run())


def test_server_info_has_what_each_server_says_of_itself() -> None:
    async def run() -> None:
        async with rig(two("prefill"), health_timeout=0.5, health_interval=60.0) as it:
            info = (await call(it, "GET", "/server_info")).json()
            assert info["healthy"] and info["policy"] == "round_robin"
            assert [each["disaggregation_mode"] for each in info["prefill"]] == ["prefill"] * 2
            assert info["decode"][0]["url"] == it.decode[0].url
            # as of one server: what all say alike, so that who measures it learns what it is
            assert info["disaggregation_bootstrap_port"] == 4321 and "disaggregation_mode" not in info
            await it.prefill[0].stop()
            lost, found = (await call(it, "GET", "/server_info")).json()["prefill"]
            assert lost["url"] == it.prefill[0].url and "disaggregation_mode" not in lost
            assert found["disaggregation_mode"] == "prefill"

    asyncio.run(run())


def test_metrics_tell_of_servers_answers_and_retries() -> None:
    async def run() -> None:
        async with rig(decode=two("decode"), health_interval=60.0) as it:
            await it.decode[0].stop()
            assert (await it.post()).status_code == 200
            assert (await it.client.post(it.router.url + "/generate", content=b"{", headers=JSON)).is_error
            text = (await call(it, "GET", "/metrics")).text
            values = {
                (sample.name.removeprefix("sgviz_router_"), *sample.labels.values()): sample.value
                for family in text_string_to_metric_families(text)
                for sample in family.samples
            }
            urls = [each.url for each in it.decode]
            assert [values["server_healthy", "decode", url] for url in urls] == [0, 1]
            assert [values["server_given_total", "decode", url] for url in urls] == [1, 1]
            assert [values["server_failed_total", "decode", url] for url in urls] == [1, 0]
            assert (
                values["answers_total", "/generate", "200"]
                == values["answers_total", "/generate", "400"]
                == 1
            )
            assert values["retries_total",] == 1

    asyncio.run(run())


def test_what_a_body_holds_comes_to_the_servers_as_it_was() -> None:
    body = {
        "text": "\u2028 \U0001f600 \x00", "sampling_params": {"temperature": 0.1, "max_new_tokens": 3},
        "big": 2**53 + 1, "small": 5e-324, "none": None, "routed_dp_rank": None, "unknown": {"a": [1, "x"]},
    }  # fmt: skip

    async def run() -> None:
        async with rig() as it:
            await it.client.post(it.router.url + "/generate", content=json.dumps(body), headers=JSON)
            for asked in (it.prefill[0].asked[0], it.decode[0].asked[0]):
                assert asked.items() >= body.items()

    asyncio.run(run())


@pytest.mark.parametrize("text", ['"\\ud800"', '"\\udc00x"'])
def test_half_of_a_surrogate_pair_is_not_an_error_of_ours(text: str) -> None:
    async def run() -> None:
        async with rig() as it:
            content = f'{{"text": {text}}}'
            response = await it.client.post(it.router.url + "/generate", content=content, headers=JSON)
            assert response.status_code == 400

    asyncio.run(run())
