"""Two servers of two ranks each and a router, as real processes: the ids of one engine, and files that are one run."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "router"))
from pair_processes import RouterProcess, ServerProcess, side

import sgviz
from sgviz.engine import Engine

pytestmark = pytest.mark.slow
GREEDY = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
ASKED = [[(31 * i + 5 * k) % 250 + 3 for k in range(1 + 14 * i)] for i in range(8)]
RANKS = ("--dp-size", "2", "--disaggregation-checksum", "--chunked-prefill-size", "32")


class Running(NamedTuple):
    prefill: ServerProcess
    decode: ServerProcess
    router: RouterProcess
    folder: Path


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    with Engine(
        "tiny-llama", device="cpu", dtype="float32", torch_threads=1, max_total_tokens=2048
    ) as engine:
        return [engine.generate(input_ids=ids, sampling_params=GREEDY)["output_ids"] for ids in ASKED]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("pair")
    with ExitStack() as stack:
        servers = [
            stack.enter_context(side(mode, *RANKS, *flags, "--record", str(folder / f"{mode}.sgv")))
            for mode, flags in (
                ("prefill", ("--page-size", "16")),
                ("decode", ("--page-size", "1", "--load-balance-method", "total_tokens")),
            )
        ]
        for server in servers:
            server.wait_ready()
        flags = (
            "--prefill",
            servers[0].url,
            "--decode",
            servers[1].url,
            "--record",
            str(folder / "router.sgv"),
        )
        router = stack.enter_context(RouterProcess(*flags))
        yield Running(*servers, router, folder)


def ask(
    router: RouterProcess, ids: list[int], headers: dict[str, str] | None = None, **body: Any
) -> dict[str, Any]:
    whole = {"input_ids": ids, "sampling_params": GREEDY, **body}
    response = httpx2.post(f"{router.url}/generate", json=whole, headers=headers, timeout=60.0)
    assert response.status_code == 200, response.text
    return dict(response.json())


def test_the_ids_are_those_of_one_engine(running: Running, plain: list[list[int]]) -> None:
    with ThreadPoolExecutor(len(ASKED)) as pool:
        answers = list(pool.map(lambda ids: ask(running.router, ids), ASKED))
    assert [answer["output_ids"] for answer in answers] == plain
    assert {answer["meta_info"]["dp_rank"] for answer in answers} == {0, 1}


def test_a_request_names_the_rank_of_either_side(running: Running, plain: list[list[int]]) -> None:
    for prefill, decode in ((1, 0), (0, 1)):
        header = {"X-Data-Parallel-Rank": str(decode)}
        for number in range(2):  # a room is as often odd as even
            rid = f"named-{prefill}-{decode}-{number}"
            answer = ask(running.router, ASKED[5], header, rid=rid, disagg_prefill_dp_rank=prefill)
            assert answer["output_ids"] == plain[5] and answer["meta_info"]["dp_rank"] == decode
    response = httpx2.post(
        f"{running.router.url}/generate", json={"text": "a", "disagg_prefill_dp_rank": 2}, timeout=60.0
    )
    assert response.status_code == 400 and "disagg_prefill_dp_rank" in response.text


def test_a_batch_and_a_stream_meet_too(running: Running, plain: list[list[int]]) -> None:
    body = {"input_ids": ASKED[:4], "sampling_params": GREEDY}
    answers = httpx2.post(f"{running.router.url}/generate", json=body, timeout=60.0).json()
    assert [answer["output_ids"] for answer in answers] == plain[:4]
    chunks: list[str] = []
    longer = {**GREEDY, "max_new_tokens": 400}  # on a busy machine a short answer may come as one
    body = {"input_ids": ASKED[6], "sampling_params": longer, "stream": True}
    with httpx2.stream("POST", f"{running.router.url}/generate", json=body, timeout=60.0) as response:
        chunks += [line for line in response.iter_lines() if line.startswith("data: {")]
    last = json.loads(chunks[-1].removeprefix("data: "))["output_ids"]
    assert len(chunks) > 1 and len(last) == 400 and last[:24] == plain[6]


def test_the_files_are_one_run(running: Running) -> None:
    """Last: it ends the servers."""
    assert running.router.stop() == 0
    for server in (running.decode, running.prefill):
        server.signal(signal.SIGTERM)
        assert server.wait(30.0) == 0, server.text()
    files = [running.folder / f"{name}.sgv" for name in ("prefill", "decode", "router")]
    run = sgviz.load_pair(*files)
    assert run.audit().balanced, str(run.audit())
    for rec in (run.prefill, run.decode):
        assert rec.ranks == (0, 1) and rec.check() == [] and not rec.missing
    table = run.requests.set_index("rid")
    assert set(table.prefill_rank) == set(table.decode_rank) == {0, 1} and (table.failed == "").all()
    named = table[table.index.str.startswith("named-")]
    assert len(named) == 4
    for rid, row in named.iterrows():
        assert str(rid).split("-")[1:3] == [str(row.prefill_rank), str(row.decode_rank)]
    followed = table.drop(named.index)
    assert (followed.prefill_rank == followed.room % 2).all()
    for rid in run.rids:
        explanation = run.explain(rid)
        assert explanation.unexplained_ns <= 0.01 * explanation.total_ns, explanation.text()
