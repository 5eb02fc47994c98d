"""A TokenizerManager on real inproc sockets, and an engine behind it that a test can drive by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec
import zmq
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from sgviz.channel import AsyncReceiver, PortArgs, Sender
from sgviz.events import RingSink, TimeStats, Tracer, WallClock
from sgviz.messages import (
    AbortReq,
    BatchStrOutput,
    FinishReason,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    GenerateReqInput,
    GetInternalStateReq,
    GetInternalStateReqOutput,
    SamplingParams,
    TokenizedGenerateReqInput,
    ToScheduler,
    ToTokenizer,
)
from sgviz.messages.workers import GivenUp
from sgviz.tokenizer_manager import Limits, Output, RequestLog, TokenizerManager

T = TypeVar("T")
LIMITS = Limits(
    context_len=64,
    max_req_len=63,
    max_req_input_len=40,
    max_total_num_tokens=1000,
    page_size=1,
    vocab_size=256,
)
CLOCK = WallClock()


class ByteCodec:
    """A real byte-level tokenizer without merges: a token a byte, ids 0 to 255."""

    def __init__(self) -> None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        self._bytes = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
        self._bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._bytes.decoder = decoders.ByteLevel()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self._bytes.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(
        self, ids: list[int], skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        text: str = self._bytes.decode(ids, skip_special_tokens=skip_special_tokens)
        return text


CODEC = ByteCodec()


class Engine:
    """Scheduler and detokenizer in one: keeps what it got, answers by itself or when told.

    With `auto` a request gets its letters, one token a message. An abort of a running request ends it
    through the output path, one of a request in `queued` by an AbortReq back.
    """

    def __init__(self, context: zmq.Context[Any], ports: PortArgs) -> None:
        self.inbox: AsyncReceiver[ToScheduler | GivenUp] = AsyncReceiver(
            context, ports.scheduler_input_ipc_name, ToScheduler | GivenUp
        )
        self.outbox = Sender(context, ports.tokenizer_ipc_name)
        self.auto = True
        self.queued: set[str] = set()
        self.received: list[Any] = []
        self.live: dict[str, TokenizedGenerateReqInput] = {}
        self.done: dict[str, int] = {}
        self._news = asyncio.Condition()

    async def run(self) -> None:
        while True:
            message = await self.inbox.recv()
            self.received.append(message)
            self._react(message)
            async with self._news:
                self._news.notify_all()

    async def until(self, enough: Callable[[], bool]) -> None:
        """Wait for messages until `enough` holds."""
        async with asyncio.timeout(5), self._news:
            await self._news.wait_for(enough)

    @property
    def requests(self) -> list[TokenizedGenerateReqInput]:
        return [m for m in self.received if isinstance(m, TokenizedGenerateReqInput)]

    @property
    def aborts(self) -> list[AbortReq]:
        return [m for m in self.received if isinstance(m, AbortReq)]

    def token(self, rid: str, text: str, reason: FinishReason | None = None, **columns: Any) -> None:
        """Send the next piece of one request."""
        self.send(rid, text, CODEC.encode(text), reason, **columns)

    def send(self, rid: str, text: str, ids: list[int], reason: FinishReason | None, **columns: Any) -> None:
        self.outbox.send(self.row(rid, text, ids, reason, **columns))

    def row(
        self, rid: str, text: str, ids: list[int], reason: FinishReason | None, **columns: Any
    ) -> BatchStrOutput:
        request = self.live[rid]
        self.done[rid] = self.done.get(rid, 0) + len(ids)
        if reason is not None:
            del self.live[rid]
        stats = msgspec.structs.replace(request.time_stats)
        stats.output_streamed = stats.detokenized = CLOCK.now()
        return BatchStrOutput(
            rids=[rid],
            finished_reasons=[reason],
            output_ids=[ids],
            prompt_tokens=[len(request.input_ids)],
            completion_tokens=[self.done[rid]],
            cached_tokens=[2],
            retraction_counts=[1],
            time_stats=[stats],
            output_strs=[text],
            **columns,
        )

    def _react(self, message: ToScheduler | GivenUp) -> None:
        if isinstance(message, TokenizedGenerateReqInput):
            self.live[message.rid], self.done[message.rid] = message, 0
            self._stamp(message.time_stats)
            if self.auto:
                self._answer(message)
        elif isinstance(message, AbortReq):
            rids = list(self.live) if message.abort_all else [message.rid]
            for rid in rids:
                self._abort(rid, message.message)
        elif isinstance(message, FlushCacheReqInput):
            self.outbox.send(FlushCacheReqOutput(id=message.id, success=not self.live, message="as asked"))
        elif isinstance(message, GetInternalStateReq) and self.auto:
            self.outbox.send(GetInternalStateReqOutput(id=message.id, state={"live": len(self.live)}))

    def _answer(self, message: TokenizedGenerateReqInput) -> None:
        limit = message.sampling_params.max_new_tokens
        assert limit is not None
        length = FinishReason(type="length", length=limit)
        for n in range(limit - 1):
            self.token(message.rid, chr(ord("a") + n % 26))
        if limit:
            self.token(message.rid, chr(ord("a") + (limit - 1) % 26), length)
        else:
            self.send(message.rid, "", [], length)

    def _abort(self, rid: str, why: str) -> None:
        if rid not in self.live:
            return
        if rid in self.queued:
            del self.live[rid]
            self.outbox.send(AbortReq(rid=rid, message=why))
        else:
            self.send(rid, "", [], FinishReason(type="abort", message=why))

    def _stamp(self, stats: TimeStats) -> None:
        stats.scheduler_recv = CLOCK.now()
        stats.wait_queue_entry = CLOCK.now()
        stats.forward_entry = CLOCK.now()
        stats.queue_ns = stats.forward_entry - stats.wait_queue_entry
        stats.prefill_finished = CLOCK.now()
        stats.completion = CLOCK.now()


class Rig:
    """Manager and engine, joined."""

    def __init__(self, manager: TokenizerManager, engine: Engine, ring: RingSink) -> None:
        self.manager = manager
        self.engine = engine
        self.ring = ring

    def bodies(self, kind: type[T]) -> list[T]:
        return [event.body for event in self.ring.snapshot() if isinstance(event.body, kind)]

    async def one(self, obj: GenerateReqInput) -> Output:
        """The single item of a request that is not streamed."""
        (item,) = await self.all(obj)
        assert isinstance(item, dict)
        return item

    async def many(self, obj: GenerateReqInput) -> list[Output]:
        (item,) = await self.all(obj)
        assert isinstance(item, list)
        return item

    async def all(
        self, obj: GenerateReqInput, is_disconnected: Callable[[], Awaitable[bool]] | None = None
    ) -> list[Output | list[Output]]:
        return [item async for item in self.manager.generate_request(obj, is_disconnected)]

    def start(
        self, obj: GenerateReqInput, is_disconnected: Callable[[], Awaitable[bool]] | None = None
    ) -> asyncio.Task[list[Output | list[Output]]]:
        return asyncio.create_task(self.all(obj, is_disconnected))

    async def dispatched(self, count: int = 1) -> list[str]:
        """Wait until the engine has `count` requests; their rids."""
        await self.engine.until(lambda: len(self.engine.requests) >= count)
        return [request.rid for request in self.engine.requests]

    async def empty(self) -> None:
        """Every request has ended and nothing is left of it."""
        assert await self.manager.drained(5)
        assert not self.manager.rid_to_state


@asynccontextmanager
async def rig(
    limits: Limits = LIMITS,
    on_failure: Callable[[str], None] | None = None,
    request_timeout: float | None = None,
    request_log: RequestLog | None = None,
    is_worker: bool = False,
) -> AsyncIterator[Rig]:
    context, ports = zmq.Context(), PortArgs.for_threads()
    ring = RingSink()
    sender = Sender(context, ports.scheduler_input_ipc_name, bind=True)
    receiver: AsyncReceiver[ToTokenizer] = AsyncReceiver(
        context, ports.tokenizer_ipc_name, ToTokenizer, bind=True
    )
    engine = Engine(context, ports)
    manager = TokenizerManager(
        codec=CODEC,
        sender=sender,
        receiver=receiver,
        trace=Tracer("tokenizer_manager", ring, CLOCK),
        limits=limits,
        clock=CLOCK,
        on_failure=on_failure,
        request_timeout=request_timeout,
        request_log=request_log,
        is_worker=is_worker,
    )
    task = asyncio.create_task(engine.run())
    try:
        yield Rig(manager, engine, ring)
    finally:
        await manager.close()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        engine.inbox.close()
        for socket in (sender, receiver, engine.outbox):
            socket.close()
        context.term()


def run(test: Coroutine[Any, Any, T]) -> T:
    """Run one async test, at most ten seconds."""

    async def limited() -> T:
        async with asyncio.timeout(10):
            return await test

    return asyncio.run(limited())


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 3, **values})
