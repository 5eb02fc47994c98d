"""A profile is a Chrome trace that can be loaded, of all threads, for as many forwards as were asked for."""

from __future__ import annotations

import gzip
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hand_driver import HandDriver, make_req

from sgviz.errors import BadRequest
from sgviz.worker.mock_worker import MockWorker
from sgviz.worker.profiler import DIR_VARIABLE, Profiler
from sgviz.worker.steps import WatchedWorker


def profiler(**options: Any) -> Profiler:
    plain = {
        "output_dir": None, "num_steps": None, "activities": None, "with_stack": False, "record_shapes": False,
        "profile_id": None,
    }  # fmt: skip
    return Profiler(**{**plain, **options})


def spans(path: Path) -> list[dict[str, Any]]:
    """The spans of a trace, as a viewer reads it."""
    with gzip.open(path) as file:
        trace = json.load(file)
    return [event for event in trace["traceEvents"] if event.get("ph") == "X"]


def test_threads_that_were_there_before_are_in_it_and_the_steps_are_counted(tmp_path: Path) -> None:
    go, done = threading.Event(), threading.Event()

    def work() -> None:
        go.wait(20)
        torch.ones(3) + 1
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    made = profiler(output_dir=str(tmp_path / "new" / "folder"), num_steps=3, profile_id="my-run")
    made.start()
    go.set()
    assert done.wait(20)
    driver = HandDriver(WatchedWorker(MockWorker(threaded=False), made.around))
    req = make_req("r", [1, 2, 3])
    driver.step(driver.extend([req]))
    assert not made.is_done
    for _ in range(4):
        driver.step(driver.decode([req]))
    assert made.is_done
    made.stop()
    thread.join()
    assert made.path == tmp_path / "new" / "folder" / "my-run-TP-0.trace.json.gz"
    assert [path.name for path in made.path.parent.iterdir()] == [made.path.name]
    found = spans(made.path)
    steps = [span["name"] for span in found if span["name"].startswith("launch #")]
    assert steps == ["launch #1 extend[1]", *(f"launch #{bid} decode[1]" for bid in range(2, 6))]
    assert len({span["tid"] for span in found if span["name"].startswith(("aten::add", "launch"))}) == 2


def test_without_a_folder_it_is_the_one_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DIR_VARIABLE, str(tmp_path))
    assert profiler().path.parent == tmp_path


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"profile_id": "../up"}, "profile_id"),
        ({"profile_id": ""}, "profile_id"),
        ({"profile_id": ".hidden"}, "profile_id"),
        ({"output_dir": "/proc/nowhere"}, "output_dir"),
    ],
)
def test_what_cannot_be_is_named(options: dict[str, str], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        profiler(**options)
    assert caught.value.param == param


def test_a_gpu_that_is_not_there_cannot_be_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BadRequest, match="torch finds none here") as caught:
        profiler(activities=["CPU", "GPU"])
    assert caught.value.param == "activities"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("activities", [None, ["GPU"]])
def test_the_kernels_of_a_gpu_are_in_it(tmp_path: Path, activities: list[str] | None) -> None:
    made = profiler(output_dir=str(tmp_path), activities=activities)
    made.start()
    torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")
    torch.cuda.synchronize()
    made.stop()
    found = spans(made.path)
    assert any(span.get("cat") == "kernel" for span in found)
    assert any(span.get("cat") == "cpu_op" for span in found) == (activities is None)


def test_a_second_one_is_refused_in_any_thread_until_the_first_has_ended(tmp_path: Path) -> None:
    """torch itself starts it, and then the process dies."""
    first, second = (profiler(output_dir=str(tmp_path), profile_id=name) for name in ("first", "second"))
    first.start()
    with ThreadPoolExecutor(1) as elsewhere, pytest.raises(BadRequest) as caught:
        elsewhere.submit(second.start).result()
    assert str(first.path) in caught.value.message
    first.stop()
    second.start()
    torch.ones(3) + 1
    second.stop()
    assert any(span["name"] == "aten::add" for span in spans(second.path)) and first.path.exists()


def test_one_that_cannot_be_written_lets_others_begin(tmp_path: Path) -> None:
    made = profiler(output_dir=str(tmp_path / "gone"))
    made.start()
    (tmp_path / "gone").rmdir()
    with pytest.raises((OSError, RuntimeError)):
        made.stop()
    after = profiler(output_dir=str(tmp_path))
    after.start()
    after.stop()
    assert after.path.exists()
