"""Whose fault a failed attempt is: the right server is named, set aside and passed by, or nobody is and it is said."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import Response
from upstreams import Rig, Upstream, error_of, rig

from sgviz.errors import BadRequest, SgvizError, Unavailable, from_status
from sgviz.events.schema import RouterFailed, RouterPaired
from sgviz.recording import load
from sgviz.router.blame import Side, Stand, Verdict, is_open, judge, overdue, words_of
from sgviz.router.calls import Trouble
from sgviz.router.servers import Server
from sgviz.serving.http_errors import error_response

SILENT = "the prefill server at tcp://10.0.0.1:4567 was silent for 12.5 s"
URLS = {"prefill": "http://p:1", "decode": "http://d:2"}
# only the looks that a failure asks for tell anything
SLOW: dict[str, Any] = {"health_interval": 60.0, "health_timeout": 0.3}


def server(side: Any, why: str = "") -> Server:
    return Server(URLS[side], side, why=why)


def said(of: Server, error: SgvizError) -> Trouble:
    return Trouble(of, error_response(error), retry=error.status == 503)


def lost(of: Server) -> Trouble:
    answer = error_response(Unavailable(f"the {of.side} server {of.url} broke off"))
    return Trouble(of, answer, retry=True, lost="it broke off", broke=True)


def judged(by: str, error: SgvizError, *, sick: tuple[str, ...] = (), **other: Any) -> Verdict:
    """`by` answers with the error, of the other side is known what `other` says, and who is `sick` answers no look."""
    first, second = (server(side, "no ping" if side in sick else "") for side in (by, _other(by)))
    return judge(Stand(first, 0, said(first, error)), Stand(second, 0, **other))


def _other(side: str) -> str:
    return "decode" if side == "prefill" else "prefill"


def message(verdict: Verdict) -> str:
    return words_of(verdict.answer)


# ------------------------------------------------------------ what is known of both calls


@pytest.mark.parametrize("by", list(URLS))
def test_who_vanished_is_to_blame_and_not_who_waited_for_it(by: str) -> None:
    other = _other(by)
    verdict = judged(by, Unavailable(SILENT), sick=(other,))
    assert verdict.side == other and [each.url for each in verdict.avoid] == [URLS[other]] and verdict.retry
    assert message(verdict).startswith(f"the {other} server {URLS[other]} failed: no ping")
    assert SILENT in message(verdict) and verdict.answer.status_code == 503


@pytest.mark.parametrize("by", list(URLS))
def test_where_both_are_alive_nobody_is_blamed_and_it_is_said(by: str) -> None:
    verdict = judged(by, Unavailable(SILENT))
    assert verdict.side is Side.UNKNOWN and "the router cannot know" in message(verdict) and verdict.retry
    assert all(url in message(verdict) for url in URLS.values()) and SILENT in message(verdict)
    assert {each.url for each in verdict.avoid} == set(URLS.values())


@pytest.mark.parametrize("by", list(URLS))
def test_who_is_sick_itself_or_has_a_partner_that_did_its_part_speaks_of_itself(by: str) -> None:
    for verdict in (judged(by, Unavailable("full"), sick=(by,)), judged(by, Unavailable("full"), done=True)):
        assert verdict.side == by and message(verdict) == "full"  # as it came
        assert verdict.why == f"the {by} server {URLS[by]} answered 503: full"
        assert [each.url for each in verdict.avoid] == [URLS[by]]


def test_both_may_be_sick() -> None:
    verdict = judged("decode", Unavailable("x"), sick=("prefill", "decode"))
    assert verdict.side is Side.BOTH and all(url in message(verdict) for url in URLS.values())


def test_a_server_that_was_lost_since_the_attempt_began_is_to_blame_when_it_is_back() -> None:
    prefill, decode = server("prefill"), server("decode")
    before = prefill.losses
    prefill.lose("no ping")
    prefill.find()
    verdict = judge(Stand(decode, 0, said(decode, Unavailable(SILENT))), Stand(prefill, before))
    assert verdict.side is Side.PREFILL and "no ping, for a while" in message(verdict)
    later = judge(Stand(decode, 0, said(decode, Unavailable(SILENT))), Stand(prefill, prefill.losses))
    assert later.side is Side.UNKNOWN


@pytest.mark.parametrize("side", list(URLS))
def test_a_connection_that_broke_proves_more_than_what_the_other_says(side: str) -> None:
    broken, other = server(side), server(_other(side))
    stands = Stand(broken, 0, lost(broken)), Stand(other, 0, said(other, Unavailable("x")))
    for first, second in (stands, stands[::-1]):
        verdict = judge(first, second)
        assert verdict.side == side and [each.server for each in verdict.lost] == [broken] and verdict.retry
        assert not is_open(first, second)
    both = judge(stands[0], Stand(other, 0, lost(other)))
    assert (
        both.side is Side.BOTH and len(both.lost) == 2 and all(url in message(both) for url in URLS.values())
    )


def test_what_is_wrong_with_a_request_is_no_servers_fault() -> None:
    for by in URLS:
        verdict = judged(by, BadRequest("too long"), sick=(by,))
        assert verdict.side is Side.REQUEST and message(verdict) == "too long" and not verdict.retry
    decode, prefill = server("decode"), server("prefill")
    heard = Stand(decode, 0, said(decode, from_status(500, "the other side ended it")))
    assert judge(heard, Stand(prefill, 0, said(prefill, BadRequest("too long")))).side is Side.REQUEST


def test_an_error_of_another_shape_goes_to_the_client_as_it_is() -> None:
    decode = server("decode")
    for body, kind in (
        (b"oops", "text/plain"),
        (b'{"a": 1}', "application/json"),
        (b"{", "application/json"),
    ):
        answer = Response(body, 503, media_type=kind)
        verdict = judge(Stand(decode, 0, Trouble(decode, answer, retry=True)), Stand(server("prefill"), 0))
        assert verdict.answer is answer and verdict.side is Side.UNKNOWN
        assert body.decode() in verdict.why and "cannot know" in verdict.why


def test_a_reworded_error_keeps_what_else_it_says() -> None:
    decode = server("decode")
    answer = error_response(from_status(503, "full", type="Special", param="n"))
    answer.headers["retry-after"] = "3"
    answer = judge(Stand(decode, 0, Trouble(decode, answer, retry=True)), Stand(server("prefill"), 0)).answer
    assert answer.headers["retry-after"] == "3" and int(answer.headers["content-length"]) == len(answer.body)
    assert b'"type":"Special","param":"n","code":503' in bytes(answer.body)


def test_what_is_overdue_is_the_fault_of_who_is_sick_or_has_not_done_its_part() -> None:
    prefill, decode = server("prefill"), server("decode")
    cases = [
        (Stand(prefill, 0, done=True), Stand(decode, 0), Side.DECODE, "has done its part"),
        (Stand(server("prefill", "no ping"), 0), Stand(decode, 0), Side.PREFILL, "no ping"),
        (Stand(prefill, 0), Stand(server("decode", "no ping"), 0), Side.DECODE, "no ping"),
        (Stand(prefill, 0), Stand(decode, 0), Side.UNKNOWN, "cannot know"),
    ]
    for one, two, side, words in cases:
        verdict = overdue(one, two, 1.5)
        assert verdict.side is side and words in message(verdict) and "1.5 s" in message(verdict)
        assert verdict.answer.status_code == 504 and not verdict.retry


@given(
    st.sampled_from(list(URLS)), st.sampled_from([400, 429, 500, 503, 507]), st.booleans(), st.booleans(),
    st.sampled_from(["open", "done", "said", "lost"]),
)  # fmt: skip
def test_who_is_blamed_is_named_and_passed_by(by: str, status: int, one: bool, two: bool, rest: str) -> None:
    first, second = server(by, "sick" if one else ""), server(_other(by), "sick" if two else "")
    troubles = {"said": said(second, Unavailable("later")), "lost": lost(second)}
    verdict = judge(
        Stand(first, 0, said(first, from_status(status, "first"))),
        Stand(second, 0, troubles.get(rest), rest == "done"),
    )
    blamed = {"prefill": ["prefill"], "decode": ["decode"]}.get(verdict.side, list(URLS))
    if verdict.side is not Side.REQUEST:
        assert all(URLS[side] in verdict.why for side in blamed)
        assert sorted(each.side for each in verdict.avoid) == sorted(blamed)
    assert (verdict.side is Side.UNKNOWN) == ("cannot know" in verdict.why)
    assert verdict.answer.status_code >= 400


# ------------------------------------------------------------ through a router


def failures(path: Path) -> list[RouterFailed]:
    rec = load(path)
    assert rec.audit().balanced, str(rec.audit())
    return [event.body for event in rec._events if isinstance(event.body, RouterFailed)]


async def begun(it: Rig) -> None:
    while not all(any(each.asked for each in side) for side in (it.prefill, it.decode)):
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("gone", ["prefill", "decode"])
def test_a_host_that_vanished_is_named_and_set_aside_and_the_other_is_not(tmp_path: Path, gone: str) -> None:
    async def run() -> tuple[str, str]:
        sides = {side: Upstream(side, hold=asyncio.Event()) for side in URLS}
        async with rig([sides["prefill"]], [sides["decode"]], record=str(tmp_path / "r.sgv"), **SLOW) as it:
            task = asyncio.create_task(it.post(rid="mine"))
            await begun(it)
            away, waits = sides[gone], sides[_other(gone)]
            away.quiet, waits.status = True, 503
            assert waits.hold is not None
            waits.hold.set()
            response = await asyncio.wait_for(task, 30.0)
            health = {each.side: each.healthy for each in it.router.router.watch.servers}
            assert health == {gone: False, _other(gone): True}
            assert response.status_code == 503
            words: str = error_of(response)["message"]
            assert words.startswith(
                f"the {gone} server {away.url} failed: it did not answer GET /ping within"
            )
            assert f"the {waits.side} server {waits.url} answered 503: {waits.side} refuses" in words
            return words, away.url

    words, url = asyncio.run(run())
    (failed,) = failures(tmp_path / "r.sgv")
    assert (failed.side, failed.why, failed.status) == (gone, words, 503) and url in failed.why
    told = " ".join(str(load(tmp_path / "r.sgv").explain("mine")).split())
    assert f"by the fault of the {gone} server" in told and "failed_attempt" in told


def test_the_next_attempt_passes_by_who_vanished_and_takes_who_waited_for_it(tmp_path: Path) -> None:
    async def run() -> None:
        first, decode = Upstream("prefill", hold=asyncio.Event()), Upstream("decode", hold=asyncio.Event())
        record = str(tmp_path / "r.sgv")
        async with rig([first, Upstream("prefill")], [decode], record=record, **SLOW) as it:
            task = asyncio.create_task(it.post(rid="mine"))
            await begun(it)
            first.quiet, decode.status, decode.refusals = True, 503, 1
            assert decode.hold is not None
            decode.hold.set()
            response = await asyncio.wait_for(task, 30.0)
            assert response.status_code == 200 and len(decode.asked) == 2 and len(it.prefill[1].asked) == 1
            text = (await it.client.get(it.router.url + "/metrics")).text
            for side, count in (("prefill", 1), ("decode", 0), ("unknown", 0)):
                assert f'sgviz_router_failed_attempts_total{{side="{side}"}} {count}.0' in text

    asyncio.run(run())
    (failed,) = failures(tmp_path / "r.sgv")
    rec = load(tmp_path / "r.sgv")
    paired = [event.body for event in rec._events if isinstance(event.body, RouterPaired)]
    assert [body.attempt for body in paired] == [1, 2] and paired[0].prefill != paired[1].prefill
    assert (failed.attempt, failed.room, failed.prefill) == (1, paired[0].room, paired[0].prefill)
    explanation = rec.explain("mine")
    assert sum(part.duration_ns for part in explanation.parts) == explanation.total_ns > 0
    assert paired[0].prefill in str(explanation) and paired[1].prefill in str(explanation)
    assert [step.holds.get("failed", "")[:7] for step in rec.journey("mine")] == ["prefill", ""]


def test_where_both_live_nobody_is_blamed_and_both_are_passed_by(tmp_path: Path) -> None:
    async def run() -> None:
        prefill = [Upstream("prefill", hold=asyncio.Event()), Upstream("prefill")]
        decode = [Upstream("decode", status=503), Upstream("decode")]
        async with rig(prefill, decode, record=str(tmp_path / "r.sgv"), **SLOW) as it:
            assert (await it.post()).status_code == 200
            assert [len(each.asked) for each in (*prefill, *decode)] == [1, 1, 1, 1]
            assert all(each.healthy for each in it.router.router.watch.servers)

    asyncio.run(run())
    (failed,) = failures(tmp_path / "r.sgv")
    assert failed.side == "unknown" and "the router cannot know" in failed.why


def test_each_failed_attempt_is_told_and_counted(tmp_path: Path) -> None:
    async def run() -> None:
        full = [Upstream("decode", status=503) for _ in range(4)]
        async with rig(decode=full, retries=3, record=str(tmp_path / "r.sgv"), **SLOW) as it:
            assert (await it.post(rid="r", text=["a", "b"])).status_code == 503
            assert sum(it.router.router.counts.failed.values()) == 4 and it.router.router.counts.retries == 3

    asyncio.run(run())
    failed, rec = failures(tmp_path / "r.sgv"), load(tmp_path / "r.sgv")
    paired = [event.body for event in rec._events if isinstance(event.body, RouterPaired)]
    names = [(body.rid, body.attempt, body.room, body.prefill, body.decode) for body in paired]
    assert names == [(body.rid, body.attempt, body.room, body.prefill, body.decode) for body in failed]
    assert len(failed) == 8 and {body.status for body in failed} == {503} and rec.rids == ["r_0", "r_1"]
    for rid in rec.rids:
        explanation = rec.explain(rid)
        words = " ".join(str(explanation).split())
        assert all(
            f"attempt {number}, to {body.prefill}" in words for number, body in enumerate(failed[::2], 1)
        )
        assert sum(part.duration_ns for part in explanation.parts) == explanation.total_ns
        assert explanation.unexplained_ns == 0


def test_how_attempts_end_that_no_other_pair_can_follow(tmp_path: Path) -> None:
    async def run() -> None:
        decode = Upstream("decode", die_after=1)
        async with rig(decode=[decode], record=str(tmp_path / "r.sgv"), request_timeout=0.5) as it:
            await it.post(rid="breaks", stream=True)
            while not it.router.router.has_pair:  # a look finds it well
                await asyncio.sleep(0.01)
            decode.status = 400
            await it.post(rid="wrong")
            decode.status, decode.hold = 200, asyncio.Event()
            assert (await it.post(rid="late")).status_code == 504

    asyncio.run(run())
    found = {body.rid: (body.side, body.status, body.began) for body in failures(tmp_path / "r.sgv")}
    assert found == {
        "breaks": ("decode", 503, True), "wrong": ("request", 400, False), "late": ("decode", 504, False),
    }  # fmt: skip


def test_a_client_that_leaves_and_a_good_answer_are_no_failures(tmp_path: Path) -> None:
    async def run() -> None:
        decode = Upstream("decode", hold=asyncio.Event())
        async with rig(decode=[decode], record=str(tmp_path / "r.sgv")) as it:
            task = asyncio.create_task(it.post(rid="left"))
            await begun(it)
            task.cancel()
            while len(it.router.router.names):
                await asyncio.sleep(0.01)
            decode.hold = None
            assert (await it.post(rid="good")).status_code == 200
            assert not it.router.router.counts.failed

    asyncio.run(run())
    assert failures(tmp_path / "r.sgv") == []
    rec = load(tmp_path / "r.sgv")
    assert rec.rids == ["left", "good"] and "by round_robin" in str(rec.explain("good"))
    assert len(rec.requests) == len(rec.waits) == 2 and rec.check() == []
