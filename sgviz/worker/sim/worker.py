"""SimWorker: satisfies the Worker protocol with a timer instead of a device.

A launch is put behind the ones before on the device's timeline: it starts when the device is free, and takes as
long as the cost model says. Waiting for its result is waiting for the timer: no thread, no stream. Tokens come
from a seeded rule. The cost is of the whole step, sampling and launches in it, so no part is told apart; the copy
of a few ids costs nothing. Mirrors TpModelWorker towards the scheduler; the KV memory exists as slot numbers only.
Imports: batch, worker, errors, numpy (no torch).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sgviz.batch.asked_positions import AskedPositions, asked_positions
from sgviz.batch.schedule_batch import ScheduleBatch
from sgviz.batch.vocab_mask import Constrained, constrained_members, fill_vocab_mask
from sgviz.cache.req_kv import Slots
from sgviz.errors import BadRequest, SgvizError, Unavailable
from sgviz.worker.protocol import (
    BatchResult,
    EmbeddingBatchResult,
    GenerationBatchResult,
    KVLayout,
    NewWeights,
    WorkerInfo,
)
from sgviz.worker.rule_vector import bits_of_ids, rule_vector
from sgviz.worker.sim.cost_model import CostModel
from sgviz.worker.sim.device_timer import DeviceTimer, WallTimer
from sgviz.worker.sim.sim_link import SimCopy, SimLink
from sgviz.worker.sim.step_work import StepWork
from sgviz.worker.sim.token_rule import TokenRule

Ints = npt.NDArray[np.int64]
Wish = tuple[int, tuple[int, ...]]
LINK_BANDWIDTH = 450e9  # bytes/s, of an H100


@dataclass(slots=True)
class _Forward:
    """What is needed of a batch once it was launched; `wishes`: alternatives and ids wanted, None: no logprobs.

    `asked`: prompt positions whose log-probabilities are wanted.
    `constrained`: the members under a grammar. `vectors`: what a batch for vectors gives.
    """

    bid: int
    number: int
    rows: Ints
    seq_lens: Ints
    wishes: list[Wish] | None
    asked: list[AskedPositions]
    start_ns: int
    end_ns: int
    constrained: Constrained
    vectors: list[bytes] | None = None
    forward_end_ns: int = 0  # where the sampling was delayed, and then it takes no time of its own


class SimWorker:
    """A device that takes its time and computes nothing.

    Args:
        info: what the scheduler is told (`factory.sim_info`).
        cost: how long a forward takes. tokens: what it samples.
        timer: the wall clock by default; virtual runs bring their own.
        link_bandwidth: bytes/s at which KV leaves and comes.
    """

    def __init__(
        self,
        info: WorkerInfo,
        cost: CostModel,
        tokens: TokenRule,
        timer: DeviceTimer | None = None,
        *,
        link_bandwidth: float = LINK_BANDWIDTH,
    ) -> None:
        self.info = info
        self._cost = cost
        self._tokens = tokens
        self._timer: DeviceTimer = timer or WallTimer()
        self._free_at = 0
        self._launched = 0
        self._closed = False
        self._primed: set[int] = set()  # rows whose requests are not known to the rule yet
        self._out, self._in = SimLink(link_bandwidth, self._timer), SimLink(link_bandwidth, self._timer)
        self.kv_layout = KVLayout(
            tag=f"sim:{info.model}:{info.dtype}", wire_bytes=0, nominal_bytes=info.bytes_per_token
        )

    def launch(self, batch: ScheduleBatch, *, delay_sample: bool = False) -> SimLaunch:
        """Put the forward on the timeline. Raises Unavailable after `close`."""
        if batch.is_embedding:
            return self.forward_batch_embedding(batch)
        return SimLaunch(self, self._take(batch), sampled=not delay_sample)

    def forward_batch_embedding(self, batch: ScheduleBatch) -> SimLaunch:
        """A vector a request, by `rule_vector` from its prompt; `b""` while that goes on."""
        forward = self._take(batch)
        forward.vectors = self._vectors(batch)
        return SimLaunch(self, forward, sampled=True)

    def _take(self, batch: ScheduleBatch) -> _Forward:
        """A place on the timeline, and what is needed of `batch` later."""
        if self._closed:
            raise Unavailable("the simulated device is closed: nothing can be launched any more")
        took = self._cost.step_ns(StepWork.of_batch(batch))
        # the device sets off here; what follows is its own work, done while it runs
        start = max(self._timer.now(), self._free_at)
        self._free_at = start + took
        self._launched += 1
        rows = np.array(batch.rows, dtype=np.int64)
        if batch.forward_mode.is_extend:
            self._tokens.enter(batch.reqs)
        if self._primed:
            self._enter_primed(batch)
        wishes = None
        if batch.return_logprob:
            wishes = [(req.top_logprobs_num, req.token_ids_logprob) for req in batch.reqs]
        return _Forward(
            batch.bid,
            self._launched,
            rows,
            np.array(batch.seq_lens, dtype=np.int64),
            wishes,
            asked_positions(batch) if batch.return_logprob else [],
            start,
            self._free_at,
            constrained_members(batch),
        )

    def _vectors(self, batch: ScheduleBatch) -> list[bytes]:
        spec = self.info.embedding
        assert spec is not None, "the TokenizerManager refuses such requests"
        return [
            b""
            if req is batch.chunked_req
            else rule_vector(bits_of_ids(req.origin_input_ids), spec.dim, req.dimensions)
            for req in batch.reqs
        ]

    def forget(self, rows: list[int]) -> None:
        """Nothing is kept beyond what the next request in a row overwrites."""

    def read_kv(self, slots: Slots, out: memoryview) -> SimCopy:
        """Nothing is copied; it takes the link's time. The forwards go on beside it."""
        return self._out.carry(len(slots) * self.kv_layout.nominal_bytes)

    def write_kv(self, slots: Slots, data: memoryview) -> SimCopy:
        return self._in.carry(len(slots) * self.kv_layout.nominal_bytes)

    def prime(self, rows: list[int], tokens: list[int]) -> None:
        """The rule knows a token by request and place, so only whose rows these are is to be learnt, at a launch."""
        self._primed.update(rows)

    def _enter_primed(self, batch: ScheduleBatch) -> None:
        new = [req for req in batch.reqs if req.kv.req_pool_idx in self._primed]
        if new:
            self._tokens.enter(new)
            self._primed.difference_update([req.kv.req_pool_idx for req in new])

    def load_weights(self, model_path: str) -> NewWeights:
        """Refused: there are none."""
        raise BadRequest("a simulated device has no weights that could be replaced", param="model_path")

    def close(self) -> None:
        self._closed = True

    # ------------------------------------------------------------ for SimLaunch

    def sample_late(self, forward: _Forward) -> None:
        """The sampling was waited with: the forward ends now, if its matrices are done."""
        forward.forward_end_ns = forward.end_ns
        forward.end_ns = max(forward.end_ns, self._timer.now())
        self._free_at = max(self._free_at, forward.end_ns)

    def is_done(self, forward: _Forward) -> bool:
        return self._timer.now() >= forward.end_ns

    def result(self, forward: _Forward) -> BatchResult:
        info = self.info
        if forward.vectors is not None:
            return EmbeddingBatchResult(
                bid=forward.bid,
                embeddings=forward.vectors,
                forward_pass_id=forward.number,
                start_ns=forward.start_ns,
                end_ns=forward.end_ns,
            )
        tokens = self._tokens.tokens(forward.rows, forward.seq_lens)
        if forward.constrained:
            mask = fill_vocab_mask(forward.constrained, info.vocab_size, info.eos_token_ids)
            tokens = mask.corrected(tokens, info.vocab_size) if mask is not None else tokens
        result = GenerationBatchResult(
            bid=forward.bid,
            next_token_ids=tokens,
            forward_pass_id=forward.number,
            start_ns=forward.start_ns,
            end_ns=forward.end_ns,
            forward_end_ns=forward.forward_end_ns,
            sample_start_ns=forward.end_ns if forward.forward_end_ns else 0,
            can_run_cuda_graph=True,
        )
        if forward.wishes is not None:
            self._add_logprobs(result, forward, forward.wishes)
        return result

    def _add_logprobs(self, result: GenerationBatchResult, forward: _Forward, wishes: list[Wish]) -> None:
        rule, tokens = self._tokens, result.next_token_ids
        result.logprobs = best = rule.logprobs(forward.rows, forward.seq_lens)
        rows = list(zip(tokens, best, wishes, strict=True))
        result.top_logprobs = [rule.neighbours(token, one, tops) for token, one, (tops, _) in rows]
        result.token_ids_logprobs = [rule.token_ids(token, one, ids) for token, one, (_, ids) in rows]
        if forward.asked:
            result.input_logprobs = [None] * len(tokens)
            for asked in forward.asked:
                row = int(forward.rows[asked.member])
                result.input_logprobs[asked.member] = rule.input_logprobs(row, asked)

    def wait_for(self, forward: _Forward) -> None:
        self._timer.wait_until(forward.end_ns)


class SimLaunch:
    """A forward on the timeline; satisfies `worker.protocol.Launch`."""

    __slots__ = ("_forward", "_result", "_worker", "bid", "forward_pass_id")

    def __init__(self, worker: SimWorker, forward: _Forward, *, sampled: bool) -> None:
        self.bid = forward.bid
        self.forward_pass_id = forward.number
        self._worker = worker
        self._forward = forward
        # rows may belong to others by the time somebody asks, so the tokens are drawn when they are sampled
        self._result = worker.result(forward) if sampled else None

    def sample(self) -> None:
        """Sample now, if that was delayed."""
        if self._result is None:
            self._worker.sample_late(self._forward)
            self._result = self._worker.result(self._forward)

    def done(self) -> bool:
        return self._result is not None and self._worker.is_done(self._forward)

    def result(self) -> BatchResult:
        """Wait for the end of the forward. Raises SgvizError if its sampling was delayed and never begun."""
        if self._result is None:
            raise SgvizError(f"batch {self.bid} waits for its sampling: call sample() before result()")
        self._worker.wait_for(self._forward)
        return self._result
