"""The same two schedulers with the real managers between them: the answers of one scheduler, and nothing left."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from pair_rig import single
from socket_pair import sockets

from sgviz.disaggregation import FAKE_BOOTSTRAP_HOST

PROMPTS = [[(11 * i + k * k + i * i) % 97 for i in range(6 + 15 * k)] for k in range(6)]


@pytest.mark.parametrize("backend", ["shm", "tcp"])
@pytest.mark.parametrize("overlap", [False, True])
def test_the_ids_are_those_of_one_scheduler_over_sockets(backend: str, overlap: bool) -> None:
    with sockets(
        backend, overlap, prefill_page=16, decode_page=4, prefill_settings={"chunked_prefill_size": 32}
    ) as pair:
        rids = [pair.submit(ids, 10) for ids in PROMPTS]
        pair.settle()
        assert [pair.answers[rid].output_ids for rid in rids] == single(PROMPTS, 10)
        pair.check_recordings()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("backend", ["shm", "fake"])
def test_a_request_without_another_side_ends_by_itself(backend: str, side: str, overlap: bool) -> None:
    """As the warm-up of a server: nothing travels, and no message comes that would wake who waits."""
    with sockets(backend, overlap, prefill_settings={"chunked_prefill_size": 16}) as pair:
        host = FAKE_BOOTSTRAP_HOST if backend == "shm" else "10.0.0.1"
        rids = [pair.submit(range(40), 4, to=side, host=host) for _ in range(3)]
        rig = getattr(pair, side)
        rig.worker._check = False  # there is no KV that could be right
        rig.run()
        lengths = [len(rig.answers[rid].output_ids) for rid in rids]
        assert lengths == [1 if side == "prefill" else 4] * 3
        pair.check_empty()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_a_thousand_requests_with_aborts_on_either_side_leave_nothing(backend: str) -> None:
    """Every tenth is aborted, on one side or the other, at any time: both books balance, all pages are back."""
    rng = random.Random(8)
    with sockets(
        backend, tokens=1024, decode_tokens=1024, prefill_page=16, decode_page=4, eos_every=40,
        prefill_settings={"chunked_prefill_size": 64},
    ) as pair:  # fmt: skip
        prompts: dict[str, tuple[list[int], int]] = {}
        victims = rng.sample(range(1000), 100)  # membership only
        doomed: list[tuple[int, str]] = []  # when, who
        for number in range(1000):
            head, most = rng.choice([0, 16, 48]), rng.randrange(2, 16)
            ids = [*range(head), *(rng.randrange(97) for _ in range(rng.randrange(1, 40)))]
            prompts[rid := pair.submit(ids, most)] = ids, most
            if number in victims:
                doomed.append((number + rng.randrange(12), rid))
            for _, each in [entry for entry in doomed if entry[0] == number]:
                rng.choice(pair.sides).abort(each)
            if rng.random() < 0.6:
                for side in pair.sides:
                    side.stop()
        pair.turn_until(lambda: pair.idle, most_s=120.0)
        pair.settle()
        pair.check_recordings()
        assert len(pair.answers) == 1000
        assert sum(answer.reason == "abort" for answer in pair.answers.values()) >= 60
        for rid, (ids, most) in list(prompts.items())[::20]:
            answer, wanted = pair.answers[rid], single([ids], most, eos_every=40)[0]
            assert answer.output_ids == wanted[: len(answer.output_ids)]
            assert answer.reason == "abort" or answer.output_ids == wanted
