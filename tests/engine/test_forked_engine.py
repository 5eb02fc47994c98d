"""A process that was forked from the one that has an engine: a clear error instead of a wait without end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable

import pytest
from leftovers import assert_nothing_left, snapshot

from sgviz.engine import Engine
from sgviz.errors import Unavailable

LIMIT_S = 20.0


def in_fork(call: Callable[[], str]) -> str:
    """What `call` returns in a forked process, which then ends without any clean-up."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, call().encode())
        finally:
            os._exit(0)
    os.close(writing)
    deadline = time.monotonic() + LIMIT_S
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            pytest.fail("the forked process waits without end")
        time.sleep(0.01)
    with os.fdopen(reading) as said:
        return said.read()


def said_by(engine: Engine, call: Callable[[], object]) -> str:
    try:
        return f"came back with {call()!r}"
    except Unavailable as error:
        return str(error)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_every_call_in_a_fork_is_a_clear_error_and_the_parent_goes_on() -> None:
    before = snapshot()
    with Engine("tiny-llama", device="mock", max_total_tokens=2048) as engine:
        first = engine.generate("hello", {"max_new_tokens": 4, "temperature": 0})
        calls: list[Callable[[], object]] = [
            lambda: engine.generate("hello", {"max_new_tokens": 4}),
            lambda: engine.chat("hello"),
            lambda: list(engine.stream_sync("hello")),
            engine.flush_cache,
            engine.internal_state,
            lambda: engine.serve(port=0),
        ]
        for call in calls:
            said = in_fork(lambda call=call: said_by(engine, call))
            assert f"was forked from process {os.getpid()}, which has the engine" in said
        assert in_fork(lambda: said_by(engine, engine.close)) == "came back with None"
        again = engine.generate("hello", {"max_new_tokens": 4, "temperature": 0})
        assert again["output_ids"] == first["output_ids"], "the parent's engine is untouched"
    assert_nothing_left(before)


@pytest.mark.slow
def test_a_fork_that_ends_by_itself_ends_nothing_of_the_parent() -> None:
    """With all that Python does at its end."""
    code = """
        import os, warnings
        from sgviz.engine import Engine
        warnings.simplefilter("ignore")
        with Engine("tiny-llama", device="mock", mode="processes", log_level="error") as engine:
            child = os.fork()
            if child == 0:
                raise SystemExit(0)
            assert os.waitpid(child, 0)[1] == 0
            print(len(engine.generate("hello", {"max_new_tokens": 4, "ignore_eos": True})["output_ids"]))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0 and done.stdout.strip() == "4", done.stderr
