"""Pair: a prefill and a decode engine of this machine, asked as one; each request goes to both, with a room of its own.

What `sgviz router` does between servers, without HTTP: both sides, their schedulers, the bootstrap server and the KV
between them are the real ones. SGLang has nothing of the kind in Python. Imports: engine, launch, recording, workload.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import ExitStack, aclosing
from types import TracebackType
from typing import Any, cast

from sgviz.engine import Engine, Mode
from sgviz.errors import BadRequest, ConfigError, SgvizError
from sgviz.events.schema import BatchProcessed, DisaggTransferred, Event, RequestFinished
from sgviz.experiment.load_generator import Answer, OnDone, drive
from sgviz.launch.kv_parts import bootstrap_host
from sgviz.launch.pipeline import Pipeline
from sgviz.messages.generate import new_rid
from sgviz.recording import PairedRecording, Recording
from sgviz.tokenizer_manager import Output
from sgviz.workload import Workload

OWN = ("disaggregation_mode", "disaggregation_bootstrap_host")
MEETING = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
LAST_ANSWER_S = 30.0  # for the prefill side to end after the decode side
TRUE_CAUSE_S = 0.5  # for the prefill side to say why the decode side failed
SETTLE_S, POLL_S, PIECE = 5.0, 0.02, 8192


class Pair:
    """Two running engines.

    Args:
        model: of both; as of `Engine`.
        mode: components of each as processes (they do not disturb each other) or as threads.
        prefill, decode: settings of that side alone. shared: settings of both.

    Attributes:
        prefill, decode: the engines. A request sent to one of them alone needs its meeting (see `Engine.generate`).

    Raises:
        ConfigError: a setting is unknown, not allowed, or the pair's own. StartupError: nothing was left behind.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        mode: Mode = "processes",
        prefill: Mapping[str, object] | None = None,
        decode: Mapping[str, object] | None = None,
        **shared: object,
    ) -> None:
        ours = {"disaggregation_bootstrap_port": 0, **shared, **(prefill or {})}
        theirs = {**shared, **(decode or {})}
        for given in (ours, theirs):
            for name in OWN:
                if name in given:
                    raise ConfigError(f"{name} is set by the pair itself; leave it out", param=name)
        with ExitStack() as stack:
            self.prefill = stack.enter_context(
                Engine(model, mode=mode, disaggregation_mode="prefill", **_settings(ours))
            )
            self.decode = Engine(model, mode=mode, disaggregation_mode="decode", **_settings(theirs))
            stack.pop_all()
        self._rooms = itertools.count(1)  # the bootstrap server is this pair's own, so nobody else takes them
        self._ended: dict[str, None] = {}  # rids that were answered

    @property
    def pipeline(self) -> Pipeline:
        """Where requests are answered: the decode side."""
        return self.decode.pipeline

    # ------------------------------------------------------------ requests

    def generate(
        self, prompt: str | None = None, sampling_params: dict[str, Any] | None = None, **options: Any
    ) -> Output:
        """The decode side's answer to one prompt. Options as of `Engine.generate`, but those of the meeting.

        Raises:
            BadRequest: several prompts or answers at once, or what the engines refuse. SgvizError: a side failed.
        """
        return self.pipeline.loop.call(self.async_generate(prompt, sampling_params, **options))

    async def async_generate(self, prompt: Any = None, sampling_params: Any = None, **options: Any) -> Output:
        """`generate` for a running loop (any loop)."""
        asked = self._asked(prompt, sampling_params, options)
        other = asyncio.ensure_future(self.prefill.async_generate(prompt, sampling_params, **asked))
        try:
            output: Output = await self.decode.async_generate(prompt, sampling_params, **asked)
        except SgvizError as error:
            raise await _true_cause(other, error) from None
        else:
            await self._done(asked["rid"], other)
            return output
        finally:
            other.cancel()

    async def stream(
        self, prompt: Any = None, sampling_params: Any = None, **options: Any
    ) -> AsyncIterator[Output]:
        """The decode side's outputs as they grow, in any running loop. Leaving early ends both sides."""
        asked = self._asked(prompt, sampling_params, options)
        other = asyncio.ensure_future(self.prefill.async_generate(prompt, sampling_params, **asked))
        try:
            made = self.decode.stream(prompt, sampling_params, **asked)
            async with aclosing(cast("AsyncGenerator[Output, None]", made)) as parts:
                async for part in parts:
                    yield part
        except SgvizError as error:
            raise await _true_cause(other, error) from None
        else:
            await self._done(asked["rid"], other)
        finally:
            other.cancel()

    def drive(
        self, workload: Workload, *, stream: bool = True, on_done: OnDone | None = None
    ) -> dict[str, Answer]:
        """Run a workload to its end, as `drive` does with an engine."""
        return drive(self, workload, stream=stream, on_done=on_done)

    def abort(self, rid: str) -> None:
        """End the request on both sides; unknown rids are ignored."""
        self.prefill.abort(rid)
        self.decode.abort(rid)

    def _asked(self, prompt: object, params: object, options: dict[str, Any]) -> dict[str, Any]:
        """The options for both sides: one name, one place to meet."""
        for name in MEETING:
            if name in options:
                raise BadRequest(f"{name} is given by the pair; leave it out", param=name)
        ids = options.get("input_ids")
        several = (
            isinstance(prompt, list) or isinstance(params, list) or bool(ids and isinstance(ids[0], list))
        )
        if several or (isinstance(params, dict) and params.get("n", 1) != 1):
            raise BadRequest("a pair gives one answer a call; call it once for each")
        settings = self.prefill.pipeline.settings
        return {
            **options,
            "rid": options.get("rid") or new_rid(""),
            "bootstrap_host": bootstrap_host(settings),
            "bootstrap_port": settings.disaggregation.disaggregation_bootstrap_port,
            "bootstrap_room": next(self._rooms),
        }

    async def _done(self, rid: str, other: asyncio.Future[Any]) -> None:
        """The decode side has said all; the prefill side may take a moment longer."""
        await asyncio.wait([other], timeout=LAST_ANSWER_S)
        self._ended[rid] = None

    # ------------------------------------------------------------ what happened

    def recording(self) -> PairedRecording:
        """Both sides' recordings up to now as one, once they tell of the end of every request answered here.

        Raises:
            BadRequest: no request came to both sides. SgvizError: the events tell too little, in 5 s.
        """
        sides = {"prefill": self.prefill, "decode": self.decode}
        live = {name: engine.recording() for name, engine in sides.items()}
        deadline, wanted = time.monotonic() + SETTLE_S, dict(self._ended)
        for name, rec in live.items():
            _settle(name, rec, wanted, deadline)
        frozen = [rec.freeze() for rec in live.values()]
        for name, rec in zip(live, frozen):
            rec.source = name
        return PairedRecording(*frozen)

    # ------------------------------------------------------------ life

    def close(self, grace: float | None = None) -> None:
        """Let running requests finish (at most `grace` seconds a side), then end both engines."""
        try:
            self.decode.close(grace)
        finally:
            self.prefill.close(grace)

    def __enter__(self) -> Pair:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(0.0 if kind is not None else None)

    def __repr__(self) -> str:
        return f"<sgviz.experiment.Pair prefill {self.prefill!r}, decode {self.decode!r}>"


def _settings(given: Mapping[str, object]) -> dict[str, Any]:
    return dict(given)


async def _true_cause(other: asyncio.Future[Any], error: SgvizError) -> SgvizError:
    """Of two failures that of the prefill side, of which the decode side only heard; not if it is the caller's."""
    if 400 <= error.status < 500:
        return error
    await asyncio.wait([other], timeout=TRUE_CAUSE_S)
    cause = other.exception() if other.done() and not other.cancelled() else None
    return cause if isinstance(cause, SgvizError) else error


class _Ends:
    """Rids of whose end a side's tokenizer manager and scheduler have told."""

    def __init__(self) -> None:
        self.by_manager: dict[str, None] = {}
        self.by_scheduler: dict[str, None] = {}

    def take(self, event: Event) -> None:
        body = event.body
        if isinstance(body, RequestFinished):
            self.by_manager[body.rid] = None
        elif isinstance(body, BatchProcessed):
            self.by_scheduler.update(dict.fromkeys(body.finished))
        elif isinstance(body, DisaggTransferred) and body.side == "prefill":
            self.by_scheduler[body.rid] = None


def _settle(name: str, live: Recording, wanted: Mapping[str, None], deadline: float) -> None:
    """Return when the events tell of the end of all that are wanted, or some were dropped."""
    ends, seen, lost = _Ends(), 0, 0
    while not (wanted.keys() <= ends.by_manager.keys() and wanted.keys() <= ends.by_scheduler.keys()):
        first, events = live.since(seen, PIECE)
        lost, seen = lost + first - seen, first + len(events)
        for event in events:
            ends.take(event)
        if not events and time.monotonic() > deadline:
            if lost:
                return
            missing = [rid for rid in wanted if rid not in ends.by_manager or rid not in ends.by_scheduler]
            raise SgvizError(
                f"the {name} side's events do not tell of the end of {len(missing)} requests: {missing[0]}"
            )
        if not events:
            time.sleep(POLL_S)
