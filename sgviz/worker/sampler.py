"""Sampler: logits -> tokens and logprobs.

Order of SGLang: penalties (additive, then repetition), min_new_tokens, grammar, logit_bias, logit processors, NaN
clean-up, then argmax for greedy rows, and for the others temperature, softmax, top-k / top-p / min-p and a draw.
Different from it: every draw is the inverse CDF at a number hashed from (seed, place in the output), so a row's token
depends on that row alone; a row is sorted only as far as its filters reach; and what a grammar bars stays barred
whatever a logit processor does. Two ids with the same probability rank by token id.
Imports: batch, torch, and the parts of worker that it ties together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sgviz.batch.vocab_mask import WORD_BITS, VocabMask
from sgviz.worker.input_part import InputPart
from sgviz.worker.logit_processors import LogitProcessors
from sgviz.worker.penalties import PenaltyState
from sgviz.worker.protocol import ProcessorFailure
from sgviz.worker.random_bits import uniforms
from sgviz.worker.sampling_batch import SamplingBatch, SamplingColumns

NAN_LOGIT = -1e5  # what a NaN counts as
FINITE = 1e30  # what an infinity counts as in a row that has nothing better
LOGPROB_FLOOR = -9999.0  # lowest logprob told: JSON has no infinity
SLACK = 1e-5  # more than float32 sums are off by, so no token a filter keeps is missed
NUCLEUS_GUESSES = (1e-4, 1e-5)  # bounds tried for top-p before the one that always holds


@dataclass(slots=True, kw_only=True)
class Sampled:
    """What came of B rows of logits.

    Attributes:
        tokens: [B] int64.
        logprobs: [n] of the members that asked (`columns.asked`), or None if nobody did.
        top_logprobs, top_ids: [n, widest wish] best first, or None; each member's own wish is a prefix.
        token_ids_logprobs: [n, most ids] of the ids that were asked for (`columns.token_ids`), or None.
        inputs: log-probabilities of prompt tokens, one a member that asked; from the forward, not from here.
        failures: by member, why its logit processor failed; its token means nothing.
        nan_members: those whose logits held a NaN; their tokens mean nothing.
    """

    tokens: Tensor
    logprobs: Tensor | None = None
    top_logprobs: Tensor | None = None
    top_ids: Tensor | None = None
    token_ids_logprobs: Tensor | None = None
    inputs: list[InputPart] = field(default_factory=list)
    failures: dict[int, ProcessorFailure] = field(default_factory=dict)
    nan_members: list[int] = field(default_factory=list)

    def moved(self, move: Callable[[Tensor], Tensor]) -> Sampled:
        """The same with every tensor put through `move`."""

        def maybe(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else move(tensor)

        return Sampled(
            tokens=move(self.tokens),
            logprobs=maybe(self.logprobs),
            top_logprobs=maybe(self.top_logprobs),
            top_ids=maybe(self.top_ids),
            token_ids_logprobs=maybe(self.token_ids_logprobs),
            inputs=[part.moved(move) for part in self.inputs],
            failures=self.failures,
            nan_members=self.nan_members,
        )


class Sampler:
    """Samples the batches of one stream, in order; keeps the penalty counts of its rows.

    Args:
        processors: what requests may name; None: nothing.
    """

    def __init__(
        self, vocab_size: int, device: torch.device | str = "cpu", processors: LogitProcessors | None = None
    ) -> None:
        self.penalties = PenaltyState(vocab_size, device)
        self._processors = processors or LogitProcessors({})
        self._device = torch.device(device)

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Sampled:
        """`logits` [B, vocab] float32 may be overwritten."""
        columns = batch.columns
        if batch.plain:
            tokens, nan_members = _argmax(logits)
            return Sampled(tokens=tokens, nan_members=nan_members)
        self._edit(logits, batch)
        failures = self._processors.apply(logits, columns.processed) if columns.processed else {}
        if columns.processed:
            if batch.vocab_mask is not None:
                self._mask(logits, batch.vocab_mask)
            self._find_barred(logits, columns, failures)
        nan_members = self._cleaned(logits, batch)
        sampled = Sampled(tokens=self._tokens(logits, batch), failures=failures, nan_members=nan_members)
        if len(columns.asked):
            self._add_logprobs(sampled, logits, columns)
        self._count(sampled.tokens, batch)
        return sampled

    def _find_barred(
        self, logits: Tensor, columns: SamplingColumns, failures: dict[int, ProcessorFailure]
    ) -> None:
        """Add to `failures` the members whose processors left them no id (of those that their grammar allows)."""
        members = [i for one in columns.processed for i in one.members if i not in failures]
        barred: list[bool] = (logits[members].amax(-1) == -torch.inf).tolist()
        failures.update(
            {
                i: ProcessorFailure("it bars every id that could come next")
                for i, none in zip(members, barred)
                if none
            }
        )

    def forget(self, rows: list[int]) -> None:
        """The rows are free again."""
        self.penalties.forget(rows)

    def _edit(self, logits: Tensor, batch: SamplingBatch) -> None:
        """Penalties, min_new_tokens and logit_bias, in place."""
        columns = batch.columns
        for member, output_ids in batch.fresh:
            self.penalties.begin(columns.rows[member], output_ids)
        if len(columns.penalized):
            self.penalties.apply(
                logits,
                self._put(columns.penalized),
                [columns.rows[i] for i in columns.penalized],
                self._put(columns.frequency).float(),
                self._put(columns.presence).float(),
                self._put(columns.repetition).float(),
            )
        if len(columns.barred_member):
            early = (batch.output_index < columns.min_new_tokens)[columns.barred_member]
            if batch.vocab_mask is not None:  # which keeps the end away itself, where that can be
                early &= ~np.isin(columns.barred_member, batch.vocab_mask.members)
            members, ids = columns.barred_member[early], columns.barred_id[early]
            logits[self._put(members), self._put(ids)] = -torch.inf
        if batch.vocab_mask is not None:
            self._mask(logits, batch.vocab_mask)
        if len(columns.bias_member):
            where = (self._put(columns.bias_member), self._put(columns.bias_id))
            logits.index_put_(where, self._put(columns.bias_value).to(logits.dtype), accumulate=True)

    def _cleaned(self, logits: Tensor, batch: SamplingBatch) -> list[int]:
        """Make every row usable, in place; the members that had a NaN."""
        if _is_usable(logits):
            return []
        nan_members = _nan_rows(logits)
        clean(logits)
        if batch.vocab_mask is not None:
            self._mask(logits, batch.vocab_mask)
        return nan_members

    def _mask(self, logits: Tensor, mask: VocabMask) -> None:
        """Bar what the grammars do not allow, in place."""
        members, vocab = self._put(mask.members), logits.shape[1]
        if self._device.type == "cpu":
            barred = torch.from_numpy(~mask.allowed(vocab))
        else:  # an eighth of the bytes travels
            words = torch.from_numpy(mask.words).to(self._device)
            bits = torch.arange(WORD_BITS, dtype=torch.int32, device=self._device)
            barred = ((words[:, :, None] >> bits) & 1).flatten(1)[:, :vocab] == 0
        logits[members] = logits[members].masked_fill_(barred, -torch.inf)

    def _tokens(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        columns = batch.columns
        if columns.greedy.all():
            return logits.argmax(-1)
        drawing = np.flatnonzero(~columns.greedy)
        whole = len(drawing) == len(logits)
        part = logits if whole else logits[self._put(drawing)]
        drawn = self._draw(part, columns, drawing, batch.output_index)
        if whole:
            return drawn
        tokens = torch.empty(len(logits), dtype=torch.int64, device=self._device)
        tokens[self._put(drawing)] = drawn
        greedy = self._put(np.flatnonzero(columns.greedy))
        tokens[greedy] = logits[greedy].argmax(-1)
        return tokens

    def _draw(
        self,
        logits: Tensor,
        columns: SamplingColumns,
        members: npt.NDArray[np.int64],
        output_index: npt.NDArray[np.int64],
    ) -> Tensor:
        """[n] tokens for `members`, whose logits these are."""
        vocab = logits.shape[1]
        probs = torch.softmax(logits / self._put(columns.temperature[members]).float()[:, None], -1)
        u = self._put(uniforms(columns.seeds[members], output_index[members]))
        top_k, top_p, min_p = columns.top_k[members], columns.top_p[members], columns.min_p[members]
        filtered = (top_k < vocab) | (top_p < 1.0) | (min_p > 0.0)
        tokens = torch.empty(len(members), dtype=torch.int64, device=self._device)
        for chosen, filters in ((np.flatnonzero(~filtered), False), (np.flatnonzero(filtered), True)):
            if not len(chosen):
                continue
            at = self._put(chosen)
            part = probs if len(chosen) == len(members) else probs[at]
            tokens[at] = (
                draw_filtered(
                    part, u[at], self._put(top_k[chosen]), self._put(top_p[chosen]), self._put(min_p[chosen])
                )
                if filters
                else draw(part, u[at])
            )
        return tokens

    def _add_logprobs(self, sampled: Sampled, logits: Tensor, columns: SamplingColumns) -> None:
        """Of the distribution after penalties and temperature, before top-k, top-p and min-p."""
        asked = self._put(columns.asked)
        scaled = logits[asked] / self._put(columns.temperature[columns.asked]).float()[:, None]
        norm = scaled.logsumexp(-1, keepdim=True)
        chosen = scaled.gather(1, sampled.tokens[asked][:, None])
        sampled.logprobs = (chosen - norm).squeeze(1).clamp_(min=LOGPROB_FLOOR)
        wishes = self._put(columns.top_logprobs_num[columns.asked]).clamp(max=scaled.shape[1])
        widest = int(columns.top_logprobs_num[columns.asked].max())
        if widest:
            values, ids = likeliest(scaled, wishes, widest)
            sampled.top_logprobs = (values - norm).clamp_(min=LOGPROB_FLOOR)
            sampled.top_ids = ids
        if columns.token_ids.shape[1]:
            picked = scaled.gather(1, self._put(columns.token_ids))
            sampled.token_ids_logprobs = (picked - norm).clamp_(min=LOGPROB_FLOOR)

    def _count(self, tokens: Tensor, batch: SamplingBatch) -> None:
        columns = batch.columns
        members = columns.penalized[batch.final[columns.penalized]]
        if len(members):
            self.penalties.count([columns.rows[i] for i in members], tokens[self._put(members)])

    def _put(self, array: npt.NDArray[np.int64] | npt.NDArray[np.float64]) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def draw(probs: Tensor, u: Tensor) -> Tensor:
    """Inverse CDF in the order of token ids: [n, V] probabilities and [n] numbers in (0, 1) -> [n] ids."""
    cumulated = probs.cumsum(-1, dtype=torch.float64)
    return _first_above(cumulated, u * cumulated[:, -1])


def draw_filtered(probs: Tensor, u: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Inverse CDF over what the filters leave of each row, most probable first.

    Kept is a token whose rank is below `top_k`, before which lies a probability of at most `top_p`, and
    that is at least `min_p` times as probable as the best. The best one always stays.

    Args:
        probs: [n, V]; u, top_k, top_p, min_p: [n]; top_k >= V and top_p >= 1 mean no limit.
    """
    values, ids = candidates(probs, _threshold(probs, top_k, top_p, min_p))
    ordered = values.double().clamp_(min=0.0)
    cumulated = ordered.cumsum(-1)
    rank = torch.arange(ordered.shape[1], device=probs.device)
    keep = rank < top_k[:, None]
    keep &= (cumulated - ordered <= top_p[:, None]) | (top_p >= 1.0)[:, None]
    keep &= ordered >= ordered[:, :1] * min_p[:, None]
    last = keep.sum(-1, keepdim=True).clamp_(min=1) - 1  # each filter keeps a prefix
    place = _first_above(cumulated, u * cumulated.gather(1, last).squeeze(1))
    return ids.gather(1, torch.minimum(place[:, None], last)).squeeze(1)


def candidates(values: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """What reaches each row's threshold, largest first, equal ones by id.

    Args:
        values: [n, V]. threshold: [n].

    Returns:
        values and ids, [n, width] with the widest row's width; the rest is -inf with id 0.
    """
    reached = values >= threshold[:, None]
    member, ids = reached.nonzero(as_tuple=True)
    counts = torch.bincount(member, minlength=len(values))
    place = torch.arange(len(member), device=values.device) - (counts.cumsum(0) - counts)[member]
    shape = (len(values), int(counts.max()))
    dense = torch.full(shape, -torch.inf, dtype=values.dtype, device=values.device)
    dense_ids = torch.zeros(shape, dtype=torch.int64, device=values.device)
    dense[member, place] = values[member, ids]
    dense_ids[member, place] = ids
    ordered, order = dense.sort(dim=-1, descending=True, stable=True)
    return ordered, dense_ids.gather(1, order)


def likeliest(values: Tensor, wishes: Tensor, widest: int) -> tuple[Tensor, Tensor]:
    """The `wishes` [n] largest of each row of [n, V]: values and ids, [n, at most `widest`], of which a row's own
    wish is a prefix."""
    found, ids = candidates(values, _kth_largest(values, wishes))
    width = min(widest, found.shape[1])
    return found[:, :width], ids[:, :width]


def _threshold(probs: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """[n] a bound that everything the filters keep reaches; it depends on the row alone."""
    vocab = probs.shape[1]
    bound = _nucleus_bound(probs, top_p)
    if bool((min_p > 0).any()):
        bound = torch.maximum(bound, (1.0 - SLACK) * min_p * probs.amax(-1))
    bound = bound.to(probs.dtype)
    limited = top_k < vocab
    if bool(limited.any()):
        kth = _kth_largest(probs, torch.where(limited, top_k, 0))
        bound = torch.maximum(bound, torch.where(limited, kth, 0.0))
    return bound


def _nucleus_bound(probs: Tensor, top_p: Tensor) -> Tensor:
    """[n] the highest of a few bounds with more than `top_p` above it, so that the tail is not sorted."""
    # All tokens below (1 - top_p) / V together weigh less than 1 - top_p: that bound always holds.
    bound = (0.5 / probs.shape[1]) * (1.0 - top_p - SLACK).clamp(min=0.0)
    open_rows = (top_p < 1.0).nonzero().squeeze(1)
    for guess in NUCLEUS_GUESSES:
        if not len(open_rows):
            break
        part = probs if len(open_rows) == len(probs) else probs[open_rows]
        above = torch.where(part >= guess, part, 0.0).sum(-1)
        enough = above >= top_p[open_rows] + SLACK
        bound[open_rows[enough]] = bound[open_rows[enough]].clamp(min=guess)
        open_rows = open_rows[~enough]
    return bound


def _kth_largest(values: Tensor, k: Tensor) -> Tensor:
    """[n] the k-th largest value of each row, +inf where k is 0."""
    best = values.topk(max(int(k.max()), 1), dim=-1).values
    kth = best.gather(1, (k - 1).clamp(min=0)[:, None]).squeeze(1)
    return torch.where(k > 0, kth, torch.inf)


def _first_above(cumulated: Tensor, target: Tensor) -> Tensor:
    """[n] the first place where the running sum passes the target; a token of probability 0 is never that."""
    place = torch.searchsorted(cumulated, target[:, None], right=True).squeeze(1)
    return place.clamp_(max=cumulated.shape[1] - 1)


def _argmax(logits: Tensor) -> tuple[Tensor, list[int]]:
    """[B] first of the largest, and the rows with a NaN, which counts as very unlikely."""
    best, tokens = logits.max(-1)
    if not bool(best.isnan().any()):
        return tokens, []
    nan_rows = _nan_rows(logits)
    return logits.nan_to_num_(nan=NAN_LOGIT, posinf=FINITE, neginf=-FINITE).argmax(-1), nan_rows


def clean(logits: Tensor) -> bool:
    """Make rows with NaN, or without a finite best, usable in place; says whether there were any.

    Other rows stay what they mean, but for -inf, which is finite then.
    """
    if _is_usable(logits):
        return False
    logits.nan_to_num_(nan=NAN_LOGIT, posinf=FINITE, neginf=-FINITE)
    return True


def _is_usable(logits: Tensor) -> bool:
    """Whether every row has a finite best."""
    return bool(logits.amax(-1).isfinite().all())


def _nan_rows(logits: Tensor) -> list[int]:
    rows: list[int] = logits.isnan().any(-1).nonzero().squeeze(1).tolist()
    return rows
