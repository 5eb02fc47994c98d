"""All at once: a pool of a quarter of what is wanted, chunked prompts with decodes riding along, pages, both loops."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

from sgviz.engine import Engine

Ids = list[int]


def pressed(
    model: str, prompts: Sequence[Ids], tokens: int, **settings: object
) -> tuple[list[Ids], Counter[str]]:
    """The outputs, and how often each kind of event and each mode of batch occurred.

    Without ignore_eos, or the scheduler would reserve all that a request may write and never retract.
    """
    page = int(str(settings.get("page_size", 1)))
    # what all begin with is in the cache after the first and not needed again
    shared = sum(1 for _ in itertools.takewhile(lambda ids: len(set(ids)) == 1, zip(*prompts)))
    need = shared + sum(len(ids) - shared + tokens for ids in prompts)
    pages = max(need // 4 // page, -(-max(map(len, prompts)) // page) + -(-tokens // page) + 3)
    with Engine(
        model,
        max_total_tokens=pages * page,
        schedule_conservativeness=0.001,
        enable_mixed_chunk=True,
        chunked_prefill_size=32,
        torch_threads=1,
        **settings,
    ) as engine:
        params = {"temperature": 0, "max_new_tokens": tokens}
        outputs = [
            out["output_ids"] for out in engine.generate(input_ids=list(prompts), sampling_params=params)
        ]
        recording = engine.recording()
        seen = Counter(recording.events.kind.tolist()) + Counter(recording.iterations["mode"].tolist())
    return outputs, seen
