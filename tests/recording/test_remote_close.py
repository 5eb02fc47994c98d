"""Following a server ends at once, also while nothing happens there, and takes its connection along."""

from __future__ import annotations

import threading

import pytest

import sgviz
from sgviz.engine import Engine


@pytest.mark.timeout(60)
def test_closing_does_not_wait_for_the_next_event() -> None:
    with Engine("tiny-llama", device="mock", mock_step_ms=0) as engine:
        url = engine.serve(port=0).url
        engine.generate("hello", sampling_params={"max_new_tokens": 2})
        before = threading.active_count()
        rec = sgviz.connect(url)
        assert rec.wait_for(engine.pipeline.ring.total)
        rec.close()
        assert threading.active_count() == before and rec.link._stream.closed
        rec.close()
        assert len(rec) > 0


@pytest.mark.timeout(60)
def test_a_stream_that_breaks_is_taken_up_again() -> None:
    from sgviz.recording.remote import _cut

    with (
        Engine("tiny-llama", device="mock", mock_step_ms=0) as engine,
        sgviz.connect(engine.serve(port=0).url) as rec,
    ):
        engine.generate("one", sampling_params={"max_new_tokens": 2})
        assert rec.wait_for(engine.pipeline.ring.total)
        _cut(rec.link._stream)
        engine.generate("two", sampling_params={"max_new_tokens": 2})
        assert rec.wait_for(engine.pipeline.ring.total) and rec.dropped == 0
        assert len(rec) == engine.pipeline.ring.total
