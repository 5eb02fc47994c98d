"""A served engine seen from outside: events resumed, the state at a moment."""

from __future__ import annotations

import json
import logging
import re
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

import sgviz
from sgviz.engine import Engine
from sgviz.errors import SgvizError
from sgviz.events import RingSink, Tracer
from sgviz.events.schema import RequestDispatched
from sgviz.recording import Recording

STREAMS = ("/sgviz/events", "/sgviz/events?what=dashboard")


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Engine, str]]:
    with Engine(
        "tiny-llama", device="mock", mock_step_ms=1, max_total_tokens=1024, admin_api_key="secret"
    ) as engine:
        url = engine.serve(port=0).url
        for number in range(3):
            body = {"model": "tiny-llama", "messages": [{"role": "user", "content": f"hello {number}"}]}
            post(url + "/v1/chat/completions", body | {"max_tokens": 12, "stream": number == 0})
        yield engine, url


def post(url: str, body: object) -> bytes:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return bytes(answer.read())


def get(url: str, key: str | None = "secret") -> bytes:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as answer:
        return bytes(answer.read())


def test_a_remote_recording_is_the_engine_s_own(served: tuple[Engine, str]) -> None:
    engine, url = served
    with sgviz.connect(url, "secret") as rec:
        own = engine.recording().freeze()
        assert rec.wait_for(len(own))
        assert rec.requests.equals(own.requests) and rec.kv.equals(own.kv)
        assert rec.explain(own.rids[0]) == own.explain(own.rids[0])
        assert rec.dropped == 0 and rec.source == url and rec.freeze().header.anchors == own.header.anchors
        before = len(rec)
        engine.generate("more", sampling_params={"max_new_tokens": 4})
        assert rec.wait_for(before + 10) and rec.freeze().audit().balanced


def test_events_resume_behind_the_last_one_seen(served: tuple[Engine, str]) -> None:
    engine, url = served
    request = urllib.request.Request(url + "/sgviz/events?seq=5", headers={"Authorization": "Bearer secret"})
    with urllib.request.urlopen(request, timeout=30) as stream:
        seq, events = message(stream)
    ours = [event.kind for event in engine.pipeline.ring.since(0)[1]]
    assert seq == 5 + len(events) and [event[4][0] for event in events] == ours[5:seq]
    request.add_header("Last-Event-ID", str(seq - 2))
    with urllib.request.urlopen(request, timeout=30) as stream:
        again, rest = message(stream)
    ours = [event.kind for event in engine.pipeline.ring.since(0)[1]]
    assert [event[4][0] for event in rest] == ours[seq - 2 : again]


def message(stream) -> tuple[int, list[list[object]]]:  # type: ignore[no-untyped-def]
    found = re.fullmatch(rb"id: (\d+)\n", stream.readline())
    assert found is not None
    data = stream.readline()
    assert data.startswith(b"data: ")
    return int(found[1]), json.loads(data[6:])


def test_state_is_the_moment_of_the_recording(served: tuple[Engine, str]) -> None:
    engine, url = served
    rec: Recording = engine.recording().freeze()
    for count in (0, 40, len(rec)):
        state, moment = json.loads(get(f"{url}/sgviz/state?seq={count}")), rec.at(count=count)
        assert (state["free"], state["protected"], state["iteration"]) == (
            moment.free,
            moment.protected,
            moment.iteration,
        )
        assert tuple(state["waiting"]) == moment.waiting and len(state["tree"]) == len(moment.tree)


@pytest.mark.parametrize(
    "path",
    [
        "/sgviz/state?seq=x",
        "/sgviz/state?seq=99999999",
        "/sgviz/events?seq=-1",
        "/sgviz/events?seq=%C2%B2",
        "/sgviz/state?seq=" + "1" * 5000,
    ],
)
def test_numbers_that_are_none_are_refused(path: str, served: tuple[Engine, str]) -> None:
    with pytest.raises(urllib.error.HTTPError) as error:
        get(served[1] + path)
    assert error.value.code == 400 and "seq" in error.value.read().decode()


@pytest.mark.parametrize("clock", ["event", "ms", "iteration"])
@pytest.mark.parametrize("at", ["nan", "inf", "-inf", "1e308", "1e30"])
def test_places_on_no_clock_are_refused(at: str, clock: str, served: tuple[Engine, str]) -> None:
    with pytest.raises(urllib.error.HTTPError) as error:
        get(f"{served[1]}/sgviz/events?what=dashboard&at={at}&clock={clock}")
    assert error.value.code == 400


def test_what_looks_inside_needs_the_admin_key(served: tuple[Engine, str]) -> None:
    for path in ("/sgviz/state", "/sgviz/events", "/sgviz/header"):
        with pytest.raises(urllib.error.HTTPError) as error:
            get(served[1] + path, key="wrong")
        assert error.value.code == 401
    with pytest.raises(SgvizError, match="answered 401"):
        sgviz.connect(served[1])


def test_nobody_there_is_one_sentence() -> None:
    with pytest.raises(SgvizError, match="cannot follow"):
        sgviz.connect("http://127.0.0.1:9")


def test_a_ring_tells_what_came_since_and_what_fell_out() -> None:
    ring = RingSink(capacity=10)
    trace = Tracer("t", ring)
    for number in range(25):
        trace.emit(RequestDispatched(rid=str(number)))
    rids = lambda events: [event.body.rid for event in events]  # noqa: E731
    for seen in range(30):
        first, events = ring.since(seen)
        assert first == max(seen, 15) and rids(events) == [str(number) for number in range(first, 25)]
        first, some = ring.since(seen, 3)
        assert rids(some) == rids(events)[:3]


def test_streams_end_with_the_server_and_without_a_fault(caplog: pytest.LogCaptureFixture) -> None:
    with Engine("tiny-llama", device="mock") as engine:
        url = engine.serve(port=0).url
        streams = [urllib.request.urlopen(url + path, timeout=30) for path in STREAMS]
        for stream in streams:
            assert stream.readline()
    for stream in streams:
        while stream.readline():  # a stream that is cut raises
            pass
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
