"""Requests that no stage takes: the explanation says so, by HTTP and in the scheduler, and leaves nothing open."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pandas as pd
import pytest
from timed_rig import TimedRig

from sgviz.engine import Engine
from sgviz.errors import BadRequest
from sgviz.events import Tracer
from sgviz.events.schema import RequestAborted, RequestDispatched, RequestReceived, RequestTokenized
from sgviz.recording import Cause, Explanation, Recording

POOL = 64


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Engine, str]]:
    with Engine("tiny-llama", device="mock", max_total_tokens=POOL) as engine:
        yield engine, engine.serve(port=0).url


def refused(served: tuple[Engine, str], **body: Any) -> tuple[str, Explanation]:
    """What the client was told, and the explanation."""
    engine, url = served
    data, kind = json.dumps(body).encode(), {"Content-Type": "application/json"}
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(urllib.request.Request(url + "/generate", data, kind), timeout=60)
    assert error.value.code == 400
    told = json.loads(error.value.read())["error"]["message"]
    rec = engine.recording()
    for _ in range(500):  # the client may have read the answer before its end is told
        if rec.request(body["rid"]).stats.response_sent:
            break
        time.sleep(0.01)
    explanation = rec.freeze().explain(body["rid"])
    assert explanation.done and explanation.unexplained_ns <= 0.01 * explanation.total_ns, explanation.text()
    assert sum(part.duration_ns for part in explanation.parts) == explanation.total_ns
    return told, explanation


@pytest.mark.parametrize(
    ("rid", "fields"),
    [
        ("long", {"input_ids": list(range(POOL + 20))}),
        ("much", {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": POOL}}),
        ("copies", {"input_ids": list(range(POOL + 20)), "sampling_params": {"n": 2}}),
    ],
)
def test_what_never_fits_is_named_with_the_numbers(
    served: tuple[Engine, str], rid: str, fields: dict[str, Any]
) -> None:
    limits = served[0].internal_state()
    told, explanation = refused(served, rid=rid, **fields)
    (part,) = [part for part in explanation.parts if part.cause is Cause.NEVER_FITS]
    assert explanation.refused == f"refused with status 400: {told}"
    if rid == "long":
        assert served[0].recording().request(rid).prompt_tokens == len(fields["input_ids"])
    assert part.detail == told and str(len(fields["input_ids"])) in told
    assert limits["max_total_num_tokens"] == POOL and "can never fit" in explanation.text()


def test_what_is_refused_for_another_reason_is_not_called_so(served: tuple[Engine, str]) -> None:
    for rid, fields in (
        ("range", {"text": "a", "sampling_params": {"top_p": 7}}),
        ("ids", {"input_ids": [10**9]}),
    ):
        _, explanation = refused(served, rid=rid, **fields)
        assert not [part for part in explanation.parts if part.cause is Cause.NEVER_FITS]
        assert (
            explanation.refused.startswith("refused with status 400: ")
            and explanation.refused in explanation.text()
        )
        assert Cause.UNEXPLAINED not in explanation.by_cause()


def test_what_fits_alone_is_taken(served: tuple[Engine, str]) -> None:
    engine, _ = served
    most = engine.generate(
        input_ids=list(range(20)), rid="most", sampling_params={"max_new_tokens": POOL - 22, "temperature": 0}
    )
    assert most["meta_info"]["finish_reason"]["type"] in ("length", "stop")
    assert Cause.NEVER_FITS not in engine.recording().freeze().explain("most").by_cause()


def test_the_scheduler_s_own_refusal_is_named_after_the_way_there() -> None:
    """Its pool may be smaller than the tokenizer manager knew; the front's events are given here by hand."""
    rig = TimedRig(tokens=POOL)
    front = Tracer("tokenizer_manager", rig.ring, rig.clock)
    for body in (
        RequestReceived(rid="late", type="t", path="/", stream=False, model="m", messages=0, chars=0),
        RequestTokenized(rid="late", prompt_tokens=90),
        RequestDispatched(rid="late"),
    ):
        rig.clock.advance(1000)
        front.emit(body)
    rig.submit(range(90), 4, rid="late")
    rig.run()
    (end,) = [event for event in rig.events() if isinstance(event.body, RequestAborted)]
    explanation = rig.recording().explain("late")
    assert explanation.parts[-1].cause is Cause.NEVER_FITS and explanation.parts[-1].end_ns == end.t
    assert "90 tokens" in explanation.parts[-1].detail and explanation.unexplained_ns == 0


# ---------------------------------------------------------------- the reason is in the events, whoever refused


def post(url: str, path: str, body: object) -> tuple[int, dict[str, Any]]:
    """Status and answer."""
    data, kind = json.dumps(body).encode(), {"Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, data, kind), timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def ended(engine: Engine, rid: str) -> Recording:
    """The recording once the end of the answer to `rid` is told."""
    for _ in range(500):
        rec = engine.recording().freeze()
        if rid in rec.rids and rec.request(rid).stats.response_sent:
            return rec
        time.sleep(0.01)
    raise AssertionError(f"no end of {rid}")


LONG_TEXT = "word " * 400  # more tokens than the pool and the context have
REFUSED = [
    ("range", "/generate", {"text": "a", "sampling_params": {"top_p": 7}}, "tokenizer", None),
    ("field", "/generate", {"text": "a", "stream": "perhaps"}, "serving", None),
    ("both", "/generate", {"text": "a", "input_ids": [1]}, "serving", None),
    ("model", "/v1/completions", {"prompt": "a", "model": "gpt-9"}, "serving", None),
    ("tools", "/v1/chat/completions", {"messages": [], "tools": [{"type": "function"}]}, "serving", None),
    ("vocab", "/generate", {"input_ids": [5, 10**9]}, "tokenizer", 2),
    ("text", "/generate", {"text": LONG_TEXT}, "tokenizer", ...),
    ("more", "/generate", {"text": "a b", "sampling_params": {"max_new_tokens": 9999}}, "tokenizer", ...),
]


@pytest.mark.parametrize(("rid", "path", "body", "where", "tokens"), REFUSED)
def test_every_refusal_is_in_the_table_with_its_reason(
    served: tuple[Engine, str], rid: str, path: str, body: dict[str, Any], where: str, tokens: Any
) -> None:
    engine, url = served
    status, answer = post(url, path, {"rid": rid, **body})
    message = answer["error"]["message"]
    rec = ended(engine, rid)
    row = rec.requests.set_index("rid").loc[rid]
    assert status >= 400 and row.status == status
    assert (row.finish_reason, row.abort) == ("abort", f"{where}: {message}")
    assert pd.isna(row.completion_tokens) or row.completion_tokens == 0
    if tokens is None:
        assert pd.isna(row.prompt_tokens)
    else:
        counted = post(url, "/v1/tokenize", {"prompt": body.get("text", "")})[1]
        count = counted["count"] if tokens is ... else tokens
        assert row.prompt_tokens == count > 0
    explanation = rec.explain(rid)
    assert explanation.refused == f"refused with status {status}: {message}" and explanation.done
    assert sum(part.duration_ns for part in explanation.parts) == explanation.total_ns
    assert explanation.unexplained_ns == 0, explanation.text()
    assert rec.audit().balanced


def test_a_body_that_is_no_request_and_names_none_is_there_too(served: tuple[Engine, str]) -> None:
    engine, url = served
    before = set(engine.recording().freeze().rids)
    status, _ = post(url, "/v1/completions", {"rid": "x" * 9999, "prompt": 5})
    (rid,) = set(engine.recording().freeze().rids) - before
    row = ended(engine, rid).requests.set_index("rid").loc[rid]
    assert status == 400 and row.status == 400 and row.abort.startswith("serving: ")


def test_each_prompt_of_a_refused_call_is_there(served: tuple[Engine, str]) -> None:
    engine, url = served
    status, answer = post(url, "/generate", {"rid": "call", "input_ids": [[5, 6], [7] * 999, [8]]})
    assert status == 400
    rows = ended(engine, "call_2").requests.set_index("rid")
    why = f"tokenizer: {answer['error']['message']}"
    assert [rows.loc[f"call_{n}"].abort for n in range(3)] == [why] * 3
    assert [rows.loc[f"call_{n}"].prompt_tokens for n in range(3)] == [2, 999, 1]


def test_a_call_from_python_is_told_alike(served: tuple[Engine, str]) -> None:
    engine, _ = served
    with pytest.raises(BadRequest) as error:
        engine.generate(input_ids=[10**9], rid="python")
    row = ended(engine, "python").requests.set_index("rid").loc["python"]
    assert (row.status, row.abort) == (400, f"tokenizer: {error.value.message}")


def test_a_name_in_use_is_the_second_request_s_fault(served: tuple[Engine, str]) -> None:
    """The first one, which runs, keeps its own end."""
    engine, url = served
    with engine.debugger() as debugger:
        debugger.pause()
        answers: list[Any] = []
        body = {"rid": "twice", "input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 3}}
        first = threading.Thread(target=lambda: answers.append(post(url, "/generate", body)))
        first.start()
        for _ in range(500):
            if "twice" in engine.recording().freeze().rids:
                break
            time.sleep(0.01)
        time.sleep(0.1)
        status, answer = post(url, "/generate", body)
        debugger.continue_()
    first.join(30)
    rec = ended(engine, "twice")
    rows = rec.requests.set_index("rid")
    assert status == 400 and "in use" in answer["error"]["message"] and answers[0][0] == 200
    assert rows.loc["twice#1"].abort == f"tokenizer: {answer['error']['message']}"
    assert rows.loc["twice"].status == 200 and rows.loc["twice"].completion_tokens == 3
    for rid in ("twice", "twice#1"):
        explanation = rec.explain(rid)
        assert sum(part.duration_ns for part in explanation.parts) == explanation.total_ns
        assert explanation.unexplained_ns <= 0.01 * explanation.total_ns, explanation.text()
    # a later request may have the name, and is another life
    assert post(url, "/generate", body)[0] == 200
    assert {"twice", "twice#1", "twice#2"} <= set(ended(engine, "twice").rids)


def test_a_full_queue_and_a_closing_engine_say_so() -> None:
    with Engine("tiny-llama", device="mock", max_queued_requests=1, max_running_requests=1) as engine:
        url = engine.serve(port=0).url
        with engine.debugger() as debugger:
            debugger.pause()
            bodies = [
                {"rid": f"q{n}", "input_ids": [5 + n], "sampling_params": {"max_new_tokens": 30}}
                for n in range(4)
            ]
            clients = [threading.Thread(target=post, args=(url, "/generate", body)) for body in bodies]
            for client in clients:
                client.start()
            time.sleep(0.3)
            debugger.continue_()
        for client in clients:
            client.join(30)
        rows = ended(engine, "q3").requests.set_index("rid")
        full = rows[rows.abort.str.startswith("intake: the queue is full")]
        assert len(full) and (full.status == 503).all() and (full.finish_reason == "abort").all()
        for rid in full.index:
            assert "the queue is full" in engine.recording().freeze().explain(rid).refused
        engine.pipeline.manager.refuse_new("the server is shutting down")
        assert post(url, "/generate", {"rid": "late", "text": "a"})[0] == 503
        row = ended(engine, "late").requests.set_index("rid").loc["late"]
        assert (row.status, row.abort) == (503, "tokenizer: the server is shutting down")
