"""All at once: a pool of a quarter of what is wanted, chunked prompts with decodes riding along, pages, both loops."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from sgviz.engine import Engine

Ids = list[int]
APART = 4  # forwards between two that come one by one


def pressed(
    model: str, prompts: Sequence[Ids], tokens: int, *, one_by_one: bool = False, **settings: object
) -> tuple[list[Ids], Counter[str]]:
    """The outputs, and how often each kind of event and each mode of batch occurred.

    `one_by_one`: each comes when the one before decodes. Those that come together are refused at the first plan,
    which counts all that they may write, and then none is looked at until one has ended.

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
        if one_by_one:
            begun = engine.internal_state()["forward_ct"]
            with ThreadPoolExecutor(len(prompts)) as pool:
                outputs = list(pool.map(partial(_ask, engine, params, begun), enumerate(prompts)))
        else:
            answers = engine.generate(input_ids=list(prompts), sampling_params=params)
            outputs = [answer["output_ids"] for answer in answers]
        recording = engine.recording()
        seen = Counter(recording.events.kind.tolist()) + Counter(recording.iterations["mode"].tolist())
    return outputs, seen


def _ask(engine: Engine, params: dict[str, object], begun: int, numbered: tuple[int, Ids]) -> Ids:
    """Send it so many forwards after the one before."""
    number, ids = numbered
    while (state := engine.internal_state())["forward_ct"] < begun + APART * number:
        if not number or (state["forward_ct"] > begun and not state["num_live_reqs"]):
            break  # nobody runs
        time.sleep(0.01)
    answer = engine.generate(input_ids=ids, sampling_params=params)
    return list(answer["output_ids"])
