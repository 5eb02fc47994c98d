"""Segments in shared memory: who sees them, and that no process leaves one, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kv_pair import Pair

from sgviz.disaggregation import shared_memory
from sgviz.errors import SgvizError

OWNER = """
import sys
from sgviz.disaggregation import shared_memory
name, memory = shared_memory.create(1 << 16)
token = shared_memory.write_token("x")
print(name, token, flush=True)
sys.stdin.read()
"""


def mine() -> list[Path]:
    return list(shared_memory.FOLDER.glob(f"{shared_memory.PREFIX}{os.getpid()}-*"))


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    yield
    assert not mine()


def test_a_segment_is_seen_by_who_knows_its_name_and_outlives_it() -> None:
    name, memory = shared_memory.create(4096)
    other = shared_memory.attach(name)
    shared_memory.unlink(name)
    memory[7] = 42
    assert other[7] == 42 and len(other) == 4096 and not mine()
    with pytest.raises(SgvizError, match="cannot be opened"):
        shared_memory.attach(name)


@pytest.mark.parametrize("name", ["passwd", "../../etc/passwd", "sgviz-kv-../x"])
def test_only_segments_of_kv_are_opened(name: str) -> None:
    with pytest.raises(SgvizError, match="no segment of KV"):
        shared_memory.attach(name)
    assert not shared_memory.same_memory(shared_memory.boot_id(), name, "x")


def test_no_room_is_an_error_that_leaves_nothing() -> None:
    with pytest.raises(SgvizError, match=f"has no {1 << 60} bytes"):
        shared_memory.create(1 << 60)


def test_the_same_memory_is_known_by_what_is_in_it() -> None:
    name = shared_memory.write_token("token")
    boot = shared_memory.boot_id()
    assert shared_memory.same_memory(boot, name, "token")
    assert not shared_memory.same_memory(boot, name, "another")
    assert not shared_memory.same_memory("another kernel", name, "token")
    assert not shared_memory.same_memory(boot, f"{name}0", "token")
    shared_memory.unlink(name)


def test_a_sweep_takes_only_what_it_knows_to_be_left() -> None:
    started, here = shared_memory._started(os.getpid()), shared_memory._namespace()
    left = [f"{os.getpid()}-1-{here}-a"]  # of a process that had our number before us
    kept = [
        f"{os.getpid()}-{started}-{here}-b",
        f"{os.getpid()}-1-77-c",
        f"{os.getpid()}-",
        f"{os.getpid()}-x",
    ]
    for name in left + kept:
        (shared_memory.FOLDER / f"{shared_memory.PREFIX}{name}").touch()
    try:
        assert shared_memory.sweep() >= len(left)
        assert {path.name.removeprefix(shared_memory.PREFIX) for path in mine()} == set(kept)
    finally:
        for path in mine():
            path.unlink()


@pytest.mark.slow
def test_the_next_start_removes_what_a_killed_process_left() -> None:
    owners = [
        subprocess.Popen(
            [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    try:
        names = [
            [shared_memory.FOLDER / name for name in owner.stdout.readline().split()] for owner in owners
        ]  # type: ignore[union-attr]
        assert all(path.exists() for pair in names for path in pair)
        owners[0].send_signal(signal.SIGKILL)
        owners[0].wait(30)
        pair = Pair()  # the next start of a prefill server
        try:
            assert not any(path.exists() for path in names[0])
            assert all(path.exists() for path in names[1])  # that one lives
        finally:
            pair.close()
    finally:
        for owner in owners:
            owner.kill()
            owner.wait(30)
            for stream in (owner.stdin, owner.stdout):
                assert stream is not None
                stream.close()
        shared_memory.sweep()
    assert not any(path.exists() for pair in names for path in pair)
