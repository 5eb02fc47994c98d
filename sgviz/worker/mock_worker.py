"""MockWorker: a device without a model. Tokens follow a rule, durations are whatever is asked for.

It keeps a *fake KV*: each slot holds the id of the token whose KV a model would keep there. A forward writes
the new ids at `out_cache_loc`, reads every position back through the row table, and hashes what it read. So
the next token depends on the true history alone, and any error in slots, rows or lengths changes the output
(or, with `check=True`, raises KvMismatch with the position). Decode inputs come by row from a FutureMap of
its own, as on the real device. Mirrors TpModelWorker's behaviour towards the scheduler, nothing inside it;
sampling parameters and logit processors have no influence, except that `min_new_tokens` keeps the end-of-sequence id
away, and that a token which a grammar does not allow gives way to the next id that it does. Log-probabilities follow
the history too: what comes has one between -1 and 0, and each id behind it (round the vocabulary) has 0.5 less.
Imports: batch, worker.mock_kv, worker.snapshot, worker.stream, errors (no torch).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sgviz.batch.asked_positions import AskedPositions, asked_positions
from sgviz.batch.input_logprobs import InputLogprobs
from sgviz.batch.req import Req
from sgviz.batch.schedule_batch import ScheduleBatch
from sgviz.batch.vocab_mask import Constrained, VocabMask, constrained_members, fill_vocab_mask
from sgviz.cache.req_kv import Slots
from sgviz.errors import BadRequest, SgvizError
from sgviz.messages.embedding import EmbeddingSpec
from sgviz.worker.kv_copy import StreamCopy
from sgviz.worker.mock_kv import mock_layout, read_ids, write_ids
from sgviz.worker.mock_logprobs import behind, input_logprobs, likeliest, logprobs
from sgviz.worker.protocol import EmbeddingBatchResult, GenerationBatchResult, Launch, NewWeights, WorkerInfo
from sgviz.worker.random_bits import mix64
from sgviz.worker.rule_vector import rule_vector
from sgviz.worker.snapshot import BatchSnapshot, Ints
from sgviz.worker.stream import CpuStream, DelayedLaunch, InlineStream, ManualStream, Stream, WorkerLaunch

Duration = float | Callable[[ScheduleBatch], float]
TokenRule = Callable[[str, int, int], int | None]
Bits = npt.NDArray[np.uint64]
UNKNOWN = -1  # FutureMap entry of a row that has sampled nothing
MOCK_EMBEDDING = EmbeddingSpec(dim=16)


class KvMismatch(SgvizError):
    """What a forward read from the fake KV is not the request's history: slots, rows or lengths are wrong."""


def mock_info(
    *,
    vocab_size: int = 1000,
    context_len: int = 2048,
    max_total_num_tokens: int = 4096,
    eos_token_ids: tuple[int, ...] = (2,),
    model: str = "mock",
    embedding: EmbeddingSpec | None = MOCK_EMBEDDING,
) -> WorkerInfo:
    """WorkerInfo of a device that computes nothing."""
    return WorkerInfo(
        model=model,
        vocab_size=vocab_size,
        context_len=context_len,
        max_total_num_tokens=max_total_num_tokens,
        eos_token_ids=eos_token_ids,
        device="mock",
        dtype="int64",
        embedding=embedding,
        is_generation=embedding is None or not embedding.is_encoder,
    )


@dataclass(slots=True, kw_only=True)
class _Forward:
    """One launch, as the stream sees it."""

    batch: BatchSnapshot
    reqs: list[Req]
    output_index: list[int]
    seconds: float
    known: list[list[int]] | None
    return_logprob: bool
    asked: list[AskedPositions]
    constrained: Constrained
    mask: VocabMask | None = None
    start_ns: int = 0
    inputs: dict[int, InputLogprobs] = field(default_factory=dict)


class MockWorker:
    """A deterministic worker: the same history gives the same token, whoever shares the batch.

    Args:
        info: what the scheduler is told; `mock_info()` by default.
        threaded: forwards run on a CpuStream; False: inside `launch` (fast property tests).
        manual: forwards wait until `complete` is called.
        duration: seconds a forward takes (slept on the stream), or a function of the batch, asked at launch.
        eos_every: one token in so many is an end-of-sequence id; 0: never.
        check: compare every position with the requests' ids.
        rule: `(rid, output index, hash) -> token id`; None for "as usual". Goes before the hash rule.
        page_size: of the allocator in use: the pool's slots are page_size .. size + page_size - 1.
    """

    def __init__(
        self,
        info: WorkerInfo | None = None,
        *,
        threaded: bool = True,
        manual: bool = False,
        duration: Duration | None = None,
        eos_every: int = 0,
        check: bool = False,
        rule: TokenRule | None = None,
        page_size: int = 1,
    ) -> None:
        self.info = info or mock_info()
        self._manual = ManualStream() if manual else None
        self._stream: Stream = self._manual or (CpuStream("sgviz-mock") if threaded else InlineStream())
        self._duration = duration
        self._rule = rule
        self._check = check
        self._tokens = _TokenTable(self.info, eos_every)
        self._page_size = page_size
        # Slot -> id + 1, so that 0 is a slot nobody wrote.
        self._kv: Ints = np.zeros(self.info.max_total_num_tokens + page_size, dtype=np.int64)
        self._future_map = np.full(1, UNKNOWN, dtype=np.int64)  # row -> last sampled id
        self._launched = 0
        self.kv_layout = mock_layout(self.info.vocab_size, self.info.bytes_per_token)

    @property
    def pending(self) -> int:
        """Launches that wait for `complete` (manual mode), else 0."""
        return self._manual.pending if self._manual else 0

    def complete(self, count: int = 1) -> int:
        """Manual mode: run the `count` oldest launches; returns how many there were."""
        if self._manual is None:
            raise ValueError("complete() needs MockWorker(manual=True); this one runs by itself")
        return self._manual.step(count)

    def launch(self, batch: ScheduleBatch, *, delay_sample: bool = False) -> Launch:
        """Start the forward of `batch`. Raises BadBatch for a batch whose lists disagree."""
        if batch.is_embedding:
            return self.forward_batch_embedding(batch)
        forward, number = self._take(batch), self._launched
        if delay_sample:
            read = self._stream.submit(lambda: self._forward(forward))
            return DelayedLaunch(batch.bid, number, lambda: self._begin(forward, number, read.result))
        return self._begin(forward, number, lambda: self._forward(forward))

    def forward_batch_embedding(self, batch: ScheduleBatch) -> WorkerLaunch[EmbeddingBatchResult]:
        """A vector a request, by `rule_vector` from the hash of its history; `b""` while the prompt goes on."""
        forward, number = self._take(batch), self._launched
        sizes = [None if req is batch.chunked_req else (req.dimensions,) for req in batch.reqs]
        embedded = self._stream.submit(lambda: self._embed(forward, number, sizes))
        return WorkerLaunch(batch.bid, number, embedded)

    def _take(self, batch: ScheduleBatch) -> _Forward:
        """What the stream needs of `batch`; counts it."""
        duration = self._duration
        self._launched += 1
        return _Forward(
            batch=BatchSnapshot.take(batch),
            reqs=list(batch.reqs),
            output_index=[n - len(req.origin_input_ids) for n, req in zip(batch.seq_lens, batch.reqs)],
            seconds=duration(batch) if callable(duration) else duration or 0.0,
            known=[req.fill_ids() for req in batch.reqs] if self._check else None,
            return_logprob=batch.return_logprob,
            asked=asked_positions(batch) if batch.return_logprob else [],
            constrained=constrained_members(batch),
        )

    def _begin(
        self, forward: _Forward, number: int, bits: Callable[[], Bits]
    ) -> WorkerLaunch[GenerationBatchResult]:
        if forward.constrained:
            forward.mask = fill_vocab_mask(forward.constrained, self.info.vocab_size, self.info.eos_token_ids)
        sampled = self._stream.submit(lambda: self._sample(forward, number, bits()))
        return WorkerLaunch(forward.batch.bid, number, sampled)

    def forget(self, rows: list[int]) -> None:
        """The rows' last tokens are dropped, behind the launches that may still read them."""
        self._stream.submit(lambda: self._forget(rows))

    def read_kv(self, slots: Slots, out: memoryview) -> StreamCopy:
        return read_ids(self._stream, self._kv, slots, out)

    def write_kv(self, slots: Slots, data: memoryview) -> StreamCopy:
        return write_ids(self._stream, self._kv, slots, data)

    def prime(self, rows: list[int], tokens: list[int]) -> None:
        """The rows' last tokens are these, for the launches that follow."""
        self._stream.submit(lambda: self._store(np.array(rows, dtype=np.int64), tokens))

    def load_weights(self, model_path: str) -> NewWeights:
        """Refused: there are none."""
        raise BadRequest("the mock device has no weights that could be replaced", param="model_path")

    def close(self) -> None:
        self._stream.close()

    # Everything below runs on the stream.

    def _forget(self, rows: list[int]) -> None:
        self._future_map[[row for row in rows if row < len(self._future_map)]] = UNKNOWN

    def _forward(self, forward: _Forward) -> Bits:
        """Write the new positions and hash every request's history: what stands for the logits."""
        forward.start_ns = time.monotonic_ns()
        self._write(forward.batch)
        found = self._read(forward.batch)
        if forward.known is not None:
            _compare(forward, found)
        for asked in forward.asked:
            end = asked.position + len(asked.next_ids)
            words = self._tokens.hashes(found[asked.member, :end])[asked.position :]
            forward.inputs[asked.member] = input_logprobs(asked, words, self.info.vocab_size)
        return self._tokens.hash(found)

    def _sample(self, forward: _Forward, number: int, bits: Bits) -> GenerationBatchResult:
        tokens = self._choose(forward, bits)
        if forward.mask is not None:
            tokens = forward.mask.corrected(tokens, self.info.vocab_size)
        self._store(forward.batch.rows, tokens)
        self._sleep(forward.seconds, forward.start_ns)
        result = GenerationBatchResult(
            bid=forward.batch.bid,
            next_token_ids=tokens,
            forward_pass_id=number,
            start_ns=forward.start_ns,
            end_ns=time.monotonic_ns(),
        )
        if forward.return_logprob:
            self._add_logprobs(result, forward, bits)
        return result

    def _embed(
        self, forward: _Forward, number: int, sizes: list[tuple[int | None] | None]
    ) -> EmbeddingBatchResult:
        bits, spec = self._forward(forward).tolist(), self.info.embedding
        assert spec is not None, "the TokenizerManager refuses such requests"
        vectors = [rule_vector(word, spec.dim, *size) if size else b"" for word, size in zip(bits, sizes)]
        self._sleep(forward.seconds, forward.start_ns)
        return EmbeddingBatchResult(
            bid=forward.batch.bid,
            embeddings=vectors,
            forward_pass_id=number,
            start_ns=forward.start_ns,
            end_ns=time.monotonic_ns(),
        )

    def _write(self, batch: BatchSnapshot) -> None:
        """The new positions' ids go to their slots, the decoding rows' from the FutureMap."""
        ids = batch.input_ids
        if batch.decode_rows:
            rows = batch.rows[len(batch.rows) - batch.decode_rows :]
            self._reserve(int(rows.max()))
            last = self._future_map[rows]
            if (last == UNKNOWN).any():
                rid = batch.rids[len(batch.rids) - batch.decode_rows + int((last == UNKNOWN).argmax())]
                raise KvMismatch(f"batch {batch.bid}: request {rid} decodes, but its row has sampled nothing")
            ids = np.concatenate((ids, last))
        if len(batch.out_cache_loc):
            self._check_slots(batch)
        self._kv[batch.out_cache_loc] = ids + 1

    def _check_slots(self, batch: BatchSnapshot) -> None:
        low, high = int(batch.out_cache_loc.min()), int(batch.out_cache_loc.max())
        if low < self._page_size or high >= len(self._kv):
            raise KvMismatch(
                f"batch {batch.bid} writes slot {low if low < self._page_size else high}; a pool of "
                f"{self.info.max_total_num_tokens} tokens with page_size {self._page_size} has slots "
                f"{self._page_size} to {len(self._kv) - 1}"
            )

    def _read(self, batch: BatchSnapshot) -> Ints:
        """[B, max_len] id + 1 of every position as the row table finds it; 0 beyond a request's length."""
        inside = np.arange(batch.slot_table.shape[1]) < batch.seq_lens[:, None]
        slots = np.where(inside, batch.slot_table, 0)
        found: Ints = self._kv[slots] * inside
        return found

    def _choose(self, forward: _Forward, bits: Bits) -> list[int]:
        min_new = [
            max(0, req.sampling_params.min_new_tokens - index)
            for req, index in zip(forward.reqs, forward.output_index)
        ]
        tokens = self._tokens.choose(bits, np.array(min_new) > 0)
        if self._rule is None:
            return tokens
        asked = [
            self._rule(rid, index, int(word))
            for rid, index, word in zip(forward.batch.rids, forward.output_index, bits)
        ]
        return [token if ruled is None else ruled for token, ruled in zip(tokens, asked)]

    def _reserve(self, row: int) -> None:
        size = len(self._future_map)
        if row >= size:
            self._future_map = np.pad(self._future_map, (0, 2 * row + 1 - size), constant_values=UNKNOWN)

    def _store(self, rows: Ints, tokens: list[int]) -> None:
        if tokens:
            self._reserve(int(rows.max()))
            self._future_map[rows] = tokens

    def _sleep(self, seconds: float, start_ns: int) -> None:
        left = seconds - (time.monotonic_ns() - start_ns) * 1e-9
        if left > 0:
            time.sleep(left)

    def _add_logprobs(self, result: GenerationBatchResult, forward: _Forward, bits: Bits) -> None:
        """By the rule at the top, for the tokens sampled and the prompt positions asked for."""
        size = self.info.vocab_size
        result.logprobs = chosen = logprobs(bits)
        rows = list(zip(forward.reqs, result.next_token_ids, chosen))
        result.top_logprobs = [
            likeliest(token, best, req.top_logprobs_num, size) for req, token, best in rows
        ]
        result.token_ids_logprobs = [
            behind(token, best, req.token_ids_logprob, size) for req, token, best in rows
        ]
        if forward.inputs:
            result.input_logprobs = [forward.inputs.get(member) for member in range(len(rows))]


class _TokenTable:
    """The rule: history -> 64 bits -> token id."""

    def __init__(self, info: WorkerInfo, eos_every: int) -> None:
        if eos_every and not info.eos_token_ids:
            raise ValueError(f"eos_every = {eos_every} needs an end-of-sequence id in the WorkerInfo")
        self._eos = info.eos_token_ids
        self._every = np.uint64(eos_every)
        plain = [token for token in range(info.vocab_size) if token not in set(info.eos_token_ids)]
        self._plain = np.array(plain, dtype=np.int64)
        self._weights: Bits = mix64(np.arange(info.context_len + 1, dtype=np.uint64)) | np.uint64(1)

    def hash(self, found: Ints) -> Bits:
        """[B] 64 bits of the ids and their positions; an odd weight each, so one wrong id always shows."""
        weights = self._weights[: found.shape[1]]
        return mix64((found.view(np.uint64) * weights).sum(axis=1, dtype=np.uint64))

    def hashes(self, found: Ints) -> Bits:
        """[n] what `hash` gives after 1, 2, ... n positions of one row [n]."""
        return mix64((found.view(np.uint64) * self._weights[: len(found)]).cumsum(dtype=np.uint64))

    def choose(self, bits: Bits, no_eos: npt.NDArray[np.bool_]) -> list[int]:
        """Low half: which plain token; high half: whether the answer ends here."""
        tokens = self._plain[bits % np.uint64(len(self._plain))]
        if self._every:
            ends = ((bits >> np.uint64(32)) % self._every == 0) & ~no_eos
            tokens[ends] = self._eos[0]
        chosen: list[int] = tokens.tolist()
        return chosen


def _compare(forward: _Forward, found: Ints) -> None:
    """Raise KvMismatch at the first position that does not hold the request's id."""
    batch = forward.batch
    assert forward.known is not None
    _check_rows(batch)
    starts = np.cumsum(batch.extend_lens) - batch.extend_lens
    decoding = len(batch.rids) - batch.decode_rows
    for i, ids in enumerate(forward.known):
        where = f"batch {batch.bid} ({batch.forward_mode}), request {batch.rids[i]}"
        length, prefix = int(batch.seq_lens[i]), int(batch.prefix_lens[i])
        row = batch.slot_table[i, :length]
        written = batch.out_cache_loc[starts[i] : starts[i] + batch.extend_lens[i]]
        _same(written, row[prefix:], f"{where}: slots written and slots in its row differ", prefix)
        if len(np.unique(row)) != length:
            raise KvMismatch(f"{where}: a slot occurs twice in its row: {row.tolist()}")
        # With the overlap loop one sampled token may still be unknown here; two are impossible.
        if i >= decoding and not len(ids) <= length <= len(ids) + 1:
            raise KvMismatch(f"{where}: decodes to length {length}, its ids are {len(ids)}")
        if i < decoding and length > len(ids):
            raise KvMismatch(f"{where}: extends to length {length}, its ids are only {len(ids)}")
        known = min(length, len(ids))
        _same(found[i, :known] - 1, np.array(ids[:known]), f"{where}: KV holds another id", 0)


def _check_rows(batch: BatchSnapshot) -> None:
    if len(np.unique(batch.rows)) != len(batch.rows) or (batch.rows < 1).any():
        raise KvMismatch(f"batch {batch.bid}: rows {batch.rows.tolist()} must differ and be at least 1")
    if len(np.unique(batch.out_cache_loc)) != len(batch.out_cache_loc):
        raise KvMismatch(f"batch {batch.bid}: a slot is written twice: {batch.out_cache_loc.tolist()}")


def _same(found: npt.NDArray[np.integer], wanted: npt.NDArray[np.integer], what: str, offset: int) -> None:
    if not np.array_equal(found, wanted):
        at = int((found != wanted).argmax()) if len(found) == len(wanted) else 0
        raise KvMismatch(f"{what} at position {offset + at}: {found[at]}, wanted {wanted[at]}")
