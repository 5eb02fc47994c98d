"""The notebooks on the prefix cache, chunks and retraction, and policies: executed, and what they say is so."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from notebook_runner import execute

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
CACHE_FACTS = """{
    "cached": rec.requests.cached_tokens.astype(int).tolist(), "details": splits.detail.tolist(),
    "prompts": rec.requests.prompt_tokens.astype(int).tolist(),
    "locks": [[each.locks, len(each.owners)] for each in during.tree], "left": [each.locks for each in after.tree],
    "during": [during.protected, during.evictable], "after": [after.protected, after.evictable, after.private_total],
    "tree": sum(each.tokens for each in after.tree),
    "protected": sum(each.tokens for each in during.tree if each.locks),
    "small": dict(zip(small.requests.rid, small.requests.cached_tokens.astype(int).tolist())),
    "evicted": evictions.text.tolist(), "locked": evictions.lock_ref.tolist(), "ages": evictions.last_access.tolist(),
    "prefill": {name: int(tokens) for name, tokens in prefill.items()}, "same": bool(same.all()),
    "total": {name: int(prefill[name] + cached[name]) for name in found.names},
    "keys": keys.requests.cached_tokens.astype(int).tolist(),
    "balanced": all(each.audit().balanced for each in (rec, both, small, keys)),
}"""
CHUNK_FACTS = """{
    "gap": felt(found)["longest gap of a writer, ms"].to_dict(), "same": bool(same.all()),
    "causes": {name: {str(cause): ns for cause, ns in each.explain("writer0").by_cause().items()}
               for name, each in found.recordings.items()},
    "sizes": felt(sizes).to_dict("list"), "ids": ids["whole"] == ids["chunks"] == ids["mixed"], "pieces": int(cut),
    "need": retractions.need.tolist(), "have": retractions.have.tolist(), "written": retractions.written.tolist(),
    "ratios": retractions[["ratio before", "ratio after"]].to_numpy().tolist(), "chosen": bool(chosen.all()),
    "rids": retractions.rid.tolist(), "counted": int(rec.requests.retractions.sum()), "victim": victim,
    "parts": [[str(part.cause), part.detail] for part in explanation.parts
              if part.cause in ("retraction", "recompute")],
    "again": [int(last.prefix_len), int(last.extend_len), int(whole)], "text": pressed == roomy,
    "balanced": rec.audit().balanced, "length": [len(each[0]) for each in roomy.values()],
}"""
POLICY_FACTS = """{
    "order": [int(rid.split()[0]) for rid in admitted], "e2e": found.table.median_e2e_latency_ms.to_dict(),
    "ttft": found.table.median_ttft_ms.to_dict(), "same": bool(found.requests.same_output.all()),
    "mine": [int(((change := found.requests["e2e_ms"]["mine"] - found.requests["e2e_ms"]["fcfs"]) < 0).sum()),
             int((change > 0).sum()), len(change)],
    "paying": [float(prompts[paying.index].mean()), float(prompts.mean())], "causes": paying.cause.tolist(),
    "loser": {str(cause): ns for cause, ns in found.recordings["mine"].explain(loser).by_cause().items()},
    "tried": tried.table.median_e2e_latency_ms.to_dict(), "waits": tried.requests["queue_ms"].max().to_dict(),
    "faults": len(faults), "answered": int(answered), "taken": taken.astype(int).tolist(), "lengths": LENGTHS,
}"""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@dataclass(frozen=True)
class Executed:
    """What a notebook printed, how many pictures it drew, and its numbers."""

    text: str
    pictures: int
    facts: dict[str, Any]


def run(name: str, facts: str, folder: Path) -> Executed:
    """Execute it; nothing may go to standard error."""
    notebook, found = execute(NOTEBOOKS / name, facts, folder)
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in outputs if output.get("name") == "stderr"]
    text = "".join(output.get("text", "") for output in outputs)
    return Executed(text, sum("image/png" in output.get("data", {}) for output in outputs), found)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Executed:
    return run("07_radix_cache.ipynb", CACHE_FACTS, tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def chunks(tmp_path_factory: pytest.TempPathFactory) -> Executed:
    return run("08_chunked_prefill_and_retraction.ipynb", CHUNK_FACTS, tmp_path_factory.mktemp("chunks"))


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Executed:
    return run("09_write_your_own_policy.ipynb", POLICY_FACTS, tmp_path_factory.mktemp("policy"))


# ---------------------------------------------------------------- the prefix cache


def test_later_questions_are_found_as_far_as_a_node_was_cut_for_them(cache: Executed) -> None:
    facts = cache.facts
    first, second = (int(detail.rpartition("at=")[2]) for detail in facts["details"])
    assert facts["cached"] == [0, first, second] and 0 < second < first < facts["prompts"][1]
    assert cache.pictures == 7 and facts["balanced"]


def test_nodes_are_locked_once_by_each_owner_and_evictable_afterwards(cache: Executed) -> None:
    facts = cache.facts
    assert all(locks == owners for locks, owners in facts["locks"])
    assert {locks for locks, _ in facts["locks"]} == {1, 2} and set(facts["left"]) == {0}
    assert facts["during"][0] == facts["protected"] and facts["after"] == [0, facts["tree"], 0]


def test_the_least_recently_used_goes_first_and_never_a_locked_one(cache: Executed) -> None:
    facts, small = cache.facts, cache.facts["small"]
    assert set(facts["locked"]) == {0} and facts["ages"] == sorted(facts["ages"])
    assert any("Baltic" in text for text in facts["evicted"])
    assert not any("Alps" in text for text in facts["evicted"])  # older, but asked about meanwhile
    assert small["6 Baltic"] == 0 < small["5 Alps"] == small["3 Alps"]


def test_fewer_tokens_are_computed_for_the_same_answers(cache: Executed) -> None:
    facts, prefill = cache.facts, cache.facts["prefill"]
    assert facts["total"]["cache"] == facts["total"]["no cache"] == prefill["no cache"]
    saved = 1 - prefill["cache"] / prefill["no cache"]
    assert facts["same"] and saved > 0.5 and f"{saved:.0%} less to compute" in cache.text


def test_another_key_finds_nothing(cache: Executed) -> None:
    assert cache.facts["keys"] == [0, 0, cache.facts["prompts"][0] - 1]


# ---------------------------------------------------------------- chunks and retraction


def test_mixed_batches_spare_the_writers_and_chunks_alone_do_not(chunks: Executed) -> None:
    gap, causes = chunks.facts["gap"], chunks.facts["causes"]
    assert gap["mixed"] < 0.2 * gap["whole"] < gap["whole"] < gap["chunks"]
    assert f"{gap['chunks'] / gap['whole']:.2f} times as long as for the whole" in chunks.text
    assert "stalled_by_prefill" not in causes["mixed"] and "decode_beside_prefill" not in causes["chunks"]
    assert causes["whole"]["stalled_by_prefill"] < causes["chunks"]["stalled_by_prefill"]
    assert chunks.pictures == 8 and "SIMULATED" in chunks.text


def test_smaller_chunks_are_shorter_steps_and_a_longer_wait_for_the_reader(chunks: Executed) -> None:
    writers, readers = list(chunks.facts["sizes"].values())[:2]
    assert writers == sorted(writers) and readers[0] == max(readers)


def test_pieces_give_the_ids_of_the_whole(chunks: Executed) -> None:
    assert chunks.facts["same"] and chunks.facts["ids"] and chunks.facts["pieces"] > 10


def test_who_has_written_least_is_retracted_when_the_next_step_does_not_fit(chunks: Executed) -> None:
    facts = chunks.facts
    assert facts["counted"] == len(facts["rids"]) > 0 and facts["chosen"]
    assert all(need > have for need, have in zip(facts["need"], facts["have"]))
    assert all(after > before for before, after in facts["ratios"])


def test_the_explanation_names_the_shortage_and_what_is_computed_again(chunks: Executed) -> None:
    facts = chunks.facts
    number, kinds = facts["rids"].index(facts["victim"]), [cause for cause, _ in facts["parts"]]
    assert kinds[0] == "retraction" and kinds[-1] == "recompute"
    words = f"({facts['need'][number]} KV tokens needed, {facts['have'][number]} to be had)"
    assert words in facts["parts"][0][1] and words in chunks.text
    prefix, extend, whole = facts["again"]
    assert prefix + extend == whole


def test_the_text_is_that_of_the_large_pool(chunks: Executed) -> None:
    assert chunks.facts["text"] and chunks.facts["balanced"] and chunks.facts["length"] == [150] * 8
    assert chunks.text.count("same ids and text as in the large pool: True") == 8


# ---------------------------------------------------------------- policies


def test_a_policy_of_ones_own_is_in_charge(policy: Executed) -> None:
    order = policy.facts["order"]
    assert sorted(order) == sorted(policy.facts["lengths"])
    assert order[2:] == sorted(order[2:])  # one or two may have been taken before all had come


def test_it_beats_fcfs_and_lpm_and_the_long_ones_pay(policy: Executed) -> None:
    facts, e2e, ttft = policy.facts, policy.facts["e2e"], policy.facts["ttft"]
    assert e2e["mine"] < e2e["lpm"] < e2e["fcfs"] and ttft["mine"] < ttft["lpm"] and facts["same"]
    quicker, slower, count = facts["mine"]
    assert quicker > slower > 0
    assert f"mine against fcfs: {quicker} of {count} quicker, {slower} slower" in policy.text
    assert facts["paying"][0] > facts["paying"][1] and set(facts["causes"]) == {"policy_order"}
    assert max(facts["loser"], key=lambda cause: facts["loser"][cause]) == "policy_order"
    assert policy.pictures == 2 and "SIMULATED" in policy.text


def test_the_more_waiting_counts_the_nearer_it_comes_to_fcfs(policy: Executed) -> None:
    tried, waits = policy.facts["tried"], policy.facts["waits"]
    medians = [tried[name] for name in ("mine", "100", "300", "3000", "fcfs")]
    assert medians == sorted(medians) and waits["mine"] > waits["300"]
    assert tried["mine"] == policy.facts["e2e"]["mine"]  # modelled: the same twice


def test_broken_policies_are_reported_and_the_engine_goes_on(policy: Executed) -> None:
    text, facts = policy.text, policy.facts
    assert facts["taken"] == facts["lengths"] and facts["faults"] > 0
    assert facts["answered"] == len(facts["lengths"]) == 8 and text.count("8 requests answered") == 2
    assert "raises: raised ZeroDivisionError" in text and re.search(r"drops: dropped '\d+ tokens'", text)
    assert "is a class; give an object of it" in text and "did you mean 'fcfs'?" in text
