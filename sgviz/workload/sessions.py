"""Requests that have something in common: a shared prefix, or the turns of a conversation.

Mirrors `generated-shared-prefix` of SGLang's bench_serving (groups, prompts a group, turns). Imports: errors.
"""

from __future__ import annotations

import random

from sgviz.workload.arrivals import Vocab, arrivals_of, rid_of
from sgviz.workload.lengths import Length, distribution
from sgviz.workload.numbers import check_counts, check_not_negative
from sgviz.workload.value import Parameter, Request, Segment, Workload


def shared_prefix(
    *,
    groups: int,
    prompts_per_group: int,
    prefix_tokens: Length,
    question_tokens: Length,
    output_tokens: Length,
    rate: float | None = None,
    concurrency: int | None = None,
    seed: int = 0,
    vocab: Vocab = None,
) -> Workload:
    """`groups` system prompts, each before `prompts_per_group` questions, in a shuffled order.

    Args:
        rate: arrivals a second (Poisson); None: all at once, or as `concurrency` allows.

    Raises:
        BadRequest: a number is out of range.
    """
    check_counts(groups=groups, prompts_per_group=prompts_per_group)
    lengths, order = random.Random(f"{seed}/lengths"), random.Random(f"{seed}/order")
    prefixes = distribution(prefix_tokens, "prefix_tokens")
    questions, outputs = (
        distribution(question_tokens, "question_tokens"),
        distribution(output_tokens, "output_tokens"),
    )
    prefix_of = [Segment(f"prefix{group}", prefixes.draw(lengths)) for group in range(groups)]
    who = [group for group in range(groups) for _ in range(prompts_per_group)]
    order.shuffle(who)
    requests = tuple(
        Request(
            rid=rid_of(number, len(who)),
            at_s=at,
            prompt=(prefix_of[group], Segment(f"question{number}", questions.draw(lengths))),
            output_tokens=outputs.draw(lengths),
            group=f"g{group}",
        )
        for number, (group, at) in enumerate(zip(who, arrivals_of(len(who), rate, seed)))
    )
    shown: dict[str, Parameter] = {
        "groups": groups, "prompts_per_group": prompts_per_group, "prefix_tokens": str(prefix_tokens),
        "question_tokens": str(question_tokens), "output_tokens": str(output_tokens), "rate": rate,
        "concurrency": concurrency, "seed": seed,
    }  # fmt: skip
    return Workload(
        name="shared_prefix",
        seed=seed,
        requests=requests,
        concurrency=concurrency,
        vocab=vocab,
        parameters=shown,
    )


def multi_turn(
    *,
    sessions: int,
    turns: int,
    question_tokens: Length,
    output_tokens: Length,
    system_tokens: int = 0,
    think_s: float = 0.0,
    rate: float | None = None,
    concurrency: int | None = None,
    seed: int = 0,
    vocab: Vocab = None,
) -> Workload:
    """Conversations: each turn's prompt is everything before it, the true answers included, and a new question.

    Args:
        system_tokens: a common beginning of all sessions (0: none). think_s: mean pause before the next turn
            (exponential; 0: none). rate: sessions that begin in a second (Poisson); None: all at once.

    Raises:
        BadRequest: a number is out of range.
    """
    check_counts(sessions=sessions, turns=turns)
    check_counts(0, system_tokens=system_tokens)
    check_not_negative(think_s=think_s)
    lengths, pauses = random.Random(f"{seed}/lengths"), random.Random(f"{seed}/pauses")
    questions, outputs = (
        distribution(question_tokens, "question_tokens"),
        distribution(output_tokens, "output_tokens"),
    )
    system = (Segment("system", system_tokens),) if system_tokens else ()
    last: dict[int, Request] = {}
    requests = []
    starts = arrivals_of(sessions, rate, seed)
    for turn in range(turns):
        for session, start in enumerate(starts):
            before = last.get(session)
            question = Segment(f"session{session}/question{turn}", questions.draw(lengths))
            pause = round(pauses.expovariate(1 / think_s), 6) if think_s else 0.0
            last[session] = Request(
                rid=f"s{session:03d}t{turn}",
                at_s=pause if before else start,
                prompt=(question,) if before else (*system, question),
                output_tokens=outputs.draw(lengths),
                after=before.rid if before else "",
                history_tokens=before.prompt_tokens + before.output_tokens if before else 0,
                group=f"s{session:03d}",
            )
            requests.append(last[session])
    shown: dict[str, Parameter] = {
        "sessions": sessions, "turns": turns, "question_tokens": str(question_tokens),
        "output_tokens": str(output_tokens), "system_tokens": system_tokens, "think_s": think_s, "rate": rate,
        "concurrency": concurrency, "seed": seed,
    }  # fmt: skip
    return Workload(
        name="multi_turn", seed=seed, requests=tuple(requests), concurrency=concurrency, vocab=vocab,
        parameters=shown,
    )  # fmt: skip
