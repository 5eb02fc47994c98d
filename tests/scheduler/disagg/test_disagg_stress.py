"""Whatever happens to the link and to the requests: who is answered well is answered as by one scheduler, and all pages
come back. Mock workers, whose tokens depend on every id that the KV stands for, and which compare it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from pair_stress import Stress, stressed
from rig import Rig


def check_answers(pair: Stress) -> None:
    """As those of one scheduler that nobody disturbs; what was cut short is a beginning of them."""
    alone = Rig(events=False)
    asked = {}
    for ask, _ in (*pair.well, *pair.cut_short):
        if ask not in asked:
            asked[ask] = alone.submit(ask[0], dict(ask[1])["max_new_tokens"], ignore_eos=True)
    alone.run()
    for ask, found in pair.well:
        assert found == alone.answers[asked[ask]].output_ids, ask
    for ask, found in pair.cut_short:
        assert found == alone.answers[asked[ask]].output_ids[: len(found)], ask


def stress(seed: int, steps: int) -> None:
    with stressed(seed) as pair:
        pair.play(steps)
        pair.come_to_rest()
        check_answers(pair)


@pytest.mark.parametrize("seed", range(2))
def test_a_short_stress(seed: int) -> None:
    stress(seed, 30)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 22))
def test_a_long_stress(seed: int) -> None:
    stress(seed, 400)
