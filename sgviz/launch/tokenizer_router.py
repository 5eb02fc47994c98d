"""MultiTokenizerRouter: between the tokenizer workers and the scheduler, in the main process's loop.

Each worker has a pair of sockets to it and takes it for the scheduler. It remembers which worker sent which rid, so
that results find back, one rid lives once, and a worker's aborts touch nobody else's requests. A request of several
samples is sent under fresh rids: its own name is known to its worker alone, so two workers may each have one of that
name, and an abort by name ends both.
Whatever is not a worker's goes on to the TokenizerManager of the main process, which leads: pauses, names of weights
and aborts by name are orders of its to all workers.

Mirrors SGLang's MultiTokenizerRouter. What differs: workers have a channel each instead of a name on every message
(http_worker_ipc), and results are split here rather than by the detokenizer. Imports: channel, messages.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import zmq

from sgviz.channel import AsyncReceiver, PortArgs, Sender
from sgviz.errors import BadRequest, Unavailable
from sgviz.messages import (
    AbortReq,
    BatchEmbeddingOutput,
    BatchStrOutput,
    ConfigureTraceReq,
    DebugReqOutput,
    FinishReason,
    OutputColumns,
    RoutedReq,
    ShutdownReq,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
    ToTokenizer,
)
from sgviz.messages.generate import new_rid
from sgviz.messages.workers import (
    AckedOrder,
    DrainReq,
    EngineFailedReq,
    GivenUp,
    HttpNoted,
    OrderDone,
    TokenizerWorkerRegistrationReq,
    Told,
    WorkerNews,
    WorkerWelcome,
)

log = logging.getLogger(__name__)

FromWorker = TokenizedGenerateReqInput | TokenizedEmbeddingReqInput | AbortReq | WorkerNews
Columns = TypeVar("Columns", bound=OutputColumns)
CONNECT_S = 10.0
STEP_S = 0.005


@dataclass(slots=True, eq=False)
class _Waiting:
    """An order that is not done by all: who has yet to say so, and who waits."""

    workers: set[int]
    done: asyncio.Future[None]


class MultiTokenizerRouter:
    """What the main process's TokenizerManager receives from, and the crew that it leads. One asyncio loop owns it.

    Args:
        receiver: from scheduler and detokenizer. to_scheduler: shared with the TokenizerManager.
        on_failure: told why when nothing can be brought on any more.

    Attributes:
        on_http: gets what workers tell of their HTTP requests.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        ports: PortArgs,
        receiver: AsyncReceiver[ToTokenizer],
        to_scheduler: Sender,
        on_failure: Callable[[str], None],
    ) -> None:
        self._zmq = context
        self._ports = ports
        self._receiver = receiver
        self._to_scheduler = to_scheduler
        self._on_failure = on_failure
        self.on_http: Callable[[HttpNoted], None] = lambda noted: None
        self.events_on = False
        self._owners: dict[str, tuple[int, int]] = {}  # rid: worker, and when it began
        self._ranks: dict[str, int] = {}  # rid: the scheduler that has it, of several
        self._lost: dict[int, FinishReason] = {}  # schedulers that died, and what their requests end with
        self._senders: dict[int, Sender] = {}
        self._receivers: dict[int, AsyncReceiver[FromWorker]] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # membership only
        self._waiting: dict[str, _Waiting] = {}
        self._connected: set[int] = set()  # membership only
        self._all_here = False
        self._early: list[msgspec.Struct] = []  # orders from before that
        self._failure: str | None = None

    # ------------------------------------------------------------ life

    def open(self, worker: int) -> PortArgs:
        """Bind the sockets of a worker to come, before any of them has come; the addresses that it is given."""
        ports = self._ports.for_worker(worker)
        self._receivers[worker] = AsyncReceiver(
            self._zmq, ports.scheduler_input_ipc_name, FromWorker, bind=True
        )
        self._senders[worker] = Sender(self._zmq, ports.tokenizer_ipc_name, bind=True)
        self._spawn(self._listen(worker))
        return ports

    def fail(self, message: str) -> None:
        """The engine is gone: every request of the workers ends, and every order too."""
        self._failure = message
        for waiting in self._waiting.values():
            if not waiting.done.done():
                waiting.done.set_exception(Unavailable(message))
        self._waiting.clear()
        for rid in list(self._owners):
            self._forward(AbortReq(rid=rid, message=message))
        self._broadcast(EngineFailedReq(message=message))

    async def drained(self, grace: float, refusal: str) -> None:
        """No worker takes a new request, for `refusal`; those under way end, by themselves for `grace` seconds."""
        await self.ask(DrainReq(id=new_rid(), grace=grace, message=refusal))

    def leave(self) -> None:
        """Tell the workers to close their ports and end."""
        for worker in self._senders:
            self._send(worker, ShutdownReq())

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for worker, receiver in self._receivers.items():
            receiver.close()
            self._senders[worker].close()

    # ------------------------------------------------------------ the crew

    @property
    def live(self) -> int:
        """Requests of workers that the scheduler has."""
        return len(self._owners)

    def live_requests(self) -> list[dict[str, Any]]:
        """The rids under way and the worker that has each."""
        return [{"rid": rid, "tokenizer_worker": worker} for rid, (worker, _) in self._owners.items()]

    def fail_rank(self, rank: int, reason: FinishReason) -> int:
        """End the requests of workers that a lost data parallel rank had; how many there were."""
        self._lost[rank] = reason
        had = [rid for rid, its in self._ranks.items() if its == rank]
        for rid in had:
            self._end(rid, reason)
        return len(had)

    def _end(self, rid: str, reason: FinishReason) -> None:
        self._send(self._disown(rid), AbortReq(rid=rid, finished_reason=reason))

    def _disown(self, rid: str) -> int | None:
        """Forget a request; the worker that had it."""
        self._ranks.pop(rid, None)
        return self._owners.pop(rid, (None, 0))[0]

    def _note_routed(self, message: RoutedReq) -> None:
        for rid, created, rank in zip(message.rids, message.created, message.dp_ranks):
            if self._owners.get(rid, (0, None))[1] != created:
                continue  # the main process's own, or ended
            self._ranks[rid] = rank
            if (reason := self._lost.get(rank)) is not None:
                self._end(rid, reason)

    def tell(self, order: Told) -> None:
        """Send an order to all, without waiting."""
        self._broadcast(order)

    def set_events(self, on: bool) -> None:
        """Switch events on or off in all workers, and in those to come."""
        self.events_on = on
        self._broadcast(ConfigureTraceReq(on=on))

    def ask(self, order: AckedOrder, timeout: float | None = None) -> Awaitable[None]:
        """Send an order to all, at once; wait for the result until all have done it, at most `timeout` seconds.

        Before all workers are here it counts as done: they begin with it.

        Raises (when waited for):
            Unavailable: the engine failed, or a worker, which is named, did not do it in time (it does so later).
        """
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._failure is not None:
            done.set_exception(Unavailable(self._failure))
            return done
        self._broadcast(order)
        if not self._all_here:
            done.set_result(None)
            return done
        waiting = self._waiting[order.id] = _Waiting(set(self._senders), done)
        return done if timeout is None else self._in_time(order, waiting, timeout)

    async def _in_time(self, order: AckedOrder, waiting: _Waiting, timeout: float) -> None:
        try:
            async with asyncio.timeout(timeout):
                await waiting.done
        except TimeoutError:
            names = ", ".join(f"http-{worker}" for worker in sorted(waiting.workers))
            what = type(order).__name__
            why = f"of the tokenizer workers {names} did not answer {what} within {timeout:g} s"
            raise Unavailable(why) from None
        finally:
            self._waiting.pop(order.id, None)

    # ------------------------------------------------------------ to the workers

    async def recv(self) -> ToTokenizer:
        """The next message of scheduler or detokenizer, without what it brings for workers."""
        message = await self._receiver.recv()
        if isinstance(message, BatchStrOutput):
            return self._split(message)
        if isinstance(message, BatchEmbeddingOutput):
            return self._split(message)
        if isinstance(message, AbortReq):
            self._send(self._disown(message.rid), message)
        elif isinstance(message, RoutedReq):
            self._note_routed(message)
        elif isinstance(
            message, DebugReqOutput
        ):  # time limits stand still while a debugger holds the scheduler
            self._broadcast(message)
        return message

    def _split(self, batch: Columns) -> Columns:
        """Send each worker its rows; what is left."""
        rows: dict[int | None, list[int]] = {}
        for row, rid in enumerate(batch.rids):
            worker = self._owner(rid, batch.time_stats[row].created)
            rows.setdefault(worker, []).append(row)
            if worker is not None and batch.finished_reasons[row] is not None:
                self._disown(rid)
        own = rows.pop(None, [])
        for worker, theirs in rows.items():
            self._send(worker, _rows_of(batch, theirs))
        return _rows_of(batch, own) if rows else batch

    def _owner(self, rid: str, created: int) -> int | None:
        """Whose a row is; None also for a late one of an earlier request of that rid: nobody waits for it."""
        worker, began = self._owners.get(rid, (None, 0))
        return worker if created in (0, began) else None

    def _send(self, worker: int | None, message: msgspec.Struct) -> None:
        if worker is None:
            return
        with suppress(Unavailable):  # it died, which is dealt with where it is watched
            self._senders[worker].send(message)

    def _broadcast(self, message: msgspec.Struct) -> None:
        if not self._all_here:
            self._early.append(message)
            return
        for worker in self._senders:
            self._send(worker, message)

    # ------------------------------------------------------------ from the workers

    async def _listen(self, worker: int) -> None:
        receiver = self._receivers[worker]
        while True:
            self._take(worker, await receiver.recv())

    def _take(self, worker: int, message: FromWorker) -> None:
        if isinstance(message, TokenizedGenerateReqInput):  # vectors are a kind of it
            self._dispatch(worker, message)
        elif isinstance(message, AbortReq):
            self._abort(worker, message)
        elif isinstance(message, HttpNoted):
            self.on_http(message)
        elif isinstance(message, OrderDone):
            self._note_done(worker, message.id)
        elif isinstance(message, GivenUp):
            if self._owners.get(message.rid) == (worker, message.created):
                self._disown(message.rid)
        else:
            assert isinstance(message, TokenizerWorkerRegistrationReq)
            self._spawn(self._welcome(worker))

    def _dispatch(self, worker: int, message: TokenizedGenerateReqInput) -> None:
        rid = message.rid
        if self._is_anothers(rid, worker):
            why = f"rid {rid!r} is already in use; wait for its end or take another"
            reason = FinishReason(type="abort", message=why, status_code=400, err_type=BadRequest.type)
            self._send(worker, AbortReq(rid=rid, finished_reason=reason))
            return
        self._owners[rid] = worker, message.time_stats.created
        self._forward(message)

    def _is_anothers(self, rid: str, worker: int) -> bool:
        owner, _ = self._owners.get(rid, (worker, 0))
        return owner != worker

    def _abort(self, worker: int, message: AbortReq) -> None:
        if message.abort_all:  # all that this worker knows of
            rids = [rid for rid, (owner, _) in self._owners.items() if owner == worker]
        elif self._is_anothers(message.rid, worker):
            rids = []  # what it was refused, before it heard of that
        else:
            rids = [message.rid]  # perhaps without an owner: its last row has come, and could not be handled
        for rid in rids:
            self._forward(AbortReq(rid=rid, message=message.message))

    def _forward(self, message: msgspec.Struct) -> None:
        with suppress(Unavailable):  # the scheduler died, and everybody is about to hear it
            self._to_scheduler.send(message)

    def _note_done(self, worker: int, order: str) -> None:
        waiting = self._waiting.get(order)
        if waiting is None:
            return
        waiting.workers.discard(worker)
        if not waiting.workers:
            del self._waiting[order]
            if not waiting.done.done():
                waiting.done.set_result(None)

    async def _welcome(self, worker: int) -> None:
        """Answer all as soon as all can be reached; before it no worker takes requests, so none misses an order."""
        sender = self._senders[worker]
        async with asyncio.timeout(CONNECT_S):
            while not sender.wait_for_peer(0):
                await asyncio.sleep(STEP_S)
        self._connected.add(worker)
        if len(self._connected) == len(self._senders):
            self._all_here = True
            early, self._early = self._early, []
            for message in (WorkerWelcome(events_on=self.events_on), *early):
                self._broadcast(message)

    # ------------------------------------------------------------ inside

    def _spawn(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_end)

    def _on_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.error("bringing messages to and from the tokenizer workers failed", exc_info=error)
        self._on_failure(f"{type(error).__name__}: {error}")


def _rows_of(batch: Columns, rows: list[int]) -> Columns:
    """A batch of these rows alone."""
    size = len(batch.rids)
    if len(rows) == size:
        return batch
    picked: dict[str, Any] = {
        name: [column[row] for row in rows]
        if isinstance(column := getattr(batch, name), list) and len(column) == size
        else column
        for name in batch.__struct_fields__
    }
    return type(batch)(**picked)
