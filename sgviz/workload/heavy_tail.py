"""Prompts with a heavy tail: most are short, and a few hold much of all tokens. A test for whatever spreads requests.

Mirrors nothing of SGLang's bench_serving, whose lengths are uniform or of a data set. Imports: errors.
"""

from __future__ import annotations

import random

from sgviz.errors import BadRequest
from sgviz.workload.arrivals import Vocab, arrivals_of, rid_of
from sgviz.workload.lengths import Length, distribution
from sgviz.workload.numbers import check_above_zero, check_counts
from sgviz.workload.value import Parameter, Request, Segment, Workload

ROUNDING = 1e-6  # a twentieth of 400 is 20
HEAVIEST = 0.1  # a draw is at most 2**53 ** (1 / shape)


def heavy_tail(
    *,
    num_requests: int,
    output_tokens: Length,
    shortest: int = 20,
    shape: float = 1.1,
    largest_share: float = 0.05,
    longest: int | None = None,
    rate: float | None = None,
    concurrency: int | None = None,
    seed: int = 0,
    vocab: Vocab = None,
) -> Workload:
    """Requests whose prompts have Pareto lengths, none with more than `largest_share` of all prompt tokens.

    Over R ranks, whoever always gives the next one to the rank with the fewest prompt tokens stays within
    `(R - 1) * largest_share` of their mean, whatever the order: 15 % for 4 ranks and 0.05. No policy that does not
    know what will come can promise much less.

    Args:
        shortest: tokens of the shortest prompts. shape: of the tail; the smaller, the heavier (1.1: the longest
            tenth has about 60 % of all tokens before the cut). longest: tokens at most; None: as the share says.
        rate: arrivals a second (Poisson); None: all at once, or as `concurrency` allows.

    Raises:
        BadRequest: a number is out of range, or there are too few requests for that share.
    """
    check_counts(num_requests=num_requests, shortest=shortest)
    check_above_zero(shape=shape, largest_share=largest_share)
    if longest is not None:
        check_counts(shortest, longest=longest)
    drawn = random.Random(f"{seed}/lengths")
    lengths = _lengths(num_requests, shortest, shape, largest_share, longest, drawn)
    outputs, times = _outputs(output_tokens, num_requests, seed), arrivals_of(num_requests, rate, seed)
    requests = tuple(
        Request(
            rid=rid_of(number, num_requests),
            at_s=times[number],
            prompt=(Segment(f"prompt{number}", length),),
            output_tokens=outputs[number],
        )
        for number, length in enumerate(lengths)
    )
    shown: dict[str, Parameter] = {
        "num_requests": num_requests, "shortest": shortest, "shape": shape, "largest_share": largest_share,
        "longest": longest, "output_tokens": str(output_tokens), "rate": rate, "concurrency": concurrency,
        "seed": seed,
    }  # fmt: skip
    return Workload(
        name="heavy_tail", seed=seed, requests=requests, concurrency=concurrency, vocab=vocab, parameters=shown
    )  # fmt: skip


def _outputs(length: Length, count: int, seed: int) -> list[int]:
    outputs, rng = distribution(length, "output_tokens"), random.Random(f"{seed}/outputs")
    return [outputs.draw(rng) for _ in range(count)]


def _lengths(
    count: int, shortest: int, shape: float, share: float, longest: int | None, rng: random.Random
) -> list[int]:
    """Drawn, and cut again and again until none has more than its share of what is left."""
    if share > 1:
        raise BadRequest(f"largest_share is {share}; it must be at most 1, all tokens", param="largest_share")
    if shape < HEAVIEST:
        raise BadRequest(
            f"shape is {shape}; it must be at least {HEAVIEST}, or lengths are beyond all numbers",
            param="shape",
        )
    if count * share < 1:
        raise BadRequest(
            f"largest_share is {share}: of {count} prompts one has at least 1/{count} of all tokens",
            param="largest_share",
        )
    lengths = [int(shortest * rng.paretovariate(shape)) for _ in range(count)]
    most = max(lengths) if longest is None else longest
    while True:
        lengths = [min(length, most) for length in lengths]
        most = int(share * sum(lengths) + ROUNDING)
        if max(lengths) <= most:
            return lengths
