"""One call of `generate_request`, from its prompts to its outputs: alone, as a batch, or fanned out (n > 1).

Mirrors SGLang's `_handle_batch_request`. All prompts are checked before the first is sent. With n > 1 each
prompt runs once with no new tokens, which fills the prefix cache, and then n copies of it are sent. What is refused
before anything was sent is told by `request.refused`, one a prompt.
Imports: messages, events, and the parts of this folder it ties together.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

import msgspec

from sgviz.errors import ClientDisconnected, NeverFits, SgvizError
from sgviz.events.clock import Clock
from sgviz.events.schema import Reason, RequestRefused, RequestTokenized
from sgviz.events.tracer import Tracer
from sgviz.messages import (
    GenerateReqInput,
    SamplingParams,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
)
from sgviz.messages.generate import new_rid, prompt_rids
from sgviz.tokenizer_manager.bootstrap import apart
from sgviz.tokenizer_manager.flow import Flow
from sgviz.tokenizer_manager.meta import Output, OutputBuilder
from sgviz.tokenizer_manager.state import ReqState
from sgviz.tokenizer_manager.table import Family, RequestTable
from sgviz.tokenizer_manager.tokenize import Preparer
from sgviz.tokenizer_manager.wait import Waiter


class RequestRun:
    """The states of one request and the order in which they come to life. `close` must follow `launch`."""

    def __init__(
        self,
        obj: GenerateReqInput,
        waiter: Waiter,
        *,
        table: RequestTable,
        flow: Flow,
        preparer: Preparer,
        builder: OutputBuilder,
        trace: Tracer,
        clock: Clock,
    ) -> None:
        self._obj = obj
        self._waiter = waiter
        self._table = table
        self._flow = flow
        self._preparer = preparer
        self._builder = builder
        self._trace = trace
        self._clock = clock
        self._families: list[Family] = []
        self._states: list[ReqState] = []
        self._answers: list[ReqState] = []
        self._counted: dict[str, int] = {}  # prompt tokens by rid, also of those that are refused for them

    async def launch(self) -> None:
        """Check, tokenize and send everything (with n > 1 the warm-up is awaited in between).

        Raises:
            BadRequest: what is asked for cannot be done; nothing was sent.
        """
        prompts = self._preparer.split(self._obj)
        outer = [] if self._obj.is_single else self._open(self._obj.rid)
        n = _params(prompts[0]).n
        if n > 1 and prompts[0].bootstrap_room is not None:
            families = [family for prompt in prompts for family in [outer + self._open(prompt.rid)] * n]
            await self._launch_each(apart(prompts, n), families, lone=False)
        elif n > 1:
            await self._launch_copies(prompts, outer)
        else:
            await self._launch_each(prompts, [outer] * len(prompts), lone=self._obj.is_single)

    def outputs(self) -> AsyncGenerator[Output | list[Output], None]:
        """Streaming: what arrives next, cumulative. Otherwise one dict, or one list of them in order."""
        return self._stream() if self._obj.stream else self._at_the_end()

    def leave(self, error: BaseException) -> None:
        """Nobody will read the rest, because of `error`: end what is still live."""
        reason, why = Reason.NEVER_FITS if isinstance(error, NeverFits) else None, _why(error)
        if isinstance(error, Exception) and not isinstance(error, ClientDisconnected):
            self._note_refused(
                error.status if isinstance(error, SgvizError) else SgvizError.status, why, reason
            )
        self._table.leave(self._states, why, reason)

    def _note_refused(self, status: int, why: str, reason: Reason | None) -> None:
        """Every request of the call is refused, unless something was sent already."""
        if not self._trace.on or any(state.dispatched for state in self._states):
            return
        obj = self._obj
        ended = {state.rid for state in self._states if state.finished}  # membership only
        named = [] if obj.rid is None else prompt_rids(obj.rid, None if obj.is_single else len(obj.prompts))
        for rid in dict.fromkeys((*[state.rid for state in self._states], *named)):
            if rid in ended:
                continue  # its end has been told
            body = RequestRefused(
                rid=rid, where="tokenizer", status=status, why=why, reason=reason, prompt_tokens=self._counted.get(rid)
            )  # fmt: skip
            self._trace.emit(body)

    def close(self) -> None:
        """Give the names free under which the request could be aborted; it is not under way any more."""
        self._flow.leave(self._waiter)
        for family in self._families:
            self._table.close_family(family)

    async def _launch_each(
        self, prompts: list[GenerateReqInput], families: list[list[Family]], *, lone: bool
    ) -> None:
        self._answers = [
            self._register(prompt, families[i], None if lone else i) for i, prompt in enumerate(prompts)
        ]
        await self._enter(self._answers)
        if all(state.finished for state in self._answers):
            return  # while they waited
        tokenized = [await self._tokenize(state, state.obj) for state in self._answers]
        for state, message in zip(self._answers, tokenized):
            if message is not None:
                self._table.dispatch(state, message)

    async def _launch_copies(self, prompts: list[GenerateReqInput], outer: list[Family]) -> None:
        n = _params(prompts[0]).n
        families = [outer + self._open(prompt.rid) for prompt in prompts]
        warm_ups = [self._register(_warm_up(p), family) for p, family in zip(prompts, families)]
        await self._enter(warm_ups)
        tokenized = [await self._tokenize(state, prompt) for state, prompt in zip(warm_ups, prompts)]
        for state, message in zip(warm_ups, tokenized):
            if message is not None:
                self._table.dispatch(state, _for_state(message, state, with_input=True))
        await self._until_finished(warm_ups)
        copies = [
            self._register(_copy(prompt, sample), families[i], i * n + sample)
            for i, prompt in enumerate(prompts)
            for sample in range(n)
        ]
        self._answers = copies
        for at, state in enumerate(copies):
            self._send_copy(state, tokenized[at // n], warm_ups[at // n])

    async def _enter(self, first: Sequence[ReqState]) -> None:
        """Wait until requests may go on, or the `first` states have all ended meanwhile."""

        def given_up() -> bool:
            return all(state.finished for state in first)

        def ended() -> bool:
            return bool(self._answers) and all(state.finished for state in self._answers)

        await self._flow.enter(self._waiter, given_up, ended)

    def _send_copy(
        self, state: ReqState, message: TokenizedGenerateReqInput | None, warm_up: ReqState
    ) -> None:
        if state.finished:
            return
        reason = warm_up.finish_reason
        if reason is not None and (reason.type == "abort" or message is None):
            state.prompt_tokens = warm_up.prompt_tokens
            self._table.finish(state, reason)
            state.wake()
            return
        assert message is not None, "only what ended before it was sent has none"
        state.cached_before = warm_up.cached_tokens
        state.logprobs.share_input(warm_up.logprobs)
        state.stats.tokenize_start = warm_up.stats.tokenize_start
        state.stats.tokenize_finish = warm_up.stats.tokenize_finish
        self._note_tokenized(state, message)
        self._table.dispatch(state, _for_state(message, state, with_input=False))

    def _open(self, name: str | list[str] | None) -> list[Family]:
        """The family of that name; none for a list of names or no name."""
        if not isinstance(name, str):
            return []
        family = self._table.open_family(name)
        self._families.append(family)
        return [family]

    def _register(
        self, obj: GenerateReqInput, families: Sequence[Family], index: int | None = None
    ) -> ReqState:
        state = self._table.register(obj, self._waiter.event, families, index)
        self._states.append(state)
        return state

    async def _tokenize(self, state: ReqState, prompt: GenerateReqInput) -> TokenizedGenerateReqInput | None:
        """The message to send; None if the request has ended before it could be: of that nothing more is told."""

        def counted(tokens: int) -> None:
            state.prompt_tokens = tokens
            self._counted.update({rid: tokens for rid in (state.rid, prompt.rid) if isinstance(rid, str)})

        if state.finished:
            return None
        state.stats.tokenize_start = self._clock.now()
        message = await self._preparer.tokenize(prompt, state.stats, counted)
        state.stats.tokenize_finish = self._clock.now()
        if state.finish_reason is not None:
            return None  # while a long text was tokenized
        self._note_tokenized(state, message)
        return message

    def _note_tokenized(self, state: ReqState, message: TokenizedGenerateReqInput) -> None:
        state.prompt_tokens = len(message.input_ids)
        if self._trace.on:
            embedding = isinstance(message, TokenizedEmbeddingReqInput)
            self._trace.emit(
                RequestTokenized(rid=state.rid, prompt_tokens=state.prompt_tokens, embedding=embedding)
            )

    async def _until_finished(self, states: Sequence[ReqState]) -> None:
        while not all(state.finished for state in states):
            await self._waiter.wait()

    async def _at_the_end(self) -> AsyncGenerator[Output | list[Output], None]:
        await self._until_finished(self._answers)
        self.close()
        outs = [self._builder.output(state) for state in self._answers]
        yield outs[0] if self._answers[0].index is None else outs

    async def _stream(self) -> AsyncGenerator[Output | list[Output], None]:
        live = list(self._answers)
        while live:
            await self._waiter.poll()
            ready = [state for state in live if state.unread]
            if not ready:
                await self._waiter.wait()
            for state in ready:
                state.unread = False
                output = self._builder.output(state)
                if state.finished:
                    live.remove(state)
                if not live:
                    self.close()
                yield output


def _why(error: BaseException) -> str:
    if isinstance(error, SgvizError):
        return error.message
    if isinstance(error, GeneratorExit | asyncio.CancelledError):
        return "the caller stopped reading the answer"
    return f"{type(error).__name__}: {error}"


def _params(one: GenerateReqInput) -> SamplingParams:
    assert isinstance(one.sampling_params, SamplingParams)
    return one.sampling_params


def _warm_up(prompt: GenerateReqInput) -> GenerateReqInput:
    """The prompt alone, under a fresh rid: computed, cached, nothing generated.

    Its log-probabilities, if they are wanted, are computed here for all copies.
    """
    params = msgspec.structs.replace(_params(prompt), n=1, max_new_tokens=0, min_new_tokens=0)
    return msgspec.structs.replace(
        prompt,
        rid=new_rid(f"{prompt.rid}_warm_"),
        sampling_params=params,
        stream=False,
        return_logprob=bool(prompt.return_logprob) and prompt.logprob_start_len != -1,
    )


def _copy(prompt: GenerateReqInput, sample: int) -> GenerateReqInput:
    """Sample number `sample` of a prompt, under a fresh rid and with a seed of its own."""
    params = _params(prompt)
    seed = None if params.sampling_seed is None else params.sampling_seed + sample
    params = msgspec.structs.replace(params, n=1, sampling_seed=seed)
    return msgspec.structs.replace(prompt, rid=new_rid(f"{prompt.rid}_{sample}_"), sampling_params=params)


def _for_state(
    message: TokenizedGenerateReqInput, state: ReqState, *, with_input: bool
) -> TokenizedGenerateReqInput:
    """The tokenized prompt under another rid and its settings.

    Args:
        with_input: log-probabilities of the prompt are computed for this one.
    """
    params = _params(state.obj)
    if params.max_new_tokens is None:
        params = msgspec.structs.replace(params, max_new_tokens=message.sampling_params.max_new_tokens)
    return msgspec.structs.replace(
        message,
        rid=state.rid,
        sampling_params=params,
        stream=state.obj.stream,
        time_stats=state.stats,
        return_logprob=bool(state.obj.return_logprob),
        logprob_start_len=message.logprob_start_len if with_input else -1,
    )
