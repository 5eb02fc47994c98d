"""A load that is steered: what it sends is what was asked for, never too much at a time, and nothing is left of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from sgviz.engine import Engine
from sgviz.errors import BadRequest, Unavailable
from sgviz.events.schema import QueueEntered
from sgviz.experiment.live_load import GIVE_UP, LiveLoad
from sgviz.workload import Endless, LoadShape

QUICK = LoadShape(rate=200.0, prompt_tokens=24, output_tokens=4, shared_share=0.5)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine("tiny-llama", device="mock", mock_step_ms=1, max_total_tokens=1024) as made:
        yield made


@pytest.fixture(scope="module")
def slow() -> Iterator[Engine]:
    """An engine that answers nothing for a long time."""
    with Engine("tiny-llama", device="mock", mock_step_ms=200, max_total_tokens=4096) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_left(engine: Engine, slow: Engine) -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.01)


def test_what_is_sent_is_what_was_asked_for(engine: Engine) -> None:
    with LiveLoad(engine, QUICK) as load:
        load.start()
        eventually(lambda: load.counts.finished >= 20)
        load.change(prompt_tokens=40, output_tokens=7)
        changed_at = load.counts.sent
        eventually(lambda: load.counts.finished >= changed_at + 10)
        load.stop()
        eventually(lambda: load.counts.in_flight == 0)
        counts = load.counts
    assert counts.sent == counts.finished and counts.failed == counts.aborted == 0
    entered = {
        event.body.rid: event.body
        for event in engine.recording().stamped()
        if isinstance(event.body, QueueEntered)
    }
    assert len(entered) == counts.sent
    sizes = [(body.prompt_tokens, body.max_new_tokens) for body in entered.values()]
    assert sizes[:20] == [(24, 4)] * 20 and sizes[-5:] == [(40, 7)] * 5 and set(sizes) == {(24, 4), (40, 7)}
    source, vocab = Endless(QUICK.seed), engine.pipeline.scheduler_info.vocab_size
    for body in list(entered.values())[:20]:
        assert np.frombuffer(body.input_ids, np.int32).tolist() == source.ids_of(source.next(QUICK), vocab)


def test_no_more_are_under_way_than_allowed(slow: Engine) -> None:
    endless = QUICK.changed(rate=1000.0, output_tokens=400)  # nothing ends while this test lasts
    with LiveLoad(slow, endless, max_in_flight=5) as load:
        load.start()
        eventually(lambda: load.counts.in_flight == 5)
        time.sleep(0.2)
        assert load.counts.in_flight == 5 and load.counts.sent == 5
        load.change(rate=None, concurrency=2)
        time.sleep(0.1)
        assert load.counts.sent == 5
        load.change(concurrency=50)
        assert load.counts.in_flight <= 5


def test_a_closed_loop_keeps_its_number(engine: Engine) -> None:
    with LiveLoad(engine, QUICK.changed(rate=None, concurrency=3)) as load:
        load.start()
        eventually(lambda: load.counts.finished >= 30)
        assert load.counts.in_flight <= 3


def test_a_change_of_rate_acts_at_once(engine: Engine) -> None:
    with LiveLoad(engine, QUICK.changed(rate=0.001)) as load:  # the next but one would come in many minutes
        load.start()
        eventually(lambda: load.counts.sent == 1)
        time.sleep(0.1)
        assert load.counts.sent == 1
        load.change(rate=500.0)
        eventually(lambda: load.counts.finished >= 5)


def test_closing_gives_up_what_is_under_way(slow: Engine) -> None:
    load = LiveLoad(slow, QUICK)
    load.start()
    eventually(lambda: load.counts.in_flight >= 2)
    load.close()
    load.close()
    counts = load.counts
    assert counts.in_flight == 0 and counts.aborted >= 2 and not load.running
    with pytest.raises(Unavailable, match="closed"):
        load.start()
    load.stop()
    eventually(lambda: slow.internal_state()["num_running_reqs"] == 0)


def test_stopping_lets_the_rest_finish_and_starting_goes_on(engine: Engine) -> None:
    with LiveLoad(engine, QUICK) as load:
        load.start()
        load.start()
        eventually(lambda: load.counts.finished >= 3)
        load.stop()
        load.stop()
        assert not load.running
        eventually(lambda: load.counts.in_flight == 0)
        before = load.counts
        time.sleep(0.05)
        assert load.counts.sent == before.sent == before.finished
        load.start()
        eventually(lambda: load.counts.sent > before.sent)


def test_a_server_is_asked_by_its_url(engine: Engine) -> None:
    url = engine.serve(port=0).url
    with LiveLoad(url, QUICK) as load:
        assert (load.facts.vocab_size, load.facts.context_len) == (
            engine.pipeline.scheduler_info.vocab_size,
            engine.pipeline.scheduler_info.context_len,
        )
        load.start()
        eventually(lambda: load.counts.finished >= 10)
        load.stop()
        eventually(lambda: load.counts.in_flight == 0)
        assert load.counts.failed == 0 and load.counts.tokens_per_s > 0
    with pytest.raises(Unavailable, match="no server answers"):
        LiveLoad("http://127.0.0.1:9")


@pytest.mark.parametrize("url", ["http://localhost:notaport", "127.0.0.1:30000", "", "http://[::1"])
def test_what_is_no_url_is_said_to_be_none(url: str) -> None:
    with pytest.raises(BadRequest, match="is no URL of a server"):
        LiveLoad(url)


def test_an_unforeseen_error_ends_its_request_and_is_told(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask(rid: str, ids: list[int], output_tokens: int) -> int:
        raise KeyError("what nobody thought of")

    with LiveLoad(engine, QUICK) as load:
        monkeypatch.setattr(load._target, "ask", ask)
        load.start()
        eventually(lambda: load.counts.failed >= 3)
        load.stop()
        assert "KeyError: 'what nobody thought of'" in load.counts.note
        eventually(lambda: load.counts.in_flight == 0)


def test_what_does_not_fit_the_model_is_refused_and_changes_nothing(engine: Engine) -> None:
    with LiveLoad(engine, QUICK) as load:
        with pytest.raises(BadRequest, match="the context of"):
            load.change(prompt_tokens=load.facts.context_len)
        with pytest.raises(BadRequest, match="rate"):
            load.change(rate=-1)
        assert load.shape == QUICK
    with pytest.raises(BadRequest, match="at least 1 request"):
        LiveLoad(engine, QUICK, max_in_flight=0)


def test_failures_are_counted_and_end_it_if_nothing_else_comes() -> None:
    engine = Engine("tiny-llama", device="mock", mock_step_ms=1, max_total_tokens=256)
    with (
        engine,
        LiveLoad(engine, QUICK.changed(rate=1000.0, prompt_tokens=300)) as load,
    ):  # larger than the pool
        load.start()
        eventually(lambda: not load.running)
        counts = load.counts
        assert counts.failed >= GIVE_UP and counts.finished == 0
        assert counts.note.startswith(f"stopped after {GIVE_UP} failures in a row: ")
        load.change(prompt_tokens=24)
        load.start()
        eventually(lambda: load.counts.finished >= 3)


def test_an_engine_that_is_closed_ends_it() -> None:
    with Engine("tiny-llama", device="mock", mock_step_ms=1) as engine:
        load = LiveLoad(engine, QUICK.changed(rate=1000.0))
        load.start()
        eventually(lambda: load.counts.finished >= 3)
    eventually(lambda: not load.running)
    assert load.counts.note.startswith("stopped after")
    load.close()


def test_the_history_is_bounded_and_adds_up(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with LiveLoad(engine, QUICK) as load:
        load.start()
        eventually(lambda: load.counts.finished >= 20)
        load.stop()
        eventually(lambda: load.counts.in_flight == 0)
        counts, steps = load.counts, load.history
        assert sum(step.sent for step in steps) == counts.sent
        assert sum(step.finished for step in steps) == counts.finished
        assert sum(step.tokens for step in steps) == counts.finished * QUICK.output_tokens
        assert steps[-1].in_flight == 0
        later = time.monotonic() + 10_000
        monkeypatch.setattr("sgviz.experiment.live_load.time.monotonic", lambda: later)
        assert len(load.history) == 240 and load.counts.sent_per_s == 0
        monkeypatch.undo()
