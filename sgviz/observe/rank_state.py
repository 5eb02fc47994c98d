"""One scheduler as its gauges show it: its state after the newest event, and rates over the last seconds.

Mirrors SGLang's SchedulerStats, of which each data parallel rank has one. Imports: recording, observe.series.
"""

from __future__ import annotations

from collections import deque

from sgviz.observe.series import NONE, Labels
from sgviz.recording.engine_fold import EngineFold

RATE_WINDOW_NS = 10_000_000_000
QUIET_NS = 30_000_000_000
HIT_WINDOW_NS = 15_000_000_000


class RankState:
    """What one scheduler's events tell.

    Attributes:
        engine: queue, running, memory. retracted, compiling, streaming: rids that wait again, rids whose grammar
            compiles, sessions that are open. paused: requests under way as the present pause began.
        idle_since: stamp of the last event, if it was that nothing is to be done. graph: the newest batch came from a
            CUDA graph. decode_tokens: of the members of the newest decode batch.

    Args:
        label: what tells its series from those of other ranks; empty where it is the only one. side: prefill or
            decode, if it has one side only.
    """

    def __init__(self, label: Labels = NONE, side: str = "") -> None:
        self.label = label
        self.side = side
        self.engine = EngineFold()
        self.retracted: dict[str, None] = {}
        self.compiling: dict[str, None] = {}
        self.streaming: dict[str, None] = {}
        self.paused = 0
        self.idle_since = 0
        self.graph = False
        self.decode_tokens = 0
        self._decoded: deque[tuple[int, int]] = deque()
        self._hits: deque[tuple[int, int, int]] = deque()
        self._busy: deque[tuple[int, int]] = deque()

    def admitted(self, t: int, found: int, tokens: int) -> None:
        """A first admission: of `tokens` of its prompt so many were in the tree."""
        self._hits.append((t, found, tokens))

    def ran(self, t: int, spent_ns: int) -> None:
        """The device ran a batch."""
        self._busy.append((t, spent_ns))

    def sampled(self, t: int, tokens: int) -> None:
        self._decoded.append((t, tokens))

    def begin_anew(self) -> None:
        """The scheduler is gone, or another came in its place: nothing of what it did goes on."""
        for held in (self.retracted, self.compiling, self.streaming):
            held.clear()
        self.paused, self.idle_since = 0, 0

    def gauges(self, now: int) -> dict[str, float]:
        """By the names of `names.GAUGES`. `now`: stamp of the newest event of all."""
        engine, ledger = self.engine, self.engine.ledger
        used = ledger.protected + ledger.private_total
        share = used / ledger.total if ledger.total else 0.0
        return {
            "num_running_reqs": len(engine.running),
            "num_queue_reqs": len(engine.waiting),
            "num_grammar_queue_reqs": len(self.compiling),
            "num_paused_reqs": self.paused,
            "num_streaming_sessions": len(self.streaming),
            "num_retracted_reqs": len(self.retracted),
            "gen_throughput": self._throughput(now),
            "cache_hit_rate": self._hit_rate(now),
            "decode_sum_seq_lens": self.decode_tokens if engine.running else 0,
            "new_token_ratio": engine.ratio,
            "fwd_occupancy": self._occupancy(now),
            "is_cuda_graph": self.graph,
            "token_usage": share,
            "full_token_usage": share,
            "num_used_tokens": used,
            "kv_available_tokens": ledger.free,
            "kv_evictable_tokens": ledger.evictable,
            "kv_used_tokens": used,
            "max_total_num_tokens": ledger.total,
            "page_size": ledger.page_size,
            "num_pages": ledger.total // ledger.page_size,
            "context_len": engine.configured.context_len if engine.configured else 0,
        }

    def _throughput(self, now: int) -> float:
        while self._decoded and self._decoded[0][0] < now - RATE_WINDOW_NS:
            self._decoded.popleft()
        if not self._decoded or now - self._decoded[-1][0] > QUIET_NS:
            return 0.0
        span = max(now - self._decoded[0][0], 1)
        return sum(count for _, count in self._decoded) / (span / 1e9)

    def _occupancy(self, now: int) -> float:
        while self._busy and self._busy[0][0] < now - RATE_WINDOW_NS:
            self._busy.popleft()
        if not self._busy:
            return 0.0
        first_t, first_ns = self._busy[0]
        span = max(now - first_t + first_ns, 1)
        return min(100.0, 100 * sum(spent for _, spent in self._busy) / span)

    def _hit_rate(self, now: int) -> float:
        while self._hits and self._hits[0][0] < now - HIT_WINDOW_NS:
            self._hits.popleft()
        total = sum(tokens for *_, tokens in self._hits)
        return sum(cached for _, cached, _ in self._hits) / total if total else 0.0
