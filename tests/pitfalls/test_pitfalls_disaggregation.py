"""Prefill and decode on two engines: what ends on one side ends on the other, with its error, and nothing is left."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import psutil
import pytest
from server_process import gone

from sgviz.engine import Engine
from sgviz.errors import BadRequest, SgvizError, Unavailable

SECONDS = 10.0  # within which "within seconds" is, on a busy machine
SILENCE_S = 1.0
MOCK: dict[str, Any] = {
    "model": "tiny-llama", "device": "mock", "max_total_tokens": 4096,
    "disaggregation_heartbeat_interval": SILENCE_S / 2.5, "disaggregation_bootstrap_timeout": 2.0,
}  # fmt: skip
PROMPT = list(range(20, 180))
SHORT = list(range(20, 40))


class Pair:
    """Both engines, asked as the router asks two servers."""

    def __init__(self, prefill: Engine, decode: Engine) -> None:
        self.prefill, self.decode = prefill, decode
        self._rooms = itertools.count(1)
        self._pool = ThreadPoolExecutor(8)

    def ask(
        self,
        ids: list[int],
        tokens: int = 4,
        *,
        to: str = "pd",
        room: int | None = None,
        rid: str | None = None,
    ) -> tuple[str, list[Future[Any]]]:
        """The name of the request, and the answers of those sides that it goes to."""
        room = room or next(self._rooms)
        rid = rid or f"r{room}"
        port = self.prefill.settings.disaggregation.disaggregation_bootstrap_port
        call = {
            "input_ids": ids, "rid": rid,
            "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True},
            "bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": room,
        }  # fmt: skip
        engines = [engine for name, engine in zip("pd", (self.prefill, self.decode)) if name in to]
        return rid, [self._pool.submit(lambda engine=each: engine.generate(**call)) for each in engines]

    def goes_on(self) -> None:
        """The next request is answered, and neither side holds anything."""
        _, (_, answer) = self.ask(SHORT)
        assert len(answer.result(SECONDS)["output_ids"]) == 4
        self.hold_nothing()

    def hold_nothing(self) -> None:
        for engine in (self.prefill, self.decode):
            until(lambda engine=engine: engine.internal_state()["num_live_reqs"] == 0)
            assert engine.flush_cache() is True
            state = engine.internal_state()
            ranks = state.get("ranks", [state])
            assert all(each["available_tokens"] == each["max_total_num_tokens"] for each in ranks)


@contextmanager
def pair(prefill_mode: str = "threads", **of_prefill: Any) -> Iterator[Pair]:
    own = {"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": 0, **of_prefill}
    with (
        Engine(**MOCK, **own, mode=prefill_mode) as prefill,
        Engine(**MOCK, disaggregation_mode="decode", mock_step_ms=5.0) as decode,
    ):
        yield Pair(prefill, decode)


def until(condition: Any) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_the_prefill_side_aborts_ends_on_the_decode_side() -> None:
    """When the prefill side aborts a request, the decode side ends it within seconds too, with the true error, no text,
    and all slots returned. sgl-project/sglang#28651, sgl-project/sglang#33507
    """
    with pair(mock_step_ms=300.0, chunked_prefill_size=16) as it:
        rid, (prefill, decode) = it.ask(PROMPT)
        until(lambda: it.prefill.internal_state()["num_chunked_reqs"] == 1)
        it.prefill.abort(rid)
        with pytest.raises(SgvizError, match=r"[Aa]bort") as error:
            decode.result(SECONDS)
        assert error.value.status == 500
        assert prefill.result(SECONDS)["meta_info"]["finish_reason"]["type"] == "abort"
        it.goes_on()


def test_what_the_prefill_side_refuses_ends_on_the_decode_side() -> None:
    """The same for a refusal: its own status and words. sgl-project/sglang#30233"""
    with pair(max_queued_requests=1) as it:
        alone, _ = it.ask(SHORT, to="p")  # fills the queue
        until(lambda: it.prefill.internal_state()["bootstrap_queue_reqs"] == 1)
        _, answers = it.ask(SHORT)
        errors = []
        for answer in answers:
            with pytest.raises(Unavailable) as error:
                answer.result(SECONDS)
            errors.append(str(error.value))
        assert errors[0] == errors[1] and "queue" in errors[0]
        it.prefill.abort(alone)
        it.goes_on()


@pytest.mark.slow
def test_the_decode_side_lives_through_the_death_of_the_prefill_side() -> None:
    """When the prefill worker dies, decode stays healthy, finishes what it has, fails the waiting requests within a
    stated time (the heartbeats that may be missed), and works again after the restart.
    sgl-project/sglang#12779, sgl-project/sglang#19900
    """
    before = psutil.Process().children(recursive=True)
    with pair("processes", mock_step_ms=200.0, chunked_prefill_size=16) as it:
        _, (_, has_its_kv) = it.ask(SHORT[:8], 600)
        until(lambda: it.decode.internal_state()["num_running_reqs"] == 1)
        _, (_, waits) = it.ask(PROMPT)
        until(lambda: it.decode.internal_state()["decode_transfer_queue_reqs"] == 1)
        killed = [child for child in psutil.Process().children(recursive=True) if child not in before]
        for child in killed:
            child.kill()
        assert gone(killed)
        with pytest.raises(Unavailable, match="silent for"):
            waits.result(SILENCE_S + SECONDS)
        assert len(has_its_kv.result(30)["output_ids"]) == 600
        own = {"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": 0}
        with Engine(**MOCK, **own) as again:
            Pair(again, it.decode).goes_on()


def test_a_room_that_is_doubled_missing_or_orphaned_is_that_requests_error_alone() -> None:
    """When a transfer id is doubled, missing or orphaned, the result is an error for that request only; both schedulers
    stay up and agree on the rank. sgl-project/sglang#40125, sgl-project/sglang#29725
    """
    with pair(dp_size=2, mock_step_ms=100.0) as it:
        _, first = it.ask(PROMPT, room=7)
        until(lambda: it.prefill.internal_state()["num_live_reqs"] == 1)
        _, second = it.ask(SHORT, room=7, rid="doubled")
        for answer in second:
            with pytest.raises(BadRequest, match="bootstrap_room 7"):
                answer.result(SECONDS)
        assert len(first[1].result(SECONDS)["output_ids"]) == 4
        for engine in (it.prefill, it.decode):
            with pytest.raises(BadRequest, match="bootstrap_room"):
                engine.generate(input_ids=SHORT)
        for side in "pd":
            _, (orphan,) = it.ask(SHORT, to=side)
            with pytest.raises(SgvizError, match="in 2 s") as error:
                orphan.result(2.0 + SECONDS)
            assert error.value.status == 500
        for room in (12, 13):
            _, answers = it.ask(SHORT, room=room)
            assert answers[0].result(SECONDS)["meta_info"]["dp_rank"] == room % 2
            assert len(answers[1].result(SECONDS)["output_ids"]) == 4
        it.hold_nothing()
