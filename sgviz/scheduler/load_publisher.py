"""LoadPublisher: tells whoever spreads requests how busy this scheduler is, from time to time and unasked.

Mirrors how SGLang's scheduler publishes its LoadSnapshot: after every so many results, after a prefill always, and
when idle. Imports: messages, scheduler.
"""

from __future__ import annotations

from collections.abc import Callable

from sgviz.messages.parallel import LoadSnapshot
from sgviz.scheduler.load import LoadMeter
from sgviz.scheduler.state import SchedulerState

Put = Callable[[LoadSnapshot], None]


class LoadPublisher:
    """Gives snapshots of data parallel rank `rank` to `put`, which must not block.

    Args:
        meter: its own, as each remembers when it was asked. interval: results between two snapshots.
    """

    def __init__(self, state: SchedulerState, meter: LoadMeter, put: Put, rank: int, interval: int) -> None:
        self._state = state
        self._meter = meter
        self._put = put
        self._rank = rank
        self._interval = interval
        self._results = 0

    def after_result(self, *, is_extend: bool) -> None:
        """A result was processed, of a prefill or of another forward."""
        self._results += 1
        if is_extend or self._results >= self._interval:
            self.publish()

    def publish(self) -> None:
        self._results = 0
        state, load = self._state, self._meter.load()
        chunked = state.chunked_req
        rest = 0 if chunked is None else chunked.seqlen - chunked.extend_end
        self._put(
            LoadSnapshot(
                timestamp=state.clock.now(),
                dp_rank=self._rank,
                num_running_reqs=load.num_running_reqs,
                num_waiting_reqs=load.num_waiting_reqs,
                num_waiting_uncached_tokens=sum(req.seqlen for req in state.holding_nothing()) + rest,
                num_used_tokens=load.num_used_tokens,
                num_total_tokens=load.num_total_tokens,
                max_total_num_tokens=load.max_total_num_tokens,
                max_running_requests=load.max_running_requests,
                token_usage=load.token_usage,
                gen_throughput=load.gen_throughput,
                cache_hit_rate=load.cache_hit_rate,
                num_taken_reqs=state.taken_ct,
            )
        )
