"""compare: several settings, one workload, the same arrivals, in turns, each from a fresh engine.

Runs go A B A B, so that a machine that slows down or warms up does it to all; tables give medians and say how
far the repeats lie apart. SGLang has nothing of the kind: one starts bench_serving twice. Imports: engine,
workload, recording.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

from sgviz.engine import Engine, Mode, settings_of
from sgviz.errors import BadRequest, ConfigError, SgvizError, suggest
from sgviz.events.schema import BatchProcessed, Event, RequestFinished
from sgviz.experiment.comparison import Comparison, Run
from sgviz.experiment.load_generator import Answer, drive
from sgviz.experiment.measures import measure
from sgviz.experiment.progress import shown
from sgviz.experiment.virtual_clients import Host, run_in_virtual_time
from sgviz.recording import Recording
from sgviz.recording.overlap_account import OverlapAccount, Until, overlap_account
from sgviz.workload import Workload

Clock = Literal["wall", "virtual"]
MODES: tuple[Mode, ...] = ("processes", "threads")
CLOCKS = ("wall", "virtual")
SETTLE_S = 5.0  # the last events of other processes are at most this far behind the answers
POLL_S = 0.02
PIECE = 8192  # events taken at once


def compare(
    runs: Mapping[str, Mapping[str, object]],
    workload: Workload,
    *,
    repeats: int = 3,
    mode: Mode = "processes",
    clock: Clock = "wall",
    stream: bool = False,
    until: Until = "auto",
    host: Host = "measured",
    progress: bool | None = None,
    **shared: object,
) -> Comparison:
    """Run `workload` under each of `runs` and lay the results side by side.

    Args:
        runs: name -> settings as for `Engine` (`model`, `event_loop`, any setting; `mode` for this run alone).
        repeats: how often each is run; every run has a fresh engine, so nothing is cached from before.
        mode: components as processes (they do not disturb each other) or as threads.
        clock: wall, or virtual (simulated devices only: as fast as this machine can, in the device's time).
        stream: read the answers token by token; False reads each whole, which costs the host less.
        until: where the overlap account ends, see `overlap_account`.
        host: virtual clock only: the host's work as it was measured, or modelled by constants.
        progress: show it; None: where somebody can see it.
        shared: settings of all runs; those of a run go before.

    Raises:
        BadRequest, ConfigError: nothing was run. SgvizError: a request of the named run failed, or its end is unknown.
    """
    if not runs or repeats < 1:
        raise BadRequest(f"compare needs at least one run and one repeat, got {len(runs)} and {repeats}")
    if clock not in CLOCKS:
        raise ConfigError(f"clock {clock!r} is not one of {', '.join(CLOCKS)}{suggest(clock, CLOCKS)}")
    plans = {name: _plan(name, {**shared, **own}, mode) for name, own in runs.items()}
    done: list[Run] = []
    with shown(progress) as start:
        for repeat in range(repeats):
            for name, (settings, own_mode) in plans.items():
                step = start(f"{name} {repeat + 1}/{repeats}", len(workload.requests))
                if clock == "virtual":
                    recording, label = _virtual(name, settings, host, workload, stream, step)
                else:
                    recording, label = _wall(name, settings, own_mode, workload, stream, step), ""
                account = _account(recording, until)
                done.append(Run(name, repeat, recording, measure(recording), account, label))
    return Comparison(workload, done)


def _account(recording: Recording, until: Until) -> OverlapAccount:
    """Of several ranks the account of the one whose device was busiest: an account is of one loop and one device."""
    ranks = recording.ranks
    if len(ranks) == 1:
        return overlap_account(recording.stamped(), until)
    each = [overlap_account(recording.rank(rank).stamped(), until) for rank in ranks]
    return max(each, key=lambda account: account.device_busy_s)


def _plan(name: str, given: Mapping[str, object], mode: Mode) -> tuple[dict[str, Any], Mode]:
    """The settings of a run, checked, and its mode."""
    settings: dict[str, Any] = dict(given)
    own_mode = settings.pop("mode", mode)
    if own_mode not in MODES:
        raise ConfigError(f"run {name!r}: mode {own_mode!r} is not one of {', '.join(MODES)}")
    try:
        settings_of(settings)
    except ConfigError as error:
        raise ConfigError(f"run {name!r}: {error.message}", param=error.param) from None
    return settings, own_mode


def _wall(
    name: str,
    settings: dict[str, Any],
    mode: Mode,
    workload: Workload,
    stream: bool,
    step: Callable[[], None],
) -> Recording:
    with Engine(mode=mode, **{"log_level": "warning", **settings}) as engine:
        answers = drive(engine, workload, stream=stream, on_done=step)
        _refuse_failures(name, answers)
        return _settled(engine.recording(), len(workload.requests), name)


def _refuse_failures(name: str, answers: Mapping[str, Answer]) -> None:
    failed = [answer for answer in answers.values() if answer.error]
    if failed:
        raise SgvizError(f"run {name!r}: {len(failed)} requests failed; {failed[0].rid}: {failed[0].error}")


def _settled(live: Recording, requests: int, name: str) -> Recording:
    """The recording once scheduler and tokenizer manager have both told of every request's end.

    Raises:
        SgvizError: they have not in time, and not because events were dropped, which the tables show.
    """
    ends, seen, lost = _Ends(), 0, 0
    deadline = time.monotonic() + SETTLE_S
    while ends.count < requests:
        first, events = live.since(seen, PIECE)
        lost, seen = lost + first - seen, first + len(events)
        for event in events:
            ends.take(event)
        if not events and time.monotonic() > deadline:
            if lost:
                break
            raise SgvizError(
                f"run {name!r}: {SETTLE_S:g} s after the last answer the events tell of the end of only "
                f"{ends.count} of {requests} requests"
            )
        if not events:
            time.sleep(POLL_S)
    frozen = live.freeze()
    frozen.source = name
    return frozen


class _Ends:
    """Requests whose end scheduler and tokenizer manager have told."""

    def __init__(self) -> None:
        self._by_scheduler: set[str] = set()
        self._by_manager: set[str] = set()

    def take(self, event: Event) -> None:
        if isinstance(event.body, BatchProcessed):
            self._by_scheduler.update(event.body.finished)
        elif isinstance(event.body, RequestFinished):
            self._by_manager.add(event.body.rid)

    @property
    def count(self) -> int:
        return len(self._by_scheduler & self._by_manager)


def _virtual(
    name: str,
    settings: dict[str, Any],
    host: Host,
    workload: Workload,
    stream: bool,
    step: Callable[[], None],
) -> tuple[Recording, str]:
    policy = settings.get("schedule_policy")
    try:
        run = run_in_virtual_time(
            settings_of(settings),
            workload,
            host=host,
            policy=None if isinstance(policy, str) else policy,
            stream=stream,
            on_done=step,
        )
    except SgvizError as error:
        error.args = (f"run {name!r}: {error.message}",)
        raise
    run.recording.source = name
    return run.recording, run.host
