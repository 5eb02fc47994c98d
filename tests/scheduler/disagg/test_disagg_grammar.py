"""A request under a grammar: the first token, sampled under it on the prefill side, is known to the decode side's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "grammar"))

from pair_rig import Pair
from rig import Rig
from small_vocabulary import SIZE, compiler

from sgviz.scheduler.disagg.dispatch import dispatch_event_loop
from sgviz.scheduler.loops import event_loop_normal, event_loop_overlap


@pytest.mark.parametrize("overlap", [False, True])
def test_the_answer_is_that_of_one_scheduler(overlap: bool) -> None:
    one = Rig(grammars=compiler(), vocab_size=SIZE, disable_overlap_schedule=not overlap)
    wanted = one.submit(range(5, 12), 20, regex="(ab|cd)+e")
    one.run()
    pair = Pair(grammars=compiler(), vocab_size=SIZE, overlap=overlap)
    rid = pair.submit(range(5, 12), 20, regex="(ab|cd)+e")
    pair.run()
    assert pair.answers[rid].output_ids == one.answers[wanted].output_ids
    assert pair.answers[rid].reason == one.answers[wanted].reason
    pair.check_empty()


def test_the_table_of_loops_has_every_mode() -> None:
    for mode in ("null", "prefill", "decode"):
        assert dispatch_event_loop(mode, overlap=False) is event_loop_normal
        assert dispatch_event_loop(mode, overlap=True) is event_loop_overlap
