"""Minutes of mixed random traffic on a real server: memory stays, the books balance, and nothing goes wrong.

`SGVIZ_SOAK_S` sets the length of the long run (600 s), `SGVIZ_SOAK_SEED` its traffic.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from pathlib import Path

import pytest
from load_tools import open_files, processes_of, resident_mib, until_empty
from server_process import ServerProcess
from traffic import Client, available, drive

from sgviz.recording import load

CLIENTS = 6
SEED = int(os.environ.get("SGVIZ_SOAK_SEED", "1"))
LONG_S = float(os.environ.get("SGVIZ_SOAK_S", "600"))
SHORT_S = 30.0
# small enough that what is meant to fill up, fills up in the warm-up
FLAGS = (
    "--event-capacity", "5000", "--max-total-tokens", "8192", "--max-running-requests", "16", "--tool-call-parser",
    "qwen25",
)  # fmt: skip
WARM_UP_SHARE = 0.25
MEMORY_SHARE = 0.03
SHORT_SHARE = 0.08  # a short run ends before the allocator has found its level
SLACK_MIB = 3.0


async def traffic(server: ServerProcess, seconds: float) -> Counter[str]:
    """So much of it; what was asked, by kind."""
    clients = [Client(server.url, SEED * 100 + number) for number in range(CLIENTS)]
    kinds = await available(clients[0])
    until = asyncio.get_running_loop().time() + seconds
    await asyncio.gather(*(drive(client, kinds, until) for client in clients))
    await until_empty(server.url)
    return sum((client.counts for client in clients), Counter())


def check_memory(before: dict[str, float], after: dict[str, float], share: float) -> None:
    for name, had in before.items():
        assert after[name] <= had + max(share * had, SLACK_MIB), f"{name}: {had:.1f} -> {after[name]:.1f} MiB"
    assert sum(after.values()) <= (1 + share) * sum(before.values()), (before, after)


def check_recording(path: Path, asked: int) -> None:
    rec = load(path)
    report = rec.audit()
    assert report.balanced and rec.dropped == 0 and not rec.truncated, str(report)
    assert len(rec.rids) > asked / 2, "refused ones are not in it, samples and prompts are"
    ends = Counter(rec.requests.finish_reason)
    print(f"{len(rec.rids)} requests recorded, ended by {dict(ends)}")


@pytest.mark.timeout(LONG_S + 600)
@pytest.mark.parametrize(
    ("seconds", "share"),
    [
        pytest.param(SHORT_S, SHORT_SHARE, marks=pytest.mark.slow, id="short"),
        pytest.param(LONG_S, MEMORY_SHARE, marks=pytest.mark.long, id="long"),
    ],
)
def test_mixed_traffic_leaves_nothing_behind(seconds: float, share: float, tmp_path: Path) -> None:
    path = tmp_path / "soak.sgv"
    with ServerProcess(*FLAGS, "--record", str(path)) as server:
        processes = processes_of(server)
        asyncio.run(traffic(server, WARM_UP_SHARE * seconds))
        before, files = resident_mib(processes), open_files(processes)
        counts = asyncio.run(traffic(server, (1 - WARM_UP_SHARE) * seconds))
        after = resident_mib(processes)
        print(f"{sum(counts.values())} requests: {dict(counts)}")
        print({name: f"{before[name]:.1f} -> {after[name]:.1f} MiB" for name in after})
        check_memory(before, after, share)
        assert all(now <= files[name] + 2 for name, now in open_files(processes).items()), (
            "no connection is left open"
        )
        server.signal(signal.SIGTERM)
        assert server.wait(60) == 0 and server.leftovers() == []
        errors = [line for line in server.text().splitlines() if " ERROR " in line or " CRITICAL " in line]
        assert errors == [] and "Traceback" not in server.text()
    check_recording(path, sum(counts.values()))
