"""A load that a person steers: it runs until it is stopped, and what is changed acts on the next request.

It sends from a loop in a thread of its own, so a notebook's kernel stays free; never more than `max_in_flight`
requests at a time, however slow the answers. SGLang's counterpart is a bench_serving that has to be started anew.
Imports: engine, launch (its loop thread), workload, errors.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import uuid
from collections import deque
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from sgviz.engine import Engine
from sgviz.errors import BadRequest, SgvizError, Unavailable
from sgviz.experiment.load_targets import Target, target_of
from sgviz.launch.loop_thread import LoopThread
from sgviz.workload.endless import Endless, LoadShape

MAX_IN_FLIGHT = 64
GIVE_UP = 50  # failures in a row; nobody is there, or nothing of this shape can be served
PAUSE_S = 0.5  # that a failed request keeps its place, so that a refusing server is not asked without end
STEP_S = 0.5  # of the history
STEPS = 240
RATE_STEPS = 10  # the present rates are those of so many steps


@dataclass(frozen=True, slots=True)
class LoadCounts:
    """How it goes. `aborted`: given up when it was closed. Rates: a second, over the last five.

    `note`: why it stopped by itself, or what the last failure said.
    """

    sent: int
    finished: int
    failed: int
    aborted: int
    sent_per_s: float
    finished_per_s: float
    tokens_per_s: float
    note: str

    @property
    def in_flight(self) -> int:
        return self.sent - self.finished - self.failed - self.aborted


@dataclass(slots=True)
class Step:
    """Half a second of the history: `number` of the step, what was sent, finished and answered in tokens in it."""

    number: int
    sent: int = 0
    finished: int = 0
    tokens: int = 0
    in_flight: int = 0


class LiveLoad:
    """Sends requests to an engine of this process, or to a server by its URL, until `close`.

    Args:
        engine: an Engine, or a URL. shape: to begin with. max_in_flight: requests at a time, at most. api_key: of the
            server.

    Raises:
        Unavailable: nobody answers at the URL. BadRequest: the shape does not fit the model's context.
    """

    def __init__(
        self,
        engine: Engine | str,
        shape: LoadShape | None = None,
        *,
        max_in_flight: int = MAX_IN_FLIGHT,
        api_key: str | None = None,
    ) -> None:
        if max_in_flight < 1:
            raise BadRequest(f"max_in_flight is {max_in_flight}; at least 1 request must run")
        self._target: Target = target_of(engine, api_key)
        self.facts = self._target.facts
        self.max_in_flight = max_in_flight
        self._shape = self._checked(shape or LoadShape())
        self._pace = _Pace(self._shape.seed)
        self._book = _Book()
        self._name = uuid.uuid4().hex[:4]
        self._tasks: set[asyncio.Task[None]] = set()
        self._sending: asyncio.Task[None] | None = None
        self._closed = False
        self._loop = LoopThread("sgviz-load")
        self._changed = self._loop.call(_event())

    @property
    def shape(self) -> LoadShape:
        return self._shape

    @property
    def running(self) -> bool:
        """Whether requests are sent."""
        return self._sending is not None and not self._sending.done()

    @property
    def counts(self) -> LoadCounts:
        return self._book.counts()

    @property
    def history(self) -> list[Step]:
        """The last two minutes in steps of half a second, oldest first."""
        return self._book.history()

    def change(self, **changes: object) -> LoadShape:
        """Change the shape from the next request on; a running load notices at once.

        Raises:
            BadRequest: no such attribute, a value is not allowed, or it does not fit the model's context.
        """
        self._shape = self._checked(self._shape.changed(**changes))
        if not self._closed:
            self._loop.loop.call_soon_threadsafe(self._changed.set)
        return self._shape

    def start(self) -> None:
        """Begin to send, or go on. Raises Unavailable after `close`."""
        if self._closed:
            raise Unavailable("this load was closed")
        self._loop.call(self._start())

    def stop(self) -> None:
        """Send no more; what is under way ends by itself."""
        if not self._closed:
            self._loop.call(self._stop())

    def close(self) -> None:
        """Stop, give up what is under way, and end the thread; harmless when done before."""
        if self._closed:
            return
        self._closed = True
        self._loop.call(self._end())
        self._loop.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------ in the load's own loop

    async def _start(self) -> None:
        if not self.running:
            self._book.begin()
            self._sending = asyncio.create_task(self._send())

    async def _stop(self) -> None:
        if self._sending is not None:
            await _cancelled([self._sending])

    async def _end(self) -> None:
        await self._stop()
        await _cancelled(list(self._tasks))
        await self._target.close()

    async def _send(self) -> None:
        loop = asyncio.get_running_loop()
        self._pace.resume(loop.time())
        while not self._book.hopeless:
            self._changed.clear()
            wait = self._pace.wait_s(self._shape, loop.time(), room=self._room())
            if wait == 0.0:
                task = asyncio.create_task(self._one())
                self._tasks.add(task)
                task.add_done_callback(self._ended)
                await asyncio.sleep(0)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._changed.wait()

    def _room(self) -> bool:
        most = self.max_in_flight
        if self._shape.rate is None:
            most = min(most, self._shape.concurrency)
        return len(self._tasks) < most

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._changed.set()

    async def _one(self) -> None:
        source, shape = self._pace.source(self._shape), self._shape
        request = source.next(shape)
        ids = source.ids_of(request, self.facts.vocab_size)
        self._book.sent()
        try:
            tokens = await self._target.ask(f"load-{self._name}-{request.rid}", ids, request.output_tokens)
        except asyncio.CancelledError:
            self._book.aborted()
            raise
        except Exception as error:  # whatever it is, the request has ended, and a person must see why
            told = error.message if isinstance(error, SgvizError) else f"{type(error).__name__}: {error}"
            self._book.failed(told)
            await asyncio.sleep(PAUSE_S)
        else:
            self._book.finished(tokens)

    def _checked(self, shape: LoadShape) -> LoadShape:
        needed = shape.prompt_tokens + shape.output_tokens
        if needed > self.facts.context_len:
            raise BadRequest(
                f"prompt and output are {needed} tokens; the context of {self.facts.model} has {self.facts.context_len}"
            )
        return shape


class _Pace:
    """When the next request is due. Only the load's loop touches it."""

    def __init__(self, seed: int) -> None:
        self._source = Endless(seed)
        self._gap = 0.0  # to the next arrival, as a multiple of the mean; so a new rate acts at once
        self._at = 0.0

    def source(self, shape: LoadShape) -> Endless:
        """What draws the requests; a new seed begins anew."""
        if self._source.seed != shape.seed:
            self._source = Endless(shape.seed)
        return self._source

    def resume(self, now: float) -> None:
        self._at = now

    def wait_s(self, shape: LoadShape, now: float, *, room: bool) -> float | None:
        """Seconds to the next request (0.0: now); None: only when something changes."""
        passed, self._at = now - self._at, now
        if not room:
            return None
        if shape.rate is None:
            return 0.0
        self._gap -= passed * shape.rate
        if self._gap > 0.0:
            return self._gap / shape.rate
        # a little late is caught up with, a long hold-up is not
        self._gap = max(self._gap, -1.0) + self.source(shape).gap()
        return 0.0


class _Book:
    """The counts; filled by the load's loop, read by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent = self._finished = self._failed = self._aborted = self._in_a_row = 0
        self._note = ""
        self._steps: deque[Step] = deque(maxlen=STEPS)
        self._begun = 0.0

    @property
    def hopeless(self) -> bool:
        return self._in_a_row >= GIVE_UP

    def begin(self) -> None:
        with self._lock:
            self._in_a_row, self._note = 0, ""
            self._begun = self._begun or time.monotonic()

    def sent(self) -> None:
        with self._lock:
            self._sent += 1
            self._step().sent += 1

    def finished(self, tokens: int) -> None:
        with self._lock:
            self._finished += 1
            self._in_a_row = 0
            step = self._step()
            step.finished += 1
            step.tokens += tokens

    def failed(self, note: str) -> None:
        with self._lock:
            self._failed += 1
            self._in_a_row += 1
            stopped = f"stopped after {GIVE_UP} failures in a row: " if self.hopeless else ""
            self._note = stopped + note

    def aborted(self) -> None:
        with self._lock:
            self._aborted += 1

    def counts(self) -> LoadCounts:
        with self._lock:
            recent = self._recent()
            span = max(STEP_S, min(RATE_STEPS * STEP_S, time.monotonic() - self._begun))
            return LoadCounts(
                sent=self._sent,
                finished=self._finished,
                failed=self._failed,
                aborted=self._aborted,
                sent_per_s=sum(step.sent for step in recent) / span,
                finished_per_s=sum(step.finished for step in recent) / span,
                tokens_per_s=sum(step.tokens for step in recent) / span,
                note=self._note,
            )

    def history(self) -> list[Step]:
        with self._lock:
            if self._steps:
                self._step()
            return list(self._steps)

    def _step(self) -> Step:
        """The step of this moment; those in which nothing happened are there too."""
        number = int(time.monotonic() / STEP_S)
        last = self._steps[-1].number if self._steps else number - 1
        in_flight = self._sent - self._finished - self._failed - self._aborted
        for missing in range(max(last + 1, number - STEPS), number + 1):
            self._steps.append(Step(missing, in_flight=in_flight))
        self._steps[-1].in_flight = in_flight
        return self._steps[-1]

    def _recent(self) -> list[Step]:
        first = int(time.monotonic() / STEP_S) - RATE_STEPS
        return [step for step in self._steps if step.number > first]


async def _event() -> asyncio.Event:
    return asyncio.Event()


async def _cancelled(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
