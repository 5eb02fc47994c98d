"""The modelled costs of the scheduler's stages, charged where the stages happen. Imports: worker protocol, virtual."""

from __future__ import annotations

from sgviz.batch.schedule_batch import ScheduleBatch
from sgviz.scheduler.scheduler import Scheduler
from sgviz.scheduler.stops import Stop
from sgviz.virtual.host import ActorClock, HostModel
from sgviz.worker.protocol import BatchResult, Launch, Worker
from sgviz.worker.steps import AroundWorker


class ChargingWorker(AroundWorker):
    """A worker whose results cost their processing once they are there."""

    def __init__(self, worker: Worker, clock: ActorClock, model: HostModel) -> None:
        super().__init__(worker)
        self._clock = clock
        self._model = model

    def launch(self, batch: ScheduleBatch, *, delay_sample: bool = False) -> Launch:
        cost = self._model.process_ns(len(batch.reqs))
        return _ChargingLaunch(super().launch(batch, delay_sample=delay_sample), self._clock, cost)


class _ChargingLaunch:
    def __init__(self, launch: Launch, clock: ActorClock, cost_ns: int) -> None:
        self.bid, self.forward_pass_id = launch.bid, launch.forward_pass_id
        self._launch, self._clock, self._cost_ns = launch, clock, cost_ns

    def sample(self) -> None:
        self._launch.sample()

    def done(self) -> bool:
        return self._launch.done()

    def result(self) -> BatchResult:
        """The first event after it says when the waiting ended; the work comes behind that."""
        result = self._launch.result()
        self._clock.charge_after_next_stamp(self._cost_ns)
        return result


def charge_next(model: HostModel, clock: ActorClock, scheduler: Scheduler, stop: Stop) -> None:
    """After a stop: what the stage up to the next one costs (waiting and processing are the launch's)."""
    state = scheduler.state
    if stop is Stop.RECEIVED:
        clock.charge(model.turn_ns(len(state.running_batch)))
    elif stop is Stop.PLANNED and state.last_batch is not None:
        clock.charge(model.launch_ns(len(state.last_batch)))
