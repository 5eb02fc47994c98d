"""Independent requests: arrivals by a random process, or as many at a time as a closed loop allows.

Mirrors `--request-rate` and `--max-concurrency` of SGLang's bench_serving. Imports: errors.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from sgviz.workload.lengths import Length, distribution
from sgviz.workload.numbers import check_above_zero, check_counts
from sgviz.workload.value import Parameter, Request, Segment, Workload

Vocab = tuple[int, int] | None


def poisson(
    *,
    rate: float,
    num_requests: int,
    prompt_tokens: Length,
    output_tokens: Length,
    seed: int = 0,
    concurrency: int | None = None,
    vocab: Vocab = None,
) -> Workload:
    """Requests at `rate` a second, independent of each other; the first at 0.

    Raises:
        BadRequest: a number is out of range.
    """
    check_above_zero(rate=rate)
    check_counts(num_requests=num_requests)
    shape = _Shape("poisson", num_requests, prompt_tokens, output_tokens, seed, concurrency, vocab)
    return shape.make(lambda rng: rng.expovariate(rate), rate=rate, concurrency=concurrency)


def gamma(
    *,
    rate: float,
    cv: float,
    num_requests: int,
    prompt_tokens: Length,
    output_tokens: Length,
    seed: int = 0,
    concurrency: int | None = None,
    vocab: Vocab = None,
) -> Workload:
    """Requests at `rate` a second whose gaps vary by `cv` (deviation / mean): above 1 bursts, below 1 a beat.

    Raises:
        BadRequest: a number is out of range.
    """
    check_above_zero(rate=rate, cv=cv)
    check_counts(num_requests=num_requests)
    shape = _Shape("gamma", num_requests, prompt_tokens, output_tokens, seed, concurrency, vocab)
    k = 1 / cv**2
    return shape.make(
        lambda rng: rng.gammavariate(k, 1 / (rate * k)), rate=rate, cv=cv, concurrency=concurrency
    )


def closed_loop(
    *,
    concurrency: int,
    num_requests: int,
    prompt_tokens: Length,
    output_tokens: Length,
    seed: int = 0,
    vocab: Vocab = None,
) -> Workload:
    """`concurrency` requests at a time; when one ends, the next is sent.

    Raises:
        BadRequest: a number is out of range.
    """
    check_counts(concurrency=concurrency, num_requests=num_requests)
    shape = _Shape("closed_loop", num_requests, prompt_tokens, output_tokens, seed, concurrency, vocab)
    return shape.make(lambda rng: 0.0, concurrency=concurrency)


@dataclass(frozen=True, slots=True)
class _Shape:
    """What the three have in common."""

    name: str
    num_requests: int
    prompt_tokens: Length
    output_tokens: Length
    seed: int
    concurrency: int | None
    vocab: Vocab

    def make(self, gap: Callable[[random.Random], float], **parameters: Parameter) -> Workload:
        """Requests a gap apart; `parameters` stand in the summary before the lengths."""
        times, count = random.Random(f"{self.seed}/arrivals"), self.num_requests
        arrivals = accumulate((gap(times) for _ in range(count - 1)), initial=0.0)
        shown: dict[str, Parameter] = {
            **parameters,
            "num_requests": count,
            "prompt_tokens": str(self.prompt_tokens),
            "output_tokens": str(self.output_tokens),
            "seed": self.seed,
        }
        return Workload(
            name=self.name,
            seed=self.seed,
            requests=tuple(self._requests(arrivals)),
            concurrency=self.concurrency,
            vocab=self.vocab,
            parameters=shown,
        )

    def _requests(self, arrivals: Iterable[float]) -> Iterator[Request]:
        prompts = distribution(self.prompt_tokens, "prompt_tokens")
        outputs = distribution(self.output_tokens, "output_tokens")
        lengths = random.Random(f"{self.seed}/lengths")
        for number, at in enumerate(arrivals):
            yield Request(
                rid=rid_of(number, self.num_requests),
                at_s=round(at, 6),
                prompt=(Segment(f"prompt{number}", prompts.draw(lengths)),),
                output_tokens=outputs.draw(lengths),
            )


def rid_of(number: int, count: int) -> str:
    """`r007`: names that sort as the requests do."""
    return f"r{number:0{max(3, len(str(count - 1)))}d}"


def arrivals_of(count: int, rate: float | None, seed: int) -> list[float]:
    """Seconds at which they arrive: the first at 0, then `rate` a second, independent of each other; None: at once."""
    if rate is None:
        return [0.0] * count
    check_above_zero(rate=rate)
    rng = random.Random(f"{seed}/arrivals")
    return [round(at, 6) for at in accumulate((rng.expovariate(rate) for _ in range(count - 1)), initial=0.0)]
