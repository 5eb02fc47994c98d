"""The load generator for an Engine or a Pair: sends a workload's requests when they are due, and keeps the answers.

Runs in the engine's own loop, beside the tokenizer manager and behind the same door as `Engine.generate`; with
`mode="processes"` scheduler and detokenizer do not feel it. SGLang's counterpart is the client loop of
bench_serving. Imports: launch, tokenizer_manager, workload.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from sgviz.errors import BadRequest, SgvizError
from sgviz.launch.pipeline import Pipeline
from sgviz.tokenizer_manager import Output
from sgviz.workload import Request, Workload

OnDone = Callable[[], None]


class Driven(Protocol):
    """Who can be loaded: an engine, or what answers as one. `pipeline` is where its answers come from."""

    @property
    def pipeline(self) -> Pipeline: ...

    async def async_generate(
        self, prompt: Any = None, sampling_params: Any = None, **options: Any
    ) -> Any: ...

    def stream(
        self, prompt: Any = None, sampling_params: Any = None, **options: Any
    ) -> AsyncIterator[Output]: ...


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back for a request: the output ids, or the error that ended it."""

    rid: str
    output_ids: tuple[int, ...]
    error: str = ""


def drive(
    engine: Driven, workload: Workload, *, stream: bool = False, on_done: OnDone | None = None
) -> dict[str, Answer]:
    """Run the workload to its end; the answers by rid. Blocks; not to be called from the engine's loop.

    Every answer is greedy, of exactly the length asked for, and has a seed of its own (for devices that draw).

    Args:
        stream: read each answer token by token, as a streaming client would; else once, whole.
        on_done: called after each answer, in the engine's thread.

    Raises:
        BadRequest: the workload does not fit the model's context. Nothing was sent.
    """
    info = engine.pipeline.scheduler_info
    if workload.longest > info.context_len:
        raise BadRequest(
            f"the longest request needs {workload.longest} tokens; the context of {info.model} has {info.context_len}"
        )
    sender = _Sender(engine, workload, stream, on_done or (lambda: None), info.vocab_size)
    return engine.pipeline.loop.call(sender.run())


class _Sender:
    def __init__(
        self, engine: Driven, workload: Workload, stream: bool, on_done: OnDone, vocab_size: int
    ) -> None:
        self._engine, self._workload = engine, workload
        self._stream, self._on_done = stream, on_done
        self._vocab = vocab_size
        self._answers: dict[str, Answer] = {}
        self._followed = {each.after for each in workload.requests}
        # Made before the clock starts: drawing ids must not delay an arrival.
        self._prompts = {
            each.rid: workload.ids_of(each, vocab_size) for each in workload.requests if not each.after
        }

    async def run(self) -> dict[str, Answer]:
        loop = asyncio.get_running_loop()
        gate = asyncio.Semaphore(self._workload.concurrency) if self._workload.concurrency else None
        start = loop.time()
        tasks: dict[str, asyncio.Task[None]] = {}
        async with AsyncExitStack() as stack:
            stack.callback(_cancel, tasks)
            for request in self._workload.requests:
                tasks[request.rid] = asyncio.create_task(self._one(request, start, gate, tasks))
            await asyncio.gather(*tasks.values())
        return self._answers

    async def _one(
        self,
        request: Request,
        start: float,
        gate: asyncio.Semaphore | None,
        tasks: Mapping[str, asyncio.Task[None]],
    ) -> None:
        if request.after:
            await asyncio.wait([tasks[request.after]])
            await asyncio.sleep(request.at_s)
        else:
            await asyncio.sleep(max(0.0, start + request.at_s - asyncio.get_running_loop().time()))
        async with AsyncExitStack() as stack:
            if gate is not None:
                await stack.enter_async_context(gate)
            self._answers[request.rid] = await self._ask(request)
        self._on_done()

    async def _ask(self, request: Request) -> Answer:
        params = {
            "temperature": 0,
            "max_new_tokens": request.output_tokens,
            "ignore_eos": True,
            "sampling_seed": self._workload.seed,
        }
        try:
            prompt = self._prompt(request)
            output = await self._output(request.rid, prompt, params)
        except SgvizError as error:
            return Answer(request.rid, (), error.message)
        if request.rid in self._followed:
            self._prompts[request.rid] = prompt
        return Answer(request.rid, tuple(output["output_ids"]))

    async def _output(self, rid: str, prompt: list[int], params: dict[str, Any]) -> dict[str, Any]:
        if not self._stream:
            output: dict[str, Any] = await self._engine.async_generate(
                None, params, input_ids=prompt, rid=rid
            )
            return output
        async for part in self._engine.stream(None, params, input_ids=prompt, rid=rid):
            output = part
        return output

    def _prompt(self, request: Request) -> list[int]:
        if not request.after:
            return self._prompts[request.rid]
        before = self._answers[request.after]
        if before.error:
            raise SgvizError(f"the turn before it failed: {before.error}")
        history = [*self._prompts[request.after], *before.output_ids]
        return self._workload.ids_of(request, self._vocab, history)


def _cancel(tasks: Mapping[str, asyncio.Task[None]]) -> None:
    for task in tasks.values():
        task.cancel()
