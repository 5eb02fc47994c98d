"""What a scheduler's mode puts together: which loop, and which side of a pair.

Mirrors SGLang's `dispatch_event_loop`. There every mode has loops of its own; here the sides work inside the verbs
(`begin_turn`, `plan`, `launch`, `process`), so that each mode runs the same two loops.
Imports: config, disaggregation (protocol), worker protocol, scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from sgviz.batch.req import Req
from sgviz.config import DisaggregationConfig
from sgviz.disaggregation.protocol import DecodeKVManager, KVManager, PrefillKVManager
from sgviz.errors import ConfigError
from sgviz.scheduler.announce import Announcer
from sgviz.scheduler.disagg.decode import DecodeSide
from sgviz.scheduler.disagg.kept import Keeper
from sgviz.scheduler.disagg.prebuilt import DecodeDevice, Prebuilt
from sgviz.scheduler.disagg.prefill import PrefillSide
from sgviz.scheduler.disagg.side import Hall, HandOver, Side
from sgviz.scheduler.loops import event_loop_normal, event_loop_overlap
from sgviz.scheduler.output_streamer import OutputStreamer
from sgviz.scheduler.planner import Planner
from sgviz.scheduler.requests import RequestEnder
from sgviz.scheduler.results import ResultProcessor
from sgviz.scheduler.state import SchedulerState
from sgviz.scheduler.stops import Stop
from sgviz.worker.protocol import Worker

if TYPE_CHECKING:
    from sgviz.scheduler.scheduler import Scheduler

Loop = Callable[["Scheduler"], Iterator[Stop]]


def dispatch_event_loop(mode: str, *, overlap: bool) -> Loop:
    """The loop of a mode: `null`, `prefill` or `decode`."""
    loops: dict[tuple[str, bool], Loop] = {
        ("null", False): event_loop_normal,
        ("null", True): event_loop_overlap,
        ("prefill", False): event_loop_normal,
        ("prefill", True): event_loop_overlap,
        ("decode", False): event_loop_normal,
        ("decode", True): event_loop_overlap,
    }
    return loops[mode, overlap]


@dataclass(frozen=True, slots=True)
class Sided:
    """What a mode adds to a scheduler; nothing on a server that does both.

    Attributes:
        hand_over: told of prompts that are computed for another server. keep: saves KV before a retraction.
    """

    side: Side | None = None
    hand_over: HandOver | None = None
    keep: Callable[[Req], None] | None = None


def make_side(
    config: DisaggregationConfig,
    manager: KVManager | None,
    state: SchedulerState,
    worker: Worker,
    ender: RequestEnder,
    streamer: OutputStreamer,
) -> Sided:
    """The side that the settings choose; `manager` is of that side.

    Raises:
        ConfigError: the mode needs a manager and there is none, or the reverse; the worker's KV cannot travel.
    """
    mode = config.disaggregation_mode
    if (mode == "null") is not (manager is None):
        raise ConfigError(
            f"disaggregation_mode {mode} and {'no ' if manager is None else 'a '}manager of KV transfers do not go "
            "together: prefill and decode need one, null has none",
            param="disaggregation_mode",
        )
    if manager is None:
        return Sided()
    if not hasattr(worker, "prime"):
        raise ConfigError(
            f"disaggregation_mode {mode}: the KV of a {type(worker).__name__} cannot travel",
            param="disaggregation_mode",
        )
    port = config.disaggregation_bootstrap_port
    hall = Hall(mode, port, state, ender, Announcer(state.trace).entered)
    if mode == "prefill":
        prefill = PrefillSide(hall, cast(PrefillKVManager, manager), streamer)
        return Sided(prefill, hand_over=prefill)
    most = config.disaggregation_decode_kept_tokens
    keeper = Keeper(state, cast(DecodeDevice, worker), state.cache.total if most is None else most)
    decode = DecodeSide(hall, cast(DecodeKVManager, manager), keeper, config)
    keeps = config.disaggregation_decode_retraction == "keep"
    return Sided(decode, keep=keeper.keep if keeps else None)


def connect(sided: Sided, planner: Planner, results: ResultProcessor, worker: Worker) -> None:
    """Let the planner of a decode server take in what has come."""
    if isinstance(sided.side, DecodeSide):
        prebuilt = Prebuilt(sided.side.state, cast(DecodeDevice, worker), results, planner.tell_planned)
        planner.take_ready = prebuilt.take_ready


def keeps_prefixes(config: DisaggregationConfig) -> bool:
    """Whether the mode lets the prefix cache be used."""
    return config.disaggregation_mode != "decode" or config.disaggregation_decode_enable_radix_cache
