"""The router between tokenizer workers and the scheduler: whose is what, and what all must do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import zmq

import sgviz
from sgviz.channel import AsyncReceiver, PortArgs, Receiver, Sender
from sgviz.config import Settings
from sgviz.errors import ConfigError, Unavailable
from sgviz.events.time_stats import TimeStats
from sgviz.launch.tokenizer_router import FromWorker, MultiTokenizerRouter
from sgviz.launch.tokenizer_worker import ToWorker
from sgviz.messages import (
    AbortReq,
    BatchEmbeddingOutput,
    BatchStrOutput,
    ConfigureTraceReq,
    DebugReqOutput,
    DebugStatus,
    FinishReason,
    SamplingParams,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
    ToScheduler,
    ToTokenizer,
)
from sgviz.messages.workers import (
    ConfigureLoggingReq,
    EngineFailedReq,
    GivenUp,
    HttpNoted,
    OrderDone,
    PauseContinueBroadcastReq,
    TokenizerWorkerRegistrationReq,
    WorkerWelcome,
)

PATIENCE_MS = 5000


class End:
    """A worker's ends of its sockets."""

    def __init__(self, context: zmq.Context[Any], ports: PortArgs) -> None:
        self.sender = Sender(context, ports.scheduler_input_ipc_name)
        self.inbox: Receiver[Any] = Receiver(context, ports.tokenizer_ipc_name, ToWorker)

    def send(self, message: FromWorker) -> None:
        self.sender.send(message)

    async def next(self) -> Any:
        return await next_of(self.inbox)


async def next_of(inbox: Receiver[Any]) -> Any:
    """The next message of a blocking receiver, without holding up the loop."""
    for _ in range(PATIENCE_MS // 5):
        if found := inbox.drain(1):
            return found[0]
        await asyncio.sleep(0.005)
    raise AssertionError("no message came")


class Rig:
    """A router between a scheduler, a detokenizer and two workers that are all played here."""

    def __init__(self, context: zmq.Context[Any]) -> None:
        self.ports = PortArgs.for_threads()
        to_scheduler = Sender(context, self.ports.scheduler_input_ipc_name, bind=True)
        self.scheduler: Receiver[Any] = Receiver(context, self.ports.scheduler_input_ipc_name, ToScheduler)
        receiver: AsyncReceiver[ToTokenizer] = AsyncReceiver(
            context, self.ports.tokenizer_ipc_name, ToTokenizer, bind=True
        )
        self.results = Sender(context, self.ports.tokenizer_ipc_name)
        self.failures: list[str] = []
        self.router = MultiTokenizerRouter(context, self.ports, receiver, to_scheduler, self.failures.append)
        self.router.events_on = True
        self.workers = {number: End(context, self.router.open(number)) for number in (1, 2)}
        self._receiver = receiver

    async def join(self) -> None:
        for worker in self.workers.values():
            worker.send(TokenizerWorkerRegistrationReq())
        for worker in self.workers.values():
            assert await worker.next() == WorkerWelcome(events_on=True)

    async def dispatch(self, worker: int, rid: str, created: int = 0) -> None:
        message = request(rid, created)
        self.workers[worker].send(message)
        assert (await next_of(self.scheduler)).rid == rid

    def close(self) -> None:
        self.router.close()
        self._receiver.close()


@asynccontextmanager
async def opened() -> AsyncIterator[Rig]:
    context: zmq.Context[Any] = zmq.Context()
    rig = Rig(context)
    try:
        yield rig
    finally:
        rig.close()
        context.destroy(0)
    assert rig.failures == []


@asynccontextmanager
async def joined() -> AsyncIterator[Rig]:
    async with opened() as rig:
        await rig.join()
        yield rig


def request(rid: str, created: int = 0) -> TokenizedGenerateReqInput:
    return TokenizedGenerateReqInput(
        rid=rid,
        input_ids=[1],
        sampling_params=SamplingParams(),
        stream=False,
        time_stats=TimeStats(created=created),
    )


def batch(*rids: str, ended: tuple[str, ...] = (), created: int = 0) -> BatchStrOutput:
    count = len(rids)
    return BatchStrOutput(
        rids=list(rids),
        finished_reasons=[FinishReason(type="length", length=1) if rid in ended else None for rid in rids],
        output_ids=[[number] for number in range(count)],
        prompt_tokens=[1] * count,
        completion_tokens=[1] * count,
        cached_tokens=[0] * count,
        retraction_counts=[0] * count,
        time_stats=[TimeStats(created=created) for _ in rids],
        output_strs=[f"text of {rid}" for rid in rids],
    )


def run(test: Any) -> None:
    async def inside() -> None:
        async with joined() as rig:
            await test(rig)

    asyncio.run(inside())


def test_rows_go_to_who_asked_and_the_rest_stays() -> None:
    async def test(rig: Rig) -> None:
        await rig.dispatch(1, "a")
        await rig.dispatch(2, "b")
        await rig.dispatch(1, "c")
        assert rig.router.live == 3
        rig.results.send(batch("a", "own", "b", "c", ended=("a",)))
        own = await rig.router.recv()
        assert isinstance(own, BatchStrOutput)
        assert own.rids == ["own"] and own.output_strs == ["text of own"] and own.output_ids == [[1]]
        first, second = await rig.workers[1].next(), await rig.workers[2].next()
        assert first.rids == ["a", "c"] and first.output_strs == ["text of a", "text of c"]
        assert first.output_ids == [[0], [3]] and first.output_token_logprobs == []
        assert second.rids == ["b"] and second.output_ids == [[2]]
        # a's row was its last: what comes under that name from now on is somebody else's
        assert [each["rid"] for each in rig.router.live_requests()] == ["b", "c"]
        rig.results.send(batch("b", "a"))
        assert (await rig.router.recv()).rids == ["a"]  # type: ignore[union-attr]
        assert (await rig.workers[2].next()).rids == ["b"]

    run(test)


def test_vectors_and_aborts_find_back_too() -> None:
    async def test(rig: Rig) -> None:
        ask = TokenizedEmbeddingReqInput(
            rid="v", input_ids=[1], sampling_params=SamplingParams(), stream=False, time_stats=TimeStats()
        )
        rig.workers[2].send(ask)
        assert isinstance(await next_of(rig.scheduler), TokenizedEmbeddingReqInput)
        await rig.dispatch(1, "q")
        reason = FinishReason(type="abort", message="full", status_code=503)
        rig.results.send(AbortReq(rid="q", finished_reason=reason))
        await rig.router.recv()
        assert (await rig.workers[1].next()).finished_reason == reason
        rows = batch("v", ended=("v",))
        columns = {name: getattr(rows, name) for name in BatchEmbeddingOutput.__struct_fields__[:8]}
        rig.results.send(BatchEmbeddingOutput(**columns, embeddings=[b"1234"]))
        assert (await rig.router.recv()).rids == []  # type: ignore[union-attr]
        assert (await rig.workers[2].next()).embeddings == [b"1234"]
        assert rig.router.live == 0

    run(test)


def test_a_rid_is_of_one_worker_at_a_time() -> None:
    async def test(rig: Rig) -> None:
        await rig.dispatch(1, "a")
        rig.workers[2].send(request("a"))
        refusal = await rig.workers[2].next()
        assert refusal.rid == "a" and refusal.finished_reason.status_code == 400
        assert "already in use" in refusal.finished_reason.message
        rig.results.send(batch("a", ended=("a",)))
        await rig.router.recv()
        await rig.dispatch(2, "a")

    run(test)


def test_an_abort_of_a_refused_rid_ends_nobody_elses_request() -> None:
    async def test(rig: Rig) -> None:
        await rig.dispatch(1, "a")
        rig.workers[2].send(request("a"))
        rig.workers[2].send(AbortReq(rid="a", message="its client left before the refusal came"))
        assert (await rig.workers[2].next()).finished_reason.status_code == 400
        await rig.dispatch(2, "b")  # nothing came before it
        rig.workers[1].send(AbortReq(rid="a", message="mine"))
        assert (await next_of(rig.scheduler)).message == "mine"
        rig.results.send(batch("a", ended=("a",)))
        await rig.router.recv()
        rig.workers[1].send(AbortReq(rid="a", message="its last row could not be handled"))
        assert "could not be handled" in (await next_of(rig.scheduler)).message

    run(test)


def test_a_late_row_of_an_earlier_request_takes_nothing_from_the_one_that_has_its_name() -> None:
    async def test(rig: Rig) -> None:
        await rig.dispatch(1, "x", created=1)
        await rig.dispatch(1, "x", created=2)  # the first has ended in its worker
        rig.results.send(batch("x", ended=("x",), created=1))
        assert (await rig.router.recv()).rids == ["x"]  # type: ignore[union-attr]  # nobody's
        rig.results.send(batch("x", ended=("x",), created=2))
        assert (await rig.router.recv()).rids == []  # type: ignore[union-attr]
        assert [each.created for each in (await rig.workers[1].next()).time_stats] == [2]
        assert rig.router.live == 0

    run(test)


def test_a_name_is_free_when_its_worker_has_given_the_request_up() -> None:
    async def test(rig: Rig) -> None:
        await rig.dispatch(1, "x", created=1)
        rig.workers[1].send(AbortReq(rid="x", message="request_timeout"))
        await next_of(rig.scheduler)
        rig.workers[1].send(GivenUp(rid="x", created=1))
        await rig.dispatch(1, "y")  # heard after it
        assert [each["rid"] for each in rig.router.live_requests()] == ["y"]
        await rig.dispatch(2, "x", created=2)
        for worker, created in ((1, 1), (2, 1)):  # late, or of another request
            rig.workers[worker].send(GivenUp(rid="x", created=created))
        await rig.dispatch(2, "z")
        await rig.dispatch(1, "w")
        assert {"rid": "x", "tokenizer_worker": 2} in rig.router.live_requests()

    run(test)


def test_an_abort_of_all_is_of_all_of_that_worker() -> None:
    async def test(rig: Rig) -> None:
        for worker, rid in ((1, "a"), (2, "b"), (1, "c")):
            await rig.dispatch(worker, rid)
        rig.workers[1].send(AbortReq(abort_all=True, message="why"))
        aborts = [await next_of(rig.scheduler) for _ in range(2)]
        assert [(each.rid, each.abort_all, each.message) for each in aborts] == [
            ("a", False, "why"),
            ("c", False, "why"),
        ]
        assert rig.scheduler.drain() == []

    run(test)


def test_an_order_is_done_when_all_have_done_it() -> None:
    async def test(rig: Rig) -> None:
        done = asyncio.ensure_future(rig.router.ask(PauseContinueBroadcastReq(id="1", mode="retract")))
        for worker in rig.workers.values():
            assert not done.done()
            order = await worker.next()
            assert order == PauseContinueBroadcastReq(id="1", mode="retract")
            worker.send(OrderDone(id=order.id))
        await asyncio.wait_for(done, 5)

    run(test)


def test_a_worker_that_does_not_answer_in_time_is_named_and_one_that_does_is_not() -> None:
    async def test(rig: Rig) -> None:
        order = PauseContinueBroadcastReq(id="1", mode=None)
        waiting = asyncio.ensure_future(rig.router.ask(order, 0.2))
        rig.workers[1].send(OrderDone(id=(await rig.workers[1].next()).id))
        with pytest.raises(Unavailable, match=r"workers http-2 did not answer PauseContinue.* within 0\.2 s"):
            await waiting
        rig.workers[2].send(OrderDone(id="1"))  # too late, which harms nobody
        again = asyncio.ensure_future(rig.router.ask(PauseContinueBroadcastReq(id="2", mode=None), 5))
        await rig.workers[2].next()
        for worker in rig.workers.values():
            assert (await worker.next()).id == "2"
            worker.send(OrderDone(id="2"))
        await again

    run(test)


def test_no_worker_begins_before_all_can_be_told_and_none_misses_an_order() -> None:
    async def test() -> None:
        async with opened() as rig:
            first, second = rig.workers.values()
            first.send(TokenizerWorkerRegistrationReq())
            await rig.dispatch(1, "a")  # heard after it
            await asyncio.wait_for(rig.router.ask(PauseContinueBroadcastReq(id="1", mode="in_place")), 5)
            rig.router.tell(ConfigureLoggingReq(on=True))
            await asyncio.sleep(0.05)
            assert first.inbox.drain() == []
            second.send(TokenizerWorkerRegistrationReq())
            for worker in (first, second):
                assert await worker.next() == WorkerWelcome(events_on=True)
                assert await worker.next() == PauseContinueBroadcastReq(id="1", mode="in_place")
                assert await worker.next() == ConfigureLoggingReq(on=True)

    asyncio.run(test())


def test_what_concerns_all_reaches_all() -> None:
    async def test(rig: Rig) -> None:
        noted: list[HttpNoted] = []
        rig.router.on_http = noted.append
        status = DebugStatus()
        rig.results.send(DebugReqOutput(id="", status=status))
        assert isinstance(await rig.router.recv(), DebugReqOutput)
        rig.router.set_events(False)
        for worker in rig.workers.values():
            assert isinstance(await worker.next(), DebugReqOutput)
            assert await worker.next() == ConfigureTraceReq(on=False)
            worker.send(HttpNoted(endpoint="/generate", method="POST"))
        await rig.dispatch(1, "a")
        await rig.dispatch(2, "b")
        assert noted == [HttpNoted(endpoint="/generate", method="POST")] * 2

    run(test)


def test_the_end_of_the_engine_ends_orders_and_requests() -> None:
    async def test(rig: Rig) -> None:
        await rig.dispatch(1, "a")
        waiting = rig.router.ask(PauseContinueBroadcastReq(id="1", mode=None))
        rig.router.fail("the http-2 died")
        with pytest.raises(Unavailable, match="http-2 died"):
            await waiting
        with pytest.raises(Unavailable, match="http-2 died"):
            await rig.router.ask(PauseContinueBroadcastReq(id="2", mode=None))
        assert (await next_of(rig.scheduler)).rid == "a"
        for worker in rig.workers.values():
            await worker.next()
            assert await worker.next() == EngineFailedReq(message="the http-2 died")

    run(test)


def test_without_workers_an_order_is_done_at_once() -> None:
    async def test() -> None:
        context: zmq.Context[Any] = zmq.Context()
        rig = Rig(context)
        try:
            await asyncio.wait_for(rig.router.ask(PauseContinueBroadcastReq(id="1", mode="abort")), 1)
        finally:
            rig.close()
            context.destroy(0)

    asyncio.run(test())


@pytest.mark.parametrize("mode", ["threads", "processes"])
def test_an_engine_that_nobody_serves_has_no_workers(mode: Any) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer_worker_num = 2.*sgviz serve"):
        sgviz.Engine("tiny-llama", mode=mode, tokenizer_worker_num=2)
    with pytest.raises(ConfigError, match="tokenizer_worker_num = 3"):
        sgviz.Engine.from_settings(Settings.build(tokenizer_worker_num=3), mode=mode)
    for wrong in (0, 65, "two"):
        with pytest.raises(ConfigError, match="tokenizer_worker_num"):
            Settings.build(tokenizer_worker_num=wrong)
