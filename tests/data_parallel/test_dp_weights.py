"""Other weights for several ranks: all of them take them or none does, and one that runs others gets no requests."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from dp_rig import Rig, request
from other_weights import other_weights

from sgviz.engine import Engine
from sgviz.errors import BadRequest, Unavailable
from sgviz.events.schema import DpChose, WeightsUpdated
from sgviz.messages import AbortReq, ActiveRanksOutput
from sgviz.messages.flow import UpdateWeightFromDiskReqInput, UpdateWeightFromDiskReqOutput
from sgviz.messages.parallel import addressees
from sgviz.tokenizer_manager.engine_time import EngineTime
from sgviz.tokenizer_manager.rank_weights import RankWeights
from sgviz.tokenizer_manager.ranks import Ranks
from sgviz.tokenizer_manager.replies import Replies
from sgviz.tokenizer_manager.weights import Weights

GREEDY = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
LONG = {"max_new_tokens": 1500, "temperature": 0, "ignore_eos": True}
OLD = Weights("old", "v1")


class Story:
    """Ranks that answer each question by `says(rank, model)`: "" is success, None death, else why not."""

    def __init__(self, size: int, says: Callable[[int, str], str | None]) -> None:
        self.ranks = Ranks(size)
        self.told: list[dict[int, str]] = []
        self.asked: list[tuple[str, str, list[int]]] = []
        self._says = says
        self._replies = Replies(self, EngineTime(), self.ranks)  # type: ignore[arg-type]
        self._weights = RankWeights(
            self._replies, self.ranks, lambda: self.told.append(dict(self.ranks.aside))
        )

    def send(self, question: UpdateWeightFromDiskReqInput) -> None:
        """In the place of a Sender."""
        whom = addressees(question, self.ranks.live, False)
        self.asked.append((question.model_path, question.weight_version, whom))
        for rank in whom:
            why = self._says(rank, question.model_path)
            if why is None:
                self.ranks.lost[rank] = "killed"
                asyncio.get_running_loop().call_soon(self._replies.lose, rank)
                continue
            reply = UpdateWeightFromDiskReqOutput(
                id=question.id, success=not why, message=why or f"took {question.model_path}", status=422,
                progress={f"r{rank}": rank}, dp_rank=rank,
            )  # fmt: skip
            asyncio.get_running_loop().call_soon(self._replies.answer, reply)

    def change(self, path: str = "new") -> UpdateWeightFromDiskReqOutput:
        question = UpdateWeightFromDiskReqInput(id="q", model_path=path, weight_version="v2")
        return asyncio.run(self._weights.change(question, OLD, 5.0))


def test_all_take_them() -> None:
    story = Story(3, lambda rank, model: "")
    reply = story.change()
    assert reply.success and reply.progress == {"r0": 0, "r1": 1, "r2": 2}
    assert story.asked == [("new", "v2", [0, 1, 2])] and story.told == []


def test_none_takes_them_and_nobody_is_asked_to_go_back() -> None:
    story = Story(3, lambda rank, model: "no such model")
    reply = story.change()
    assert (reply.success, reply.message, reply.status) == (False, "no such model", 422)
    assert len(story.asked) == 1 and story.ranks.aside == {}


def test_who_took_them_goes_back_if_another_could_not() -> None:
    story = Story(4, lambda rank, model: "no memory" if (rank, model) == (2, "new") else "")
    reply = story.change()
    assert not reply.success and reply.progress == {} and reply.status == 422
    assert story.asked == [("new", "v2", [0, 1, 2, 3]), ("old", "v1", [0, 1, 3])]
    assert reply.message == "data parallel rank 2: no memory; so rank 0, 1, 3 went back to old, version 'v1'"
    assert story.ranks.aside == {} and story.told == []


def test_who_cannot_go_back_is_set_aside_until_an_update_succeeds_on_all() -> None:
    full = {(1, "new"), (0, "old")}
    story = Story(3, lambda rank, model: "no memory" if (rank, model) in full else "")
    reply = story.change()
    assert "rank 0 took them and could not go back (no memory)" in reply.message
    assert "rank 2 went back" in reply.message and reply.progress == {"r0": 0}
    assert story.told == [{0: "no memory"}]
    assert not story.change().success and story.told == [{0: "no memory"}]  # told once
    assert story.change("newer").success and story.told[1:] == [{}]


def test_who_dies_meanwhile_has_no_weights_at_all() -> None:
    story = Story(3, lambda rank, model: {(0, "new"): "no memory", (1, "new"): None}.get((rank, model), ""))
    assert "rank 2 went back" in story.change().message
    story = Story(2, lambda rank, model: {(0, "new"): "no memory", (1, "old"): None}.get((rank, model), ""))
    assert not story.change().success and story.ranks.aside == {}


def test_the_controller_sends_no_requests_to_a_rank_that_is_set_aside() -> None:
    rig = Rig(3)
    rig.send(ActiveRanksOutput(status=[True] * 3, aside={1: "no memory"}))
    rig.send(*[request(f"r{n}") for n in range(4)], request("named", routed_dp_rank=1))
    assert [rig.routed()[f"r{n}"] for n in range(4)] == [0, 2, 0, 2]
    (refused,) = rig.to_tokenizer.of(AbortReq)
    assert (refused.rid, refused.finished_reason.status_code) == ("named", 503)
    assert "set aside" in refused.finished_reason.message and "no memory" in refused.finished_reason.message
    rig.send(AbortReq(rid="elsewhere"))
    assert all(box.of(AbortReq) for box in rig.ranks)  # it lives: what it has can be ended
    rig.send(ActiveRanksOutput(status=[True] * 3), request("back", routed_dp_rank=1))
    assert rig.routed()["back"] == 1


# ------------------------------------------------------------ whole engines


@pytest.fixture
def models(tmp_path: Path) -> tuple[Path, Path]:
    """Two of the same shapes."""
    return other_weights(tmp_path / "first", seed=1), other_weights(tmp_path / "second", seed=2)


@contextmanager
def first_rank_keeps(engine: Engine) -> Iterator[None]:
    """A pause in which a request of rank 0 holds KV, so that this rank refuses other weights with a flush."""
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(engine.generate, "go on", LONG, rid="held", routed_dp_rank=0)
        while not engine.internal_state()["num_running_reqs"]:
            pass
        engine.pause_generation("in_place")
        try:
            yield
        finally:
            engine.continue_generation()
            engine.abort("held")
            call.result()


def answers(engine: Engine) -> list[list[int]]:
    """Of each rank."""
    asked = [engine.generate("Once upon", GREEDY, routed_dp_rank=rank) for rank in range(2)]
    return [output["output_ids"] for output in asked]


def test_a_failed_update_leaves_all_ranks_with_the_same_weights(models: tuple[Path, Path]) -> None:
    first, second = models
    with Engine(model=str(first), device="cpu", dp_size=2) as engine:
        before = answers(engine)
        with (
            first_rank_keeps(engine),
            pytest.raises(BadRequest, match=r"rank 0: .*rank 1 went back") as error,
        ):
            engine.update_weights_from_disk(str(second), weight_version="v2")
        assert error.value.param == "flush_cache"
        assert answers(engine) == before and before[0] == before[1]
        bodies = [event.body for event in engine.pipeline.ring.snapshot()]
        told = [(body.model_path, body.weight_version) for body in bodies if isinstance(body, WeightsUpdated)]
        assert told == [(str(second), "v2"), (str(first), "default")]
        engine.update_weights_from_disk(str(second))
        assert (after := answers(engine))[0] == after[1] != before[0]


def test_a_rank_that_cannot_go_back_gets_nothing_until_all_agree(models: tuple[Path, Path]) -> None:
    first, second = models
    with Engine(model=str(first), device="cpu", dp_size=2) as engine:
        url = engine.serve(port=0).url
        old = answers(engine)[0]
        shutil.rmtree(first)
        with first_rank_keeps(engine):
            answer = httpx.post(
                f"{url}/update_weights_from_disk", json={"model_path": str(second)}, timeout=60
            )
        assert answer.status_code == 400 and "rank 1 took them and could not go back" in answer.text
        outputs = [engine.generate("Once upon", GREEDY) for _ in range(3)]
        assert [(o["output_ids"], o["meta_info"]["dp_rank"]) for o in outputs] == [(old, 0)] * 3
        with pytest.raises(Unavailable, match="set aside"):
            engine.generate("x", routed_dp_rank=1)
        states = httpx.get(f"{url}/server_info").json()["internal_states"]
        assert [state["active"] for state in states] == [True, True]
        assert "set_aside" not in states[0] and str(first) in states[1]["set_aside"]
        chosen = [e.body for e in engine.pipeline.ring.snapshot() if isinstance(e.body, DpChose)]
        assert [active for _, active, *_ in chosen[-1].candidates] == [True, False]
        engine.update_weights_from_disk(str(second))
        assert (new := answers(engine))[0] == new[1] != old
