"""LoadMeter: how busy the scheduler is, when somebody asks. Mirrors SGLang's `get_loads`.

Imports: messages, scheduler, worker.protocol.
"""

from __future__ import annotations

from sgviz.messages.flow import Load
from sgviz.scheduler.state import SchedulerState
from sgviz.worker.protocol import WorkerInfo

WINDOW_NS = 10_000_000_000  # throughput is measured over this time, if somebody asked within it
NS = 1e9


class LoadMeter:
    """Remembers what it found when it was asked before, for the throughput."""

    def __init__(self, state: SchedulerState, info: WorkerInfo) -> None:
        self._state = state
        self._info = info
        self._samples: list[tuple[int, int]] = [(state.clock.now(), 0)]

    def load(self) -> Load:
        state = self._state
        ledger = state.cache.ledger()
        used = ledger.protected + ledger.private
        waiting = state.num_queued + state.disagg.num_arriving
        return Load(
            num_running_reqs=len(state.live) - waiting,
            num_waiting_reqs=waiting,
            num_used_tokens=used,
            num_total_tokens=used + sum(req.seqlen for req in state.holding_nothing()),
            max_total_num_tokens=ledger.total,
            gen_throughput=self._throughput(),
            cache_hit_rate=state.cached_ct / state.prompt_ct if state.prompt_ct else 0.0,
            max_running_requests=state.limits.max_running_requests,
            grammar=len(state.grammar_queue),
            paused=len(state.live) if state.pause is not None else 0,
            retracted=sum(req.is_retracted for req in state.waiting_queue) + len(state.disagg.retracted),
            weight_bytes=self._info.weight_bytes,
            kv_bytes=self._info.bytes_per_token * ledger.total,
        )

    def _throughput(self) -> float:
        """Tokens a second since the oldest question within the window, else since the newest one before."""
        now, made = self._state.clock.now(), self._state.generated_ct
        samples = self._samples
        while len(samples) > 1 and samples[1][0] < now - WINDOW_NS:
            samples.pop(0)
        if len(samples) > 1 and samples[0][0] < now - WINDOW_NS:
            samples.pop(0)
        since, before = samples[0]
        if now > samples[-1][0]:
            samples.append((now, made))
        return (made - before) / (now - since) * NS if now > since else 0.0
