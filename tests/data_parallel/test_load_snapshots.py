"""Snapshots in a file in memory: nobody reads half of one, whoever writes meanwhile."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sgviz.data_parallel.load_snapshots import SLOT_BYTES, SnapshotFile, SnapshotList
from sgviz.messages.parallel import LoadSnapshot

WRITER = """
import sys
from sgviz.data_parallel.load_snapshots import SnapshotFile
from sgviz.messages.parallel import LoadSnapshot
file, rank = SnapshotFile(sys.argv[1]), int(sys.argv[2])
for n in range(1, int(sys.argv[3]) + 1):
    k = n if n % 2 else n << 40
    file.put(LoadSnapshot(timestamp=n, dp_rank=rank, num_running_reqs=k, num_used_tokens=k, num_total_tokens=k))
"""


@pytest.fixture(params=["file", "list"])
def board(request: pytest.FixtureRequest, tmp_path: Path) -> SnapshotFile | SnapshotList:
    return SnapshotFile.create(str(tmp_path / "loads"), 3) if request.param == "file" else SnapshotList(3)


def test_each_rank_has_a_slot(board: SnapshotFile | SnapshotList) -> None:
    assert [board.read(rank) for rank in range(3)] == [None] * 3
    for stamp in (1, 2):
        for rank in (2, 0):
            board.put(
                LoadSnapshot(
                    timestamp=stamp, dp_rank=rank, num_used_tokens=stamp * 10 + rank, token_usage=0.5
                )
            )
    assert board.read(1) is None
    for rank in (0, 2):
        assert board.read(rank) == LoadSnapshot(
            timestamp=2, dp_rank=rank, num_used_tokens=20 + rank, token_usage=0.5
        )
    board.close()


def test_two_views_of_a_file_are_one(tmp_path: Path) -> None:
    path = tmp_path / "loads"
    first = SnapshotFile.create(str(path), 2)
    second = SnapshotFile(str(path))
    assert path.stat().st_size == 2 * SLOT_BYTES
    first.put(LoadSnapshot(timestamp=5, dp_rank=1))
    assert second.read(1) == LoadSnapshot(timestamp=5, dp_rank=1)


def test_a_writer_that_died_while_it_wrote_leaves_none_and_its_slot_can_be_used_again(tmp_path: Path) -> None:
    file = SnapshotFile.create(str(tmp_path / "loads"), 1)
    file.put(LoadSnapshot(timestamp=1, dp_rank=0))
    file._map[0] += 1  # the sequence is odd
    assert file.read(0) is None
    file.put(LoadSnapshot(timestamp=2, dp_rank=0))
    assert file.read(0) == LoadSnapshot(timestamp=2, dp_rank=0)
    file._map[30] ^= 0xFF  # half of another one
    assert file.read(0) is None


def test_reads_beside_writers_are_whole_and_never_go_back(tmp_path: Path) -> None:
    """Two processes write as fast as they can, snapshots of two lengths; all that is read was written once."""
    path, most = str(tmp_path / "loads"), 20_000
    file = SnapshotFile.create(path, 2)
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, path, str(rank), str(most)]) for rank in range(2)
    ]
    stamps, read = [0, 0], 0
    while any(writer.poll() is None for writer in writers):
        for rank in range(2):
            if (seen := file.read(rank)) is not None:
                wanted = seen.timestamp if seen.timestamp % 2 else seen.timestamp << 40
                assert seen.dp_rank == rank
                assert seen.num_running_reqs == seen.num_used_tokens == seen.num_total_tokens == wanted
                assert seen.timestamp >= stamps[rank]
                stamps[rank], read = seen.timestamp, read + 1
    assert [writer.returncode for writer in writers] == [0, 0] and read
    assert [file.read(rank).timestamp for rank in range(2)] == [most, most]
