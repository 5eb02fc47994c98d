"""SamplingBatch: what the sampler must know of each member of a batch, as arrays.

Built in the scheduler's thread at launch, so nothing of it follows the requests afterwards. What depends on
the members alone (`SamplingColumns`) is kept from launch to launch while the members stay the same: a decode
step then costs one subtraction. Mirrors SGLang's SamplingBatchInfo.
Imports: batch, worker.random_bits (no torch).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sgviz.batch.req import Req
from sgviz.batch.schedule_batch import ScheduleBatch
from sgviz.batch.vocab_mask import VocabMask
from sgviz.messages import SamplingParams
from sgviz.worker.random_bits import Bits, seed_of

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Processed:
    """A logit processor by `name`, the members whose logits it edits, and the custom_params of each."""

    name: str
    members: list[int]
    params: list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingColumns:
    """Settings of B members. `[n]` arrays run parallel to the list of members named before them.

    Attributes:
        greedy, temperature, top_k, top_p, min_p, seeds, min_new_tokens, top_logprobs_num: [B].
        penalized: members with a penalty; frequency, presence, repetition: [n] theirs.
        bias_member, bias_id, bias_value: [n] one entry of a logit_bias each.
        barred_member, barred_id: [n] ids that may not come before min_new_tokens.
        asked: members that want logprobs. token_ids: [n, most ids] ids they want beside, filled up with 0.
        processed: a logit processor each, with the members that named it.
        plain: everybody is greedy and nothing else was asked: one argmax is all.
    """

    reqs: list[Req]
    rows: list[int]
    prompt_lens: Ints
    greedy: Bools
    temperature: Floats
    top_k: Ints
    top_p: Floats
    min_p: Floats
    seeds: Bits
    min_new_tokens: Ints
    penalized: Ints
    frequency: Floats
    presence: Floats
    repetition: Floats
    bias_member: Ints
    bias_id: Ints
    bias_value: Floats
    barred_member: Ints
    barred_id: Ints
    asked: Ints
    top_logprobs_num: Ints
    token_ids: Ints
    processed: list[Processed]
    plain: bool

    @classmethod
    def build(
        cls, reqs: list[Req], rows: list[int], eos_token_ids: tuple[int, ...], random_seed: int
    ) -> SamplingColumns:
        params = [req.sampling_params for req in reqs]
        penalized = [i for i, p in enumerate(params) if _has_penalty(p)]
        bias = [
            (i, int(key), value) for i, p in enumerate(params) for key, value in (p.logit_bias or {}).items()
        ]
        barred = [
            (i, token)
            for i, p in enumerate(params)
            if p.min_new_tokens > 0
            for token in sorted({*eos_token_ids, *(p.stop_token_ids or ())})
        ]
        greedy = np.array([p.is_greedy for p in params], dtype=np.bool_)
        seeds = [seed_of(p.sampling_seed, req.rid, random_seed) for p, req in zip(params, reqs)]
        asked = [i for i, req in enumerate(reqs) if req.return_logprob]
        processed = _processed(reqs)
        return cls(
            reqs=list(reqs),
            rows=rows,
            prompt_lens=_ints(len(req.origin_input_ids) for req in reqs),
            greedy=greedy,
            temperature=_floats(1.0 if p.is_greedy else p.temperature for p in params),
            top_k=_ints(p.top_k for p in params),
            top_p=_floats(p.top_p for p in params),
            min_p=_floats(p.min_p for p in params),
            seeds=np.array(seeds, dtype=np.uint64),
            min_new_tokens=_ints(p.min_new_tokens for p in params),
            penalized=_ints(penalized),
            frequency=_floats(params[i].frequency_penalty for i in penalized),
            presence=_floats(params[i].presence_penalty for i in penalized),
            repetition=_floats(params[i].repetition_penalty for i in penalized),
            bias_member=_ints(member for member, _, _ in bias),
            bias_id=_ints(token for _, token, _ in bias),
            bias_value=_floats(value for _, _, value in bias),
            barred_member=_ints(member for member, _ in barred),
            barred_id=_ints(token for _, token in barred),
            asked=_ints(asked),
            top_logprobs_num=_ints(req.top_logprobs_num for req in reqs),
            token_ids=_padded([reqs[i].token_ids_logprob for i in asked]),
            processed=processed,
            plain=bool(greedy.all()) and not (penalized or bias or barred or asked or processed),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBatch:
    """The sampling side of one launch.

    Attributes:
        output_index: [B] place in the output of the token sampled now (0 is the first).
        final: [B] False for a chunk whose prompt goes on: its token is not used.
        fresh: penalized members that begin here, with the output they have already (after a retraction, or from
            another server).
        vocab_mask: what those under a grammar may have; filled in when the batch is sampled.
    """

    columns: SamplingColumns
    output_index: Ints
    final: Bools
    fresh: list[tuple[int, list[int]]]
    vocab_mask: VocabMask | None = None

    @property
    def plain(self) -> bool:
        """One argmax is all."""
        return self.columns.plain and self.vocab_mask is None

    @classmethod
    def from_batch(
        cls,
        batch: ScheduleBatch,
        *,
        eos_token_ids: tuple[int, ...] = (),
        random_seed: int = 0,
        previous: SamplingBatch | None = None,
    ) -> SamplingBatch:
        """Read the members' settings; those of `previous` are kept if it has the same members and rows."""
        rows = batch.rows
        columns = previous.columns if previous is not None else None
        if columns is None or columns.reqs != batch.reqs or columns.rows != rows:
            columns = SamplingColumns.build(batch.reqs, rows, eos_token_ids, random_seed)
        extends = 0 if batch.forward_mode.is_decode else len(batch) - batch.decode_rows
        final = np.ones(len(batch), dtype=np.bool_)
        for i in range(extends):
            final[i] = batch.seq_lens[i] >= batch.reqs[i].seqlen
        fresh = [
            (i, list(batch.reqs[i].output_ids))
            for i in columns.penalized.tolist()
            if (i < extends and final[i]) or batch.reqs[i].is_primed
        ]
        index = np.array(batch.seq_lens, dtype=np.int64) - columns.prompt_lens
        return cls(columns=columns, output_index=index, final=final, fresh=fresh)


def _has_penalty(params: SamplingParams) -> bool:
    return bool(params.frequency_penalty or params.presence_penalty or params.repetition_penalty != 1.0)


def _processed(reqs: list[Req]) -> list[Processed]:
    """By processor, in the order in which their first requests come."""
    out: dict[str, Processed] = {}
    for member, req in enumerate(reqs):
        name = req.custom_logit_processor
        if name is not None:
            one = out.setdefault(name, Processed(name, [], []))
            one.members.append(member)
            one.params.append(req.sampling_params.custom_params or {})
    return list(out.values())


def _padded(rows: list[tuple[int, ...]]) -> Ints:
    """[n, longest] with 0 behind the shorter ones."""
    out = np.zeros((len(rows), max(map(len, rows), default=0)), dtype=np.int64)
    for row, ids in zip(out, rows):
        row[: len(ids)] = ids
    return out


def _ints(values: Iterable[int]) -> Ints:
    return np.array(list(values), dtype=np.int64)


def _floats(values: Iterable[float]) -> Floats:
    return np.array(list(values), dtype=np.float64)
