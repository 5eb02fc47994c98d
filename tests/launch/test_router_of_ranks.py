"""The router between tokenizer workers and several schedulers: whose requests end with a lost one."""

from __future__ import annotations

from test_tokenizer_router import Rig, batch, run

from sgviz.messages import AbortReq, FinishReason, RoutedReq


def routed(*rows: tuple[str, int, int]) -> RoutedReq:
    rids, created, ranks = zip(*rows)
    return RoutedReq(rids=list(rids), created=list(created), dp_ranks=list(ranks))


LOST = FinishReason(type="abort", message="rank 1 died", status_code=503)


def test_the_requests_of_a_lost_rank_end_in_their_workers_and_no_others() -> None:
    async def test(rig: Rig) -> None:
        for worker, rid in ((1, "a"), (1, "b"), (2, "c"), (2, "d")):
            await rig.dispatch(worker, rid, created=5)
        rig.results.send(routed(("a", 5, 0), ("b", 5, 1), ("c", 5, 1), ("other", 5, 1), ("d", 4, 1)))
        assert isinstance(await rig.router.recv(), RoutedReq)  # the main process's own are in it, too
        rig.results.send(batch("c", ended=("c",), created=5))
        await rig.router.recv()
        assert (await rig.workers[2].next()).rids == ["c"]
        assert rig.router.fail_rank(1, LOST) == 1
        assert await rig.workers[1].next() == AbortReq(rid="b", finished_reason=LOST)
        assert {each["rid"] for each in rig.router.live_requests()} == {"a", "d"}

    run(test)


def test_a_request_that_a_rank_got_as_it_died_ends_when_that_is_known() -> None:
    async def test(rig: Rig) -> None:
        assert rig.router.fail_rank(1, LOST) == 0
        await rig.dispatch(2, "a", created=5)
        rig.results.send(routed(("a", 5, 1)))
        await rig.router.recv()
        assert await rig.workers[2].next() == AbortReq(rid="a", finished_reason=LOST)
        await rig.dispatch(1, "a", created=6)  # its name is free

    run(test)
