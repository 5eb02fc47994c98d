"""A policy of the user's own in the whole pipeline: as an object, by name, in threads and processes, and at fault."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from leftovers import assert_nothing_left, snapshot

from sgviz.batch.req import Req
from sgviz.engine import Engine, Mode
from sgviz.errors import ConfigError
from sgviz.events.schema import PolicyFailed
from sgviz.scheduler.policy import PolicyView, make_policy

EXAMPLE = Path(__file__).resolve().parents[2] / "data/policies/shortest_prompt_first.py"
# the first runs alone for a while, so the others are in the queue together when it ends
LENGTHS = {"first": 5, "long": 60, "middle": 30, "short": 10}
ONE_AT_A_TIME = {"device": "mock", "mock_step_ms": 15.0, "max_running_requests": 1}
MODES: tuple[Mode, ...] = ("threads", "processes")


class ShortestPromptFirst:
    name = "shortest-prompt-first"

    def order(self, waiting: Sequence[Req], view: PolicyView) -> Sequence[Req]:
        return sorted(waiting, key=lambda req: len(req.origin_input_ids))


def order_of_runs(engine: Engine) -> list[str]:
    """Sends the four requests at once; their rids by the time their first forward began."""
    params = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    prompts = [[number + 4] * length for number, length in enumerate(LENGTHS.values())]
    outs = engine.generate(input_ids=prompts, sampling_params=params, rid=list(LENGTHS))
    assert [out["meta_info"]["completion_tokens"] for out in outs] == [12] * 4
    metas = sorted((out["meta_info"] for out in outs), key=lambda meta: meta["forward_entry_time"])
    return [meta["id"] for meta in metas]


def failures(engine: Engine, most_s: float = 5.0) -> list[PolicyFailed]:
    """The policy.failed events; those of another process may still be on their way."""
    deadline = time.monotonic() + most_s
    while True:
        found = [
            event.body for event in engine.pipeline.ring.snapshot() if isinstance(event.body, PolicyFailed)
        ]
        if found or time.monotonic() > deadline:
            return found
        time.sleep(0.02)


def test_without_a_policy_they_run_as_they_came() -> None:
    with Engine("tiny-llama", **ONE_AT_A_TIME) as engine:
        assert order_of_runs(engine) == ["first", "long", "middle", "short"]


def test_an_object_orders_the_queue() -> None:
    with Engine("tiny-llama", schedule_policy=ShortestPromptFirst(), **ONE_AT_A_TIME) as engine:
        assert order_of_runs(engine) == ["first", "short", "middle", "long"]
        assert failures(engine, 0) == []


@pytest.mark.parametrize("mode", [MODES[0], pytest.param(MODES[1], marks=pytest.mark.slow)])
def test_the_example_file_orders_the_queue(mode: Mode) -> None:
    policy = f"{EXAMPLE}:ShortestPromptFirst"
    with Engine("tiny-llama", mode=mode, schedule_policy=policy, **ONE_AT_A_TIME) as engine:
        assert order_of_runs(engine) == ["first", "short", "middle", "long"]


@pytest.mark.slow
def test_a_module_in_the_working_directory_is_found_in_both_modes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "policies_of_mine.py").write_text(EXAMPLE.read_text())
    monkeypatch.chdir(tmp_path)
    for mode in MODES:
        policy = "policies_of_mine:ShortestPromptFirst"
        with Engine("tiny-llama", mode=mode, schedule_policy=policy, **ONE_AT_A_TIME) as engine:
            assert order_of_runs(engine) == ["first", "short", "middle", "long"]


FAULTY = """
class {name}:
    name = "faulty"
    def order(self, waiting, view):
        {body}
"""
FAULTS = {
    "Raises": ("raise ZeroDivisionError('of no use')", "raised ZeroDivisionError: of no use"),
    "Exits": ("import sys; sys.exit(3)", "raised SystemExit: 3"),
    "Drops": ("return waiting[:-1]", "dropped 'short'"),
    "Doubles": ("return [waiting[-1], *waiting]", "returned 'short' twice"),
}


@pytest.mark.parametrize("mode", [MODES[0], pytest.param(MODES[1], marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FAULTS)
def test_a_faulty_policy_is_reported_and_all_run_in_order_of_arrival(
    tmp_path: Path, name: str, mode: Mode
) -> None:
    body, fault = FAULTS[name]
    file = tmp_path / "faulty.py"
    # at fault only when all three wait, and backwards before: arrival counts, not what an earlier plan left
    guarded = f"if len(waiting) < 3: return waiting[::-1]\n        {body}"
    file.write_text(FAULTY.format(name=name, body=guarded))
    with Engine("tiny-llama", mode=mode, schedule_policy=f"{file}:{name}", **ONE_AT_A_TIME) as engine:
        ran = order_of_runs(
            engine
        )  # before the second, three waited; "first" is one of them if it was overtaken
        assert ran[1] == next(name for name in LENGTHS if name != ran[0])
        found = failures(engine)
        assert {body.policy for body in found} == {"faulty"} and fault in {body.fault for body in found}
        state = engine.internal_state()
        assert state["num_live_reqs"] == state["protected_tokens"] == state["private_tokens"] == 0


BROKEN = {
    "nothing.py:Policy": "there is no file",
    "no_such_module_here:Policy": "importing no_such_module_here raised ModuleNotFoundError",
    "good.py:Nearest": "there is no class 'Nearest' in it .did you mean 'Nearby'",
    "good.py:": "must be module:Class",
    ":Nearby": "must be module:Class",
    "good.py:text": "there is no class 'text'",
    "good.py:NeedsArgument": "it is made without arguments",
    "good.py:Nameless": "no attribute `name`",
    "good.py:Orderless": "no method order",
    "wrong.py:Policy": "running wrong.py raised SyntaxError",
    "leaving.py:Policy": "running leaving.py raised SystemExit: 3",
    "good.py:Leaves": r"Leaves\(\) raised SystemExit: 3",
}
GOOD = """
text = "no class"
class Nearby:
    name = "nearby"
    def order(self, waiting, view): return waiting
class NeedsArgument(Nearby):
    def __init__(self, weight): ...
class Nameless:
    def order(self, waiting, view): return waiting
class Orderless:
    name = "orderless"
class Leaves(Nearby):
    def __init__(self): raise SystemExit(3)
"""


@pytest.mark.parametrize("name", BROKEN)
def test_a_policy_that_cannot_be_loaded_is_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "good.py").write_text(GOOD)
    (tmp_path / "wrong.py").write_text("def (")
    (tmp_path / "leaving.py").write_text("import sys; sys.exit(3)")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=BROKEN[name]) as caught:
        make_policy(name, 0)
    assert caught.value.message.startswith(f"schedule_policy {name}: ")


@pytest.mark.parametrize("mode", MODES)
def test_it_is_refused_before_anything_is_started(mode: Mode) -> None:
    before = snapshot()
    with pytest.raises(ConfigError, match="there is no file"):
        Engine("no-such-model-at-all", mode=mode, schedule_policy="nothing.py:Policy")
    assert_nothing_left(before)


def test_objects_that_are_no_policy_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"give an object of it: ShortestPromptFirst\(\)"):
        Engine("tiny-llama", schedule_policy=ShortestPromptFirst)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no attribute `name`"):
        Engine("tiny-llama", schedule_policy=object())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="works in mode='threads' only"):
        Engine("tiny-llama", mode="processes", schedule_policy=ShortestPromptFirst())


def test_an_edited_file_takes_effect_with_the_next_engine(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    for name in ("one", "another"):
        file.write_text(
            f"class P:\n    name = {name!r}\n    def order(self, waiting, view): return waiting\n"
        )
        assert make_policy(f"{file}:P", 0).name == name


def test_dataclasses_work_in_a_policy_file(tmp_path: Path) -> None:
    file = tmp_path / "with_dataclass.py"
    file.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass, field\n"
        "@dataclass\nclass P:\n    name: str = 'data'\n    seen: list[int] = field(default_factory=list)\n"
        "    def order(self, waiting, view): return waiting\n"
    )
    assert make_policy(f"{file}:P", 0).name == "data"
