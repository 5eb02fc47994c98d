"""The KV of a real model in another worker's pool, at other slots and pages: the next token is the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hand_driver import HandDriver, make_req

from sgviz.model.fetch import resolve_model
from sgviz.model.model_config import load_config
from sgviz.worker.tp_worker import TpModelWorker

PROMPT = list(range(10, 43))


@pytest.mark.parametrize("pages", [(1, 16), (16, 1)])
def test_the_answer_goes_on_in_another_worker(pages: tuple[int, int]) -> None:
    workers = [TpModelWorker("tiny-llama", page_size=page, max_total_tokens=512) for page in pages]
    first, second = (HandDriver(worker, page_size=page) for worker, page in zip(workers, pages))
    wanted = make_req("a", PROMPT, temperature=0.0)
    first.generate([wanted], 1)
    slots = first.cache.row_slots(wanted)[: len(PROMPT)].copy()

    # the other worker computes something else in the pages, which the transfer overwrites
    other = make_req("b", [each + 5 for each in PROMPT], temperature=0.0)
    second.generate([make_req("c", [7] * 20)], 1)
    second.generate([other], 1)
    place = second.cache.row_slots(other)[: len(PROMPT)].copy()
    data = memoryview(bytearray(len(PROMPT) * workers[0].kv_layout.wire_bytes))
    workers[0].read_kv(slots, data).result()
    workers[1].write_kv(place, data).result()
    workers[1].prime([other.kv.req_pool_idx], [wanted.output_ids[0]])
    other.output_ids[:] = wanted.output_ids
    for a, b in zip(workers[0].runner.kv_pool.layers, workers[1].runner.kv_pool.layers):
        assert np.array_equal(a[:, :, slots].float().numpy(), b[:, :, place].float().numpy())
    for _ in range(5):
        first.step(first.decode([wanted]))
        second.step(second.decode([other]))
    assert other.output_ids == wanted.output_ids
    for worker in workers:
        worker.close()


def test_kv_of_another_model_is_known_by_its_tag(tmp_path: Path) -> None:
    """The three tiny models have KV of one shape; a copy of one under another name has the same KV."""
    folders = [resolve_model(name) for name in ("tiny-llama", "tiny-qwen2", "tiny-qwen3")]
    copy = Path(shutil.copytree(folders[0], tmp_path / "renamed"))
    marks = [load_config(folder).mark for folder in [*folders, copy]]
    assert len(set(marks)) == 3 and marks[3] == marks[0]
    config = json.loads((copy / "config.json").read_text())
    for change in ({"rope_theta": 5.0e5}, {"rms_norm_eps": 0.1}, {"vocab_size": 313}):
        (copy / "config.json").write_text(json.dumps({**config, "rope_parameters": None, **change}))
        assert load_config(copy).mark != marks[0], change
    workers = [TpModelWorker(name, max_total_tokens=64) for name in ("tiny-llama", "tiny-qwen2")]
    assert (
        workers[0].kv_layout.tag.startswith("LlamaForCausalLM-")
        and workers[0].kv_layout != workers[1].kv_layout
    )
    for worker in workers:
        worker.close()
