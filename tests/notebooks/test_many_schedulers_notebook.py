"""The notebook on many schedulers: executed, its sentences are its numbers, and both ways did the same work."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from notebook_runner import execute

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks/10_many_schedulers.ipynb"
FACTS = """{
    "requests": policies.rank_loads.requests.unstack("dp_rank").T.to_dict("list"),
    "tokens": tokens.T.to_dict("list"), "imbalance": policies.table.imbalance.to_dict(),
    "fewest": [int((taken == least).sum()), len(choices)],
    "controller": [part.detail for part in rec.explain(long.rid).parts if part.cause == "controller"],
    "long rank": int(long.dp_rank),
    "types": [step.type for step in steps], "t_ms": [step.t_ms for step in steps],
    "gaps": gaps, "unexplained": explanation.unexplained_ns, "sides": sorted({part.side for part in parts}),
    "bytes": [float(row.transfer_bytes), int(row.prompt_tokens)],
    "same": same, "sent": len(talk.requests), "span": talk.span_s, "prompt tokens": talk.input_tokens,
    "table": trade.table.to_dict("index"), "moved": float(moved.transfer_bytes.sum()),
    "devices": {" ".join(key): row for key, row in trade.devices.to_dict("index").items()},
    "balanced": [bool(each.audit().balanced) for each in (both, split, ranks, *policies.recordings.values())],
    "dropped": sum(each.dropped for each in (split.prefill, split.decode, ranks)),
}"""
TOKEN_BYTES = 131_072  # of llama-3-8b
pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> tuple[nbformat.NotebookNode, dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SGVIZ_TRACE", raising=False)
        return execute(NOTEBOOK, FACTS, tmp_path_factory.mktemp("notebook"))


@pytest.fixture(scope="module")
def facts(executed: tuple[nbformat.NotebookNode, dict[str, Any]]) -> dict[str, Any]:
    return executed[1]


@pytest.fixture(scope="module")
def text(executed: tuple[nbformat.NotebookNode, dict[str, Any]]) -> str:
    cells = [cell for cell in executed[0].cells if cell.cell_type == "code"]
    return "".join(output.get("text", "") for cell in cells for output in cell.outputs)


def test_a_turn_each_and_whoever_has_the_fewest_tokens(facts: dict[str, Any]) -> None:
    assert facts["requests"]["round_robin"] == [30, 30, 30, 30]
    assert facts["fewest"][0] == facts["fewest"][1] == 120
    for name, tokens in facts["tokens"].items():
        assert facts["imbalance"][name] == pytest.approx(max(tokens) / (sum(tokens) / 4))
    sums = {sum(tokens) for tokens in facts["tokens"].values()}
    assert len(sums) == 1 and sums.pop() > 0


def test_why_that_rank_is_said(facts: dict[str, Any]) -> None:
    (said,) = facts["controller"]
    assert said.startswith(f"rank {facts['long rank']} by total_tokens")
    assert all(f"rank {rank}: " in said for rank in range(4))


def test_one_request_goes_over_both_without_a_gap(facts: dict[str, Any]) -> None:
    assert facts["t_ms"][0] == 0 and facts["t_ms"] == sorted(facts["t_ms"])
    types = facts["types"]
    assert types.count("KV transfer") == 1 and types.count("GenerateReqInput") == 2
    assert types.index("KVReceiver") < types.index("GenerationBatchResult") < types.index("KV transfer")
    assert set(facts["gaps"]) == {0} and facts["unexplained"] == 0
    assert facts["sides"] == ["decode", "prefill", "transfer"]
    assert facts["bytes"][0] == facts["bytes"][1] * TOKEN_BYTES


def test_both_ways_did_the_same_work(facts: dict[str, Any]) -> None:
    table, devices = facts["table"], facts["devices"]
    assert facts["same"] == facts["sent"] == 96 and 20 < facts["span"] < 40
    assert [row["completed"] for row in table.values()] == [96, 96]
    assert devices["pd 1 + 1 decode"]["prompt_tokens"] == 0
    assert devices["pd 1 + 1 prefill"]["output_tokens"] == facts["sent"]
    assert facts["moved"] == facts["prompt tokens"] * TOKEN_BYTES
    assert all(facts["balanced"]) and facts["dropped"] == 0


def test_the_sentences_are_the_numbers(facts: dict[str, Any], text: str) -> None:
    one, two = facts["table"]["dp 2"], facts["table"]["pd 1 + 1"]
    found = re.search(r"The first token takes ([\d.,]+) ms with the pair, ([\d.,]+) ms with two ranks", text)
    assert found is not None
    assert found.groups() == (f"{two['p50_ttft_ms']:,.1f}", f"{one['p50_ttft_ms']:,.1f}")
    found = re.search(
        r"Between two tokens.*?at p99 ([\d.,]+) ms with the pair, ([\d.,]+) ms .*?\(\d+% (\w+)\)", text
    )
    assert found is not None
    shorter = two["p99_itl_ms"] < one["p99_itl_ms"]
    assert found.groups() == (
        f"{two['p99_itl_ms']:,.1f}", f"{one['p99_itl_ms']:,.1f}", "shorter" if shorter else "longer",
    )  # fmt: skip
    assert "96 of 96 answers have the same token ids" in text and "SIMULATED" in text


def test_its_pictures(executed: tuple[nbformat.NotebookNode, dict[str, Any]]) -> None:
    cells = [cell for cell in executed[0].cells if cell.cell_type == "code"]
    kinds = [kind for cell in cells for output in cell.outputs for kind in output.get("data", {})]
    assert kinds.count("image/png") == 5
