"""run_virtual: a whole engine on a simulated device in virtual time, as fast as one thread can.

The real tokenizer manager, scheduler, cache and detokenizer run; only sockets, clocks and the device are others.
The scheduler's loop is advanced stop by stop. Before it takes in messages, the components beside it do all they
could have done by then; when it is idle, its clock jumps to the next message; waiting for a result moves it to
the end of the forward. A conservative simulation: nothing is ever taken back.
Mirrors nothing in SGLang. Imports: all engine rooms, recording (a bridge may).
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from sgviz.config import Settings
from sgviz.errors import ConfigError, SgvizError
from sgviz.recording import Recording
from sgviz.scheduler.policy import SchedulePolicy
from sgviz.virtual.actors import Output
from sgviz.virtual.arrival import AfterFinish, Arrival
from sgviz.virtual.host import Host, HostModel, MeasuredHost
from sgviz.virtual.stage import Stage
from sgviz.worker.sim.cost_model import CostModel
from sgviz.worker.sim.hardware import DEVICE_PREFIX

NS = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualRun:
    """What a virtual run gives.

    Attributes:
        recording: its events, in virtual time (`header.clock` is "virtual"); empty if events are off.
        outputs: the last answer of each request by rid. failures: requests that were refused before they ran.
        host: how the host's work was counted. device: which one was simulated.
        virtual_s: from the start to the last thing that happened. wall_s: how long this took here.
    """

    recording: Recording
    outputs: dict[str, Output]
    failures: dict[str, SgvizError]
    host: str
    device: str
    virtual_s: float
    wall_s: float

    def __repr__(self) -> str:
        return (
            f"<virtual run on {self.device} (simulated; host: {self.host}): {len(self.outputs)} answers, "
            f"{self.virtual_s:.1f} s in {self.wall_s:.1f} s>"
        )


def run_virtual(
    settings: Settings,
    arrivals: Iterable[Arrival],
    *,
    host: Literal["measured", "modelled"] | Host = "measured",
    policy: SchedulePolicy | None = None,
    cost: CostModel | None = None,
    after: AfterFinish | None = None,
) -> VirtualRun:
    """Run `arrivals` to their end.

    Args:
        settings: of the engine; the device must be a simulated one.
        host: "measured" (CPU time of the real code), "modelled" (constants), or one of them with own numbers.
        policy: an object that orders the queue. cost: another cost model than the settings'.
        after: asked at the end of each request for arrivals that follow from it (closed loops, turns).

    Raises:
        ConfigError: the device is not simulated, or a setting does not fit: there is one scheduler in virtual time.
    """
    if not settings.model.device.startswith(DEVICE_PREFIX):
        raise ConfigError(
            f"virtual time needs a simulated device, not {settings.model.device!r}; take one such as sim:h100-sxm",
            param="device",
        )
    _check_alone(settings)
    chosen = _host(host)

    def run() -> VirtualRun:
        started = time.perf_counter()
        with _no_gc():
            stage = Stage(settings, chosen, policy, cost, after)
            try:
                stage.add(arrivals)
                stage.run()
            finally:
                stage.close()
        return VirtualRun(
            recording=stage.recording(),
            outputs=stage.outputs,
            failures=stage.failures,
            host=chosen.label,
            device=settings.model.device,
            virtual_s=stage.elapsed_ns / NS,
            wall_s=time.perf_counter() - started,
        )

    return _outside_of_a_loop(run)


def _check_alone(settings: Settings) -> None:
    size, mode = settings.parallel.dp_size, settings.disaggregation.disaggregation_mode
    if size > 1:
        raise ConfigError(
            f"virtual time has one scheduler, and dp_size is {size}; several run on the wall clock",
            param="dp_size",
        )
    if mode != "null":
        raise ConfigError(
            f"virtual time has one scheduler that does both, and disaggregation_mode is {mode}; the two sides run on "
            "the wall clock",
            param="disaggregation_mode",
        )


def _host(host: str | Host) -> Host:
    if isinstance(host, MeasuredHost | HostModel):
        return host
    if host == "measured":
        return MeasuredHost()
    if host == "modelled":
        return HostModel()
    raise ConfigError(
        f"host {host!r} is not allowed; give 'measured', 'modelled', a MeasuredHost or a HostModel"
    )


def _outside_of_a_loop(run: Callable[[], VirtualRun]) -> VirtualRun:
    """Call it here, or in a thread of its own where an asyncio loop is running (a notebook)."""
    if not _in_a_loop():
        return run()
    outcome: list[VirtualRun | BaseException] = []

    def guarded() -> None:
        try:
            outcome.append(run())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=guarded, name="sgviz-virtual")
    thread.start()
    thread.join()
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


def _in_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


@contextmanager
def _no_gc() -> Iterator[None]:
    """Millions of events are kept and none is garbage; the collector's walks would be counted as host work."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
