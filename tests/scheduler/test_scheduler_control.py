"""Other weights, profiles, a slower device and the load, as a scheduler is told of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
from rig import Rig
from test_pause import go_on, pause

from sgviz.errors import BadRequest
from sgviz.events.schema import CacheFlushed, ForwardsSlowed, ProfileEnded, ProfileStarted, WeightsUpdated
from sgviz.messages.flow import (
    ControlReqOutput,
    GetLoadsReqInput,
    GetLoadsReqOutput,
    Load,
    PauseMode,
    ProfileReqOutput,
    SlowDownReqInput,
    StartProfileReqInput,
    StopProfileReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightFromDiskReqOutput,
)
from sgviz.scheduler.stops import Stop
from sgviz.worker.mock_worker import MockWorker, mock_info
from sgviz.worker.steps import SlowWorker

loops = pytest.mark.parametrize("normal", [False, True], ids=["overlap", "normal"])


@dataclass
class Loading:
    """Weights that are there when the test says so. `at`: what the scheduler had live when they were installed."""

    ready: bool = False
    error: Exception | None = None
    installed: list[int] = field(default_factory=list)
    live: Callable[[], int] = int

    def done(self) -> bool:
        return self.ready

    def install(self) -> None:
        if self.error is not None:
            raise self.error
        self.installed.append(self.live())


class Loadable(MockWorker):
    """A mock device that takes part in a change of weights."""

    def __init__(self) -> None:
        super().__init__(mock_info(max_total_num_tokens=512), threaded=False)
        self.loading = Loading()
        self.paths: list[str] = []

    def load_weights(self, model_path: str) -> Loading:
        self.paths.append(model_path)
        return self.loading


def rig_with(normal: bool = True) -> tuple[Rig, Loading]:
    worker = Loadable()
    rig = Rig(worker=worker, disable_overlap_schedule=normal)
    worker.loading.live = lambda: len(rig.state.live)
    return rig, worker.loading


def update(rig: Rig, *, flush_cache: bool = True, name: str = "u") -> None:
    rig.inbox.send(
        UpdateWeightFromDiskReqInput(id=name, model_path="m", weight_version="v2", flush_cache=flush_cache)
    )


def answered(rig: Rig) -> msgspec.Struct:
    rig.until_true(lambda: bool(rig.replies), most=200)
    return rig.replies.pop(0)


def asked(rig: Rig, message: msgspec.Struct) -> msgspec.Struct:
    rig.inbox.send(message)
    return answered(rig)


# ---------------------------------------------------------------- weights


@loops
def test_weights_are_taken_when_they_are_there_and_nobody_holds_kv_of_the_old(normal: bool) -> None:
    rig, loading = rig_with(normal)
    rig.submit(range(30), 12)
    rig.until_true(lambda: rig.state.forward_ct > 2)
    update(rig)
    for _ in range(6):
        rig.stop()
    loading.ready = True
    reply = answered(rig)
    assert isinstance(reply, UpdateWeightFromDiskReqOutput) and reply.success and reply.progress == {}
    assert loading.installed == [0] and rig.state.cache.evictable_size() == 0
    [told] = rig.bodies(WeightsUpdated)
    assert (told.model_path, told.weight_version, told.progress) == ("m", "v2", ())
    assert rig.bodies(CacheFlushed)[-1].ok
    rig.run()
    rig.check_empty()


@loops
def test_the_loop_goes_round_while_they_are_loaded(normal: bool) -> None:
    rig, _ = rig_with(normal)
    update(rig, flush_cache=False)
    rig.submit(range(10), 5, rid="meanwhile")
    rig.until_true(lambda: rig.answers["meanwhile"].finals == 1)
    assert not rig.replies and rig.scheduler.control.waits


@loops
def test_in_a_pause_they_are_refused_before_they_are_loaded_if_the_cache_cannot_be_flushed(
    normal: bool,
) -> None:
    rig, loading = rig_with(normal)
    rig.submit(range(30), 12, rid="a")
    rig.until_true(lambda: rig.state.forward_ct > 3)
    pause(rig, "in_place")
    update(rig)
    reply = answered(rig)
    assert isinstance(reply, UpdateWeightFromDiskReqOutput) and not reply.success
    assert "1 paused requests hold KV" in reply.message and "flush_cache false" in reply.message
    assert isinstance(rig.worker, Loadable) and rig.worker.paths == []
    loading.ready = True
    update(rig, flush_cache=False)
    reply = answered(rig)
    assert isinstance(reply, UpdateWeightFromDiskReqOutput) and reply.success
    assert reply.progress == {"a": len(rig.state.live["a"].output_ids)} and reply.progress["a"] > 0
    go_on(rig)
    rig.run()
    rig.check_empty()


@loops
@pytest.mark.parametrize("mode", ["in_place", "retract"])
@pytest.mark.parametrize("flush_cache", [True, False])
def test_who_was_aborted_in_a_pause_ends_before_they_are_taken(
    normal: bool, mode: PauseMode, flush_cache: bool
) -> None:
    """The abort and the question come in one drain, and the weights are there at once."""
    rig, loading = rig_with(normal)
    loading.ready = True
    for rid in ("a", "b"):
        rig.submit(range(30), 12, rid=rid)
    rig.until_true(lambda: rig.state.num_running == 2)
    pause(rig, mode)
    rig.abort(abort_all=True)
    update(rig, flush_cache=flush_cache)
    reply = answered(rig)
    assert isinstance(reply, UpdateWeightFromDiskReqOutput) and reply.success, reply
    assert reply.progress == {} and loading.installed == [0]
    assert [rig.answers[rid].reason for rid in ("a", "b")] == ["abort", "abort"]
    go_on(rig)
    rig.run()
    rig.check_empty()


@loops
def test_who_was_not_aborted_still_holds_the_cache(normal: bool) -> None:
    rig, loading = rig_with(normal)
    loading.ready = True
    for rid in ("a", "b"):
        rig.submit(range(30), 12, rid=rid)
    rig.until_true(lambda: rig.state.num_running == 2)
    pause(rig, "in_place")
    rig.abort("a")
    update(rig)
    reply = answered(rig)
    assert isinstance(reply, UpdateWeightFromDiskReqOutput) and not reply.success
    assert "1 paused requests hold KV" in reply.message


@loops
def test_after_a_retraction_the_cache_is_flushed_and_everybody_goes_on(normal: bool) -> None:
    rig, loading = rig_with(normal)
    loading.ready = True
    rig.submit(range(30), 12, rid="a")
    rig.until_true(lambda: rig.state.forward_ct > 3)
    pause(rig, "retract")
    update(rig)
    reply = answered(rig)
    assert isinstance(reply, UpdateWeightFromDiskReqOutput) and reply.success and loading.installed == [1]
    assert rig.state.cache.ledger().free == rig.state.cache.total
    go_on(rig)
    rig.run()
    assert rig.answers["a"].reason == "length" and len(rig.answers["a"].output_ids) == 12


def test_what_loading_raises_is_the_answer_and_the_next_one_may_begin() -> None:
    rig, loading = rig_with()
    loading.ready, loading.error = True, BadRequest("no such tensor")
    update(rig)
    reply = answered(rig)
    assert isinstance(reply, UpdateWeightFromDiskReqOutput)
    assert (reply.success, reply.message, reply.status) == (False, "no such tensor", 400)
    loading.error = ValueError("odd")
    update(rig)
    reply = answered(rig)
    assert isinstance(reply, UpdateWeightFromDiskReqOutput)
    assert (reply.message, reply.status) == ("loading failed: ValueError: odd", 500)
    assert not rig.bodies(WeightsUpdated)


def test_one_at_a_time() -> None:
    rig, _ = rig_with()
    update(rig, name="first")
    update(rig, name="second")
    reply = answered(rig)
    assert (
        isinstance(reply, UpdateWeightFromDiskReqOutput)
        and reply.id == "second"
        and "already" in reply.message
    )


# ---------------------------------------------------------------- profiles


def start(name: str, folder: Path, **options: object) -> StartProfileReqInput:
    return StartProfileReqInput(id=name, output_dir=str(folder), profile_id=name, **options)  # type: ignore[arg-type]


def test_a_profile_ends_by_itself_or_when_it_is_told_to(tmp_path: Path) -> None:
    rig = Rig()
    device = rig.scheduler.worker
    begun = asked(rig, start("steps", tmp_path, num_steps=2))
    assert isinstance(begun, ProfileReqOutput) and begun.success
    path = Path(begun.path)
    again = asked(rig, start("second", tmp_path))
    assert isinstance(again, ProfileReqOutput) and not again.success and str(path) in again.message
    assert rig.scheduler.worker is not device and not path.exists()
    rig.submit(range(10), 8)
    rig.run()
    assert path.exists() and rig.scheduler.worker is device
    late = asked(rig, StopProfileReqInput(id="s"))
    assert isinstance(late, ProfileReqOutput) and not late.success and str(path) in late.message
    open_end = asked(rig, start("open", tmp_path))
    stopped = asked(rig, StopProfileReqInput(id="s"))
    assert isinstance(open_end, ProfileReqOutput) and isinstance(stopped, ProfileReqOutput)
    assert stopped.success and stopped.path == open_end.path and Path(stopped.path).exists()
    assert rig.bodies(ProfileStarted) == [
        ProfileStarted(path=str(path), num_steps=2), ProfileStarted(path=stopped.path),
    ]  # fmt: skip
    assert rig.bodies(ProfileEnded) == [ProfileEnded(path=str(path)), ProfileEnded(path=stopped.path)]


def test_a_folder_that_can_be_none_is_refused(tmp_path: Path) -> None:
    rig = Rig()
    reply = asked(rig, start("p", Path(f"{tmp_path}/a\0b")))
    assert isinstance(reply, ProfileReqOutput) and not reply.success and "output_dir" in reply.message


def test_two_schedulers_of_one_process_profile_one_after_the_other(tmp_path: Path) -> None:
    rigs = (Rig(), Rig())
    first, second = (asked(rig, start(f"p{i}", tmp_path)) for i, rig in enumerate(rigs))
    assert isinstance(first, ProfileReqOutput) and isinstance(second, ProfileReqOutput)
    assert (
        first.success and not second.success and (second.status, first.path in second.message) == (400, True)
    )
    refused = asked(rigs[1], StopProfileReqInput(id="s"))
    assert isinstance(refused, ProfileReqOutput) and not refused.success
    for rig in rigs:
        rig.submit([1, 2], 3)
        rig.run()
    assert (
        isinstance(stopped := asked(rigs[0], StopProfileReqInput(id="s")), ProfileReqOutput)
        and stopped.success
    )
    again = asked(rigs[1], start("again", tmp_path))
    assert isinstance(again, ProfileReqOutput) and again.success
    rigs[1].scheduler.control.close()
    assert Path(again.path).exists() and Path(first.path).exists()


def test_what_torch_raises_is_the_answer_and_the_loop_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: object) -> None:
        raise RuntimeError("no profiler today")

    rig = Rig()
    with monkeypatch.context() as patch:
        patch.setattr("torch.profiler.profile.start", broken)
        refused = asked(rig, start("bad", tmp_path))
    assert isinstance(refused, ProfileReqOutput) and not refused.success
    assert refused.status == 500 and "no profiler today" in refused.message
    assert not rig.bodies(ProfileStarted)
    begun = asked(rig, start("good", tmp_path))  # nobody has it
    assert isinstance(begun, ProfileReqOutput) and begun.success
    rig.scheduler.control.close()


def test_a_profile_under_way_is_written_when_the_scheduler_ends(tmp_path: Path) -> None:
    rig = Rig()
    begun = asked(rig, start("last", tmp_path))
    assert isinstance(begun, ProfileReqOutput)
    rig.scheduler.control.close()
    assert Path(begun.path).exists()


# ---------------------------------------------------------------- slowness and load


def test_forwards_wait_until_they_are_told_not_to(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(watchdog_timeout=10)
    for bad in (5.5, -0.1):
        refused = asked(rig, SlowDownReqInput(id="x", forward_sleep_time=bad))
        assert (
            isinstance(refused, ControlReqOutput)
            and not refused.success
            and "between 0 and 5" in refused.message
        )
    slept: list[float] = []
    monkeypatch.setattr("sgviz.worker.steps.time.sleep", slept.append)
    asked(rig, SlowDownReqInput(id="x", forward_sleep_time=0.25))
    assert isinstance(rig.scheduler.worker, SlowWorker)
    rig.submit([1, 2], 3)
    rig.run()
    assert slept == [0.25] * rig.state.forward_ct
    asked(rig, SlowDownReqInput(id="x"))
    rig.submit([1, 2], 3)
    rig.run()
    assert len(slept) < rig.state.forward_ct
    assert rig.bodies(ForwardsSlowed) == [ForwardsSlowed(sleep_s=0.25), ForwardsSlowed(sleep_s=0.0)]


def load(rig: Rig) -> Load:
    reply = asked(rig, GetLoadsReqInput(id="l"))
    assert isinstance(reply, GetLoadsReqOutput)
    return reply.load


@loops
def test_the_load_is_that_of_the_books(normal: bool) -> None:
    rig = Rig(disable_overlap_schedule=normal, max_running_requests=2)
    assert load(rig) == Load(max_total_num_tokens=512, max_running_requests=2)
    for number in range(3):
        rig.submit(range(20), 20, rid=f"r{number}")
    rig.until_true(lambda: rig.state.num_running == 2)
    found, ledger = load(rig), rig.state.cache.ledger()
    assert (found.num_running_reqs, found.num_waiting_reqs, found.utilization) == (2, 1, 1.0)
    assert found.num_used_tokens == ledger.protected + ledger.private
    assert found.num_total_tokens == found.num_used_tokens + 20
    assert 0 < found.token_usage == found.num_used_tokens / 512
    rig.run()
    found = load(rig)
    made = sum(len(answer.output_ids) for answer in rig.answers.values())
    assert rig.state.generated_ct == made and found.gen_throughput > 0
    assert found.cache_hit_rate == sum(answer.cached_tokens for answer in rig.answers.values()) / 60
    rig.until(Stop.IDLE)
    assert (found.num_running_reqs, found.num_waiting_reqs, found.num_used_tokens) == (0, 0, 0)
