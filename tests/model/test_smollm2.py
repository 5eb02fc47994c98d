"""The real default model against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_driver import Driver, Sequence

from sgviz.model.fetch import resolve_model
from sgviz.model.loader import load_model
from sgviz.model.tokenizer import Tokenizer

pytestmark = pytest.mark.slow
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve_model("smollm2-135m-instruct")


def test_the_greedy_answer_is_transformers_answer(folder: Path) -> None:
    import transformers

    tokenizer = Tokenizer.load(folder)
    ids = tokenizer.apply_chat_template(QUESTION)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = reference.generate(torch.tensor([ids]), max_new_tokens=16, do_sample=False)[0, len(ids) :]
        logits = reference(torch.tensor([ids])).logits[0, -1]
    driver = Driver(load_model(folder), page_size=16)
    own = driver.step([Sequence(ids)], [len(ids)])[0]
    torch.testing.assert_close(own, logits, atol=2e-3, rtol=1e-3)
    answer = driver.greedy(ids, 16)
    assert answer[: len(expected)] == expected.tolist()
    stop = answer.index(tokenizer.eos_token_id)
    assert tokenizer.decode(answer[:stop]) == "The capital of France is Paris."
