"""Two runs compared: the first decision that differs, and what each request lost or won by cause."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from timed_rig import TimedRig

from sgviz.engine import Engine
from sgviz.recording import Cause, Recording


def play(policy: str = "fcfs", **settings: object) -> Recording:
    rig = TimedRig(tokens=256, schedule_policy=policy, max_running_requests=2, **settings)
    for number in range(8):
        rig.submit(
            range(number, number + 10 + 3 * number), 6 + 5 * (number % 3), rid=f"r{number}", ignore_eos=True
        )
    rig.run()
    return rig.recording()


def test_a_run_and_itself_do_not_differ() -> None:
    same = play().diff(play())
    assert same.first is None and same.only_a == same.only_b == ()
    assert (same.requests.change_ms == 0).all() and same.by_cause() == {}
    assert "every decision is the same" in same.text()


def test_another_policy_differs_first_where_it_orders_the_queue() -> None:
    a, b = play("fcfs"), play("lof")
    found = a.diff(b)
    assert found.first is not None
    assert found.first.b.startswith("reorder the queue") or "r" in found.first.b
    assert found.first.number >= 1 and found.first.a != found.first.b
    changes = found.requests.set_index("rid")
    for rid in a.rids:
        ours, theirs = a.explain(rid), b.explain(rid)
        row = changes.loc[rid]
        assert row.change_ms == pytest.approx((theirs.total_ns - ours.total_ns) / 1e6)
        assert sum(row[f"{cause}_ms"] for cause in Cause) == pytest.approx(row.change_ms)
    slower = found.slower()
    assert len(slower) and (slower.change_ms > 0).all()
    worst = slower.iloc[0]
    assert worst.cause_ms > 0 and worst.rid in found.text()
    assert list(found.requests.change_ms.abs()) == sorted(found.requests.change_ms.abs(), reverse=True)


def test_a_request_that_waits_for_slots_is_slower_for_that_reason() -> None:
    a, b = play(), play_with_one_slot()
    found = a.diff(b)
    row = found.requests.set_index("rid").loc["r1"]
    assert row.change_ms > 0 and row.cause == str(Cause.RUNNING_SLOTS) and row.blockers[0] == "r0"
    assert found.first is not None and found.first.number > 1


def play_with_one_slot() -> Recording:
    rig = TimedRig(tokens=256, max_running_requests=1)
    for number in range(8):
        rig.submit(
            range(number, number + 10 + 3 * number), 6 + 5 * (number % 3), rid=f"r{number}", ignore_eos=True
        )
    rig.run()
    return rig.recording()


def test_requests_of_one_run_alone_are_listed() -> None:
    rig = TimedRig(tokens=256, max_running_requests=2)
    rig.submit(range(10), 6, rid="r0", ignore_eos=True)
    rig.submit(range(10), 6, rid="extra", ignore_eos=True)
    rig.run()
    found = rig.recording().diff(play())
    assert found.only_a == ("extra",) and len(found.only_b) == 7 and list(found.requests.rid) == ["r0"]
    assert "only in a: 1 (extra)" in found.text() and "aligned by rid" in found.text()


def test_empty_recordings_can_be_compared() -> None:
    found = Recording([]).diff(Recording([]))
    assert found.first is None and found.requests.empty and "0 requests in both" in found.text()


# ---------------------------------------------------------------- rids drawn anew


def anonymous(slots: int, salt: str) -> Recording:
    """`play`, but no request has the same name in two runs, and two prompts come twice."""
    rig = TimedRig(tokens=256, max_running_requests=slots)
    for number in (0, 1, 2, 3, 2, 4, 0, 5):
        length = 10 + 3 * number
        rid = f"{salt}-{len(rig.answers)}"
        rig.submit(range(number, number + length), 6 + 5 * (number % 3), rid=rid, ignore_eos=True)
    rig.run()
    return rig.recording()


def test_runs_without_common_rids_are_aligned_by_prompt_and_order() -> None:
    a, b = anonymous(2, "x"), anonymous(2, "y")
    found = a.diff(b)
    assert found.aligned_by == "prompt" and found.first is None and found.only_a == found.only_b == ()
    assert (found.requests.change_ms == 0).all()
    assert [rid[2:] for rid in found.requests.rid] == [rid[2:] for rid in found.requests.rid_b]
    assert (
        "aligned by prompt and order of arrival" in found.text()
        and "every decision is the same" in found.text()
    )


def test_what_differs_between_them_is_what_differs_between_named_ones() -> None:
    named, drawn = anonymous(2, "x").diff(anonymous(1, "x")), anonymous(2, "x").diff(anonymous(1, "y"))
    assert named.aligned_by == "rid" and drawn.aligned_by == "prompt" and named.first is not None
    assert drawn.first == named.first
    assert drawn.requests.drop(columns="rid_b").equals(named.requests.drop(columns="rid_b"))


def test_a_prompt_of_one_run_alone_stays_alone() -> None:
    rig = TimedRig(tokens=256, max_running_requests=2)
    rig.submit(range(10), 6, rid="same")
    rig.submit(range(50, 61), 6, rid="other")
    rig.run()
    found = rig.recording().diff(anonymous(2, "z"))
    assert found.aligned_by == "prompt" and list(found.requests.rid_b) == ["z-0"]
    assert found.only_a == ("other",) and len(found.only_b) == 7


@pytest.fixture(scope="module")
def over_http() -> Iterator[tuple[Recording, Recording]]:
    """The same conversation turns sent twice by a client that names nothing."""
    yield http_run(4), http_run(1)


def http_run(slots: int) -> Recording:
    with Engine("tiny-llama", device="mock", mock_step_ms=2, max_running_requests=slots) as engine:
        url = engine.serve(port=0).url

        def ask(number: int) -> None:
            body = {"model": "tiny-llama", "messages": [{"role": "user", "content": f"question {number}"}]}
            data = json.dumps(body | {"max_tokens": 8, "n": 1 + number % 2}).encode()
            request = urllib.request.Request(
                url + "/v1/chat/completions", data, {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=60) as answer:
                answer.read()

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(ask, range(6)))
        return engine.recording().freeze()


def test_two_runs_over_http_are_compared_request_by_request(over_http: tuple[Recording, Recording]) -> None:
    a, b = over_http
    found = a.diff(b)
    assert found.aligned_by == "prompt" and not set(a.rids) & set(b.rids)
    assert found.only_a == found.only_b == ()
    prompts = [
        [rec.request(rid).prompt_tokens for rid in rids]
        for rec, rids in ((a, found.requests.rid), (b, found.requests.rid_b))
    ]
    assert prompts[0] == prompts[1] and len(prompts[0]) == len(a.rids)
    waited = found.by_cause()
    assert waited[str(Cause.RUNNING_SLOTS)] > 0  # one may run at a time in b


def test_the_causes_in_words_add_up_to_the_mean_change() -> None:
    found = play().diff(play("random"))
    lines = found.text().splitlines()
    at = next(n for n, line in enumerate(lines) if "mean change" in line)
    told = [float(line.split()[-4]) for line in lines[at + 1 :] if line.endswith("ms a request")]
    assert sum(told) == pytest.approx(found.requests.change_ms.mean(), abs=0.001 * len(told))
