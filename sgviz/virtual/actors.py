"""The components beside the scheduler, as actors that take one thing at a time in virtual time.

Each is the real component; an actor feeds it and keeps its clock. The tokenizer manager lives in an asyncio loop
that runs until nothing is ready and then stands still. Imports: tokenizer_manager, detokenizer_manager, virtual.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable, Iterable
from contextvars import Context
from typing import Any, Protocol, TypeVarTuple

from sgviz.detokenizer_manager import DetokenizerManager
from sgviz.errors import SgvizError
from sgviz.messages import BatchEmbeddingOutput, BatchTokenIDOutput, OutputColumns, ToDetokenizer, ToTokenizer
from sgviz.model.tokenizer import Tokenizer
from sgviz.tokenizer_manager import TokenizerManager
from sgviz.virtual.arrival import AfterFinish, Arrival, Prompter
from sgviz.virtual.host import ActorClock, HostModel
from sgviz.virtual.wire import HandedIn, Wire, WireSender

Ts = TypeVarTuple("Ts")
Output = dict[str, Any]
THREAD_POLL_S = 0.0005  # long prompts are tokenized in a thread; that is waited for awake


class Actor(Protocol):
    """One component between its inputs."""

    def next_at(self) -> int | None:
        """When it could begin with its next input; None without one."""
        ...

    def step(self) -> None:
        """Take that input."""
        ...


class SteppedLoop(asyncio.SelectorEventLoop):
    """An asyncio loop that runs while something is ready, and returns."""

    def __init__(self) -> None:
        super().__init__()
        self._readied = 0

    def call_soon(
        self,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.Handle:
        self._readied += 1
        return super().call_soon(callback, *args, context=context)

    def run_ready(self) -> None:
        """Until a whole pass made nothing ready any more. Timers are not waited for."""
        while True:
            before = self._readied
            self.stop()
            self.run_forever()
            if self._readied == before:
                return


class TokenizerActor:
    """The TokenizerManager: arrivals in, results in.

    Attributes:
        outputs: the last answer of each request. failures: what was refused before it was sent.
    """

    def __init__(
        self,
        *,
        loop: SteppedLoop,
        manager: TokenizerManager,
        results: HandedIn[ToTokenizer],
        sender: WireSender,
        inbox: Wire[ToTokenizer],
        clock: ActorClock,
        origin_ns: int,
        prompter: Prompter,
        model: HostModel | None,
        after: AfterFinish | None,
    ) -> None:
        self._loop = loop
        self._manager = manager
        self._results = results
        self._sender = sender
        self._inbox = inbox
        self._clock = clock
        self._origin_ns = origin_ns
        self._prompter = prompter
        self._model = model
        self._after = after
        self._arrivals: list[tuple[int, int, Arrival]] = []
        self._numbers = itertools.count()
        self.outputs: dict[str, Output] = {}
        self.failures: dict[str, SgvizError] = {}

    def add(self, arrivals: Iterable[Arrival]) -> None:
        """Requests to come; those whose time has passed come now."""
        for arrival in arrivals:
            heapq.heappush(self._arrivals, (self._origin_ns + arrival.at_ns, next(self._numbers), arrival))

    def next_at(self) -> int | None:
        first = self._first()
        return None if first is None else max(first, self._clock.now())

    def step(self) -> None:
        at = self._first()
        assert at is not None
        self._clock.advance_to(at)
        if self._arrivals and self._arrivals[0][0] == at:
            self._arrive(heapq.heappop(self._arrivals)[2])
        else:
            self._receive()

    def _first(self) -> int | None:
        ats = [self._arrivals[0][0]] if self._arrivals else []
        if self._inbox.first_at is not None:
            ats.append(self._inbox.first_at)
        return min(ats, default=None)

    def _arrive(self, arrival: Arrival) -> None:
        obj = self._prompter.request(arrival, self._origin_ns + arrival.at_ns)
        if self._model is not None:
            self._clock.charge(self._model.tokenize_ns(_length(arrival)))
        sent = self._sender.sent
        self._clock.resume()
        task = self._loop.create_task(self._answer(arrival.rid, obj))
        self._loop.run_ready()
        while self._sender.sent == sent and not task.done():
            self._loop.run_until_complete(asyncio.sleep(THREAD_POLL_S))
        self._clock.pause()

    def _receive(self) -> None:
        self._clock.resume()
        message = self._inbox.take()
        if self._model is not None:
            rows = len(message.rids) if isinstance(message, OutputColumns) else 1
            self._clock.charge(self._model.answer_ns(rows))
        self._results.hand_in(message)
        self._loop.run_ready()
        self._clock.pause()

    async def _answer(self, rid: str, obj: Any) -> None:
        try:
            async for output in self._manager.generate_request(obj):
                assert isinstance(output, dict)
                self.outputs[rid] = output
        except SgvizError as error:
            self.failures[rid] = error
        if self._after is not None:
            now = self._clock.now() - self._origin_ns
            self.add(self._after(rid, self.outputs.get(rid), now))

    def close(self) -> None:
        """End the manager and its loop."""
        self._loop.run_until_complete(self._manager.close())
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()


class DetokenizerActor:
    """The DetokenizerManager: ids in, text out."""

    def __init__(
        self,
        manager: DetokenizerManager,
        inbox: Wire[ToDetokenizer],
        clock: ActorClock,
        model: HostModel | None,
    ) -> None:
        self._manager = manager
        self._inbox = inbox
        self._clock = clock
        self._model = model

    def next_at(self) -> int | None:
        first = self._inbox.first_at
        return None if first is None else max(first, self._clock.now())

    def step(self) -> None:
        at = self._inbox.first_at
        assert at is not None
        self._clock.advance_to(at)
        self._clock.resume()
        message = self._inbox.take()
        if isinstance(message, BatchTokenIDOutput):
            if self._model is not None:
                self._clock.charge(self._model.detokenize_ns(len(message.rids)))
            self._manager.handle(message)
        elif isinstance(message, BatchEmbeddingOutput):
            self._manager.handle(message)  # passed on as it is
        self._clock.pause()


class OneThread:
    """A tokenizer that decodes in the thread of its caller, where the time of it is counted (and none is idle)."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size

    def decode_batch(
        self,
        list_of_ids: list[list[int]],
        /,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> list[str]:
        """`decode` of each."""
        decode = self._tokenizer.decode
        return [decode(ids, skip_special_tokens, spaces_between_special_tokens) for ids in list_of_ids]


def _length(arrival: Arrival) -> int:
    """Prompt tokens, roughly: four characters of text are one."""
    prompt = arrival.prompt
    if isinstance(prompt, int):
        return prompt
    return len(prompt) // 4 if isinstance(prompt, str) else len(prompt)
