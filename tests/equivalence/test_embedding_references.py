"""The vectors of whole sentences against sentence-level references, and the endpoints with the openai client."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import openai
import pytest

from sgviz.engine import Engine
from sgviz.model.fetch import resolve_model

pytestmark = pytest.mark.slow
MINILM, SMOLLM = "all-minilm-l6-v2", "smollm2-135m-instruct"
SENTENCES = [
    "A man is eating food.",
    "A man is eating a piece of bread.",
    "The girl is carrying a baby.",
    "Ein Satz in einer anderen Sprache, mit Umlauten: äöü!",
    "one",
    "Numbers 1, 2, 3 and " + "a rather long sentence that goes on and on, " * 25,
]


@pytest.fixture(scope="module", params=["threads", "processes"])
def minilm(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine(MINILM, mode=request.param, event_loop="overlap", chunked_prefill_size=32) as engine:
        yield engine


@pytest.fixture(scope="module")
def smollm() -> Iterator[Engine]:
    with Engine(SMOLLM, event_loop="overlap", max_total_tokens=4096, chunked_prefill_size=64) as engine:
        yield engine


def client_of(engine: Engine) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=engine.serve(port=0).url + "/v1", api_key="none", max_retries=0, timeout=120
    )


def of_sentences(model: str, mean: bool) -> np.ndarray:
    """What transformers gives: the mean over the real tokens of a padded batch, or the last one's; normalised."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    folder = resolve_model(model)
    tokenizer, network = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    tokenizer.padding_side = "right"
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = network(**batch).last_hidden_state.float()
    mask = batch["attention_mask"]
    if mean:
        pooled = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    else:
        pooled = states[torch.arange(len(SENTENCES)), mask.sum(1) - 1]
    normed: np.ndarray = torch.nn.functional.normalize(pooled).numpy()
    return normed


def test_minilm_gives_the_sentence_vectors_of_its_reference(minilm: Engine) -> None:
    wanted = of_sentences(MINILM, mean=True)
    together = [out["embedding"] for out in minilm.encode(SENTENCES)]
    np.testing.assert_allclose(together, wanted, atol=1e-4)
    alone = minilm.encode(SENTENCES[1])["embedding"]
    np.testing.assert_allclose(alone, wanted[1], atol=1e-4)
    close, far = wanted[0] @ wanted[1], wanted[0] @ wanted[2]
    assert close > 0.7 > far  # sentences that mean nearly the same lie close


def test_a_decoder_gives_its_last_hidden_state(smollm: Engine) -> None:
    wanted = of_sentences(SMOLLM, mean=False)
    for _ in range(2):  # the second time from the prefix cache
        vectors = [out["embedding"] for out in smollm.encode(SENTENCES)]
        np.testing.assert_allclose(vectors, wanted, atol=1e-4)


def test_a_decoder_gives_the_mean_as_a_setting() -> None:
    with Engine(
        SMOLLM, pooling="mean", is_embedding=True, max_total_tokens=4096, chunked_prefill_size=64
    ) as engine:
        vectors = [out["embedding"] for out in engine.encode(SENTENCES)]
    np.testing.assert_allclose(vectors, of_sentences(SMOLLM, mean=True), atol=1e-4)


def test_the_openai_client_reads_the_vectors(minilm: Engine) -> None:
    client, wanted = client_of(minilm), [out["embedding"] for out in minilm.encode(SENTENCES)]
    answer = client.embeddings.create(model=MINILM, input=SENTENCES)  # as base64, the client's own choice
    assert [item.index for item in answer.data] == list(range(len(SENTENCES)))
    np.testing.assert_allclose([item.embedding for item in answer.data], wanted, atol=1e-6)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0 and answer.model == MINILM
    plain = client.embeddings.create(model=MINILM, input=SENTENCES[0], encoding_format="float")
    np.testing.assert_allclose(plain.data[0].embedding, wanted[0], atol=1e-6)
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        client.embeddings.create(model=MINILM, input="a", dimensions=7)
    with pytest.raises(openai.BadRequestError, match="empty"):
        client.embeddings.create(model=MINILM, input="")
    with pytest.raises(openai.BadRequestError, match="tokens"):
        client.embeddings.create(model=MINILM, input="word " * 600)
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="other", input="a")
    with pytest.raises(openai.BadRequestError, match="embeddings only"):
        client.chat.completions.create(model=MINILM, messages=[{"role": "user", "content": "a"}])
    state = minilm.internal_state()
    assert state["num_live_reqs"] == state["private_tokens"] == state["protected_tokens"] == 0
    assert minilm.recording().audit().balanced


def test_minilm_puts_the_fitting_document_first(minilm: Engine) -> None:
    import httpx

    body = {
        "query": "What is the capital of France?",
        "documents": [*SENTENCES[:3], "Paris is France's capital."],
    }
    ranked = httpx.post(minilm.serve(port=0).url + "/v1/rerank", json=body, timeout=60).json()
    assert ranked[0]["index"] == 3 and ranked[0]["score"] > 2 * ranked[1]["score"]


def test_vectors_and_answers_side_by_side(smollm: Engine) -> None:
    import threading

    chats: list[str] = []

    def talk() -> None:
        chats.append(smollm.chat("What is the capital of France?", max_tokens=16, temperature=0).text)

    threads = [threading.Thread(target=talk) for _ in range(3)]
    for thread in threads:
        thread.start()
    vectors = [out["embedding"] for out in smollm.encode(SENTENCES)]
    for thread in threads:
        thread.join()
    assert chats == ["The capital of France is Paris."] * 3
    np.testing.assert_allclose(vectors, of_sentences(SMOLLM, mean=False), atol=1e-4)
    assert smollm.recording().audit().balanced


def test_a_generating_model_judges_documents_in_its_template(smollm: Engine) -> None:
    import httpx

    url = smollm.serve(port=0).url
    body = {
        "query": "capital of France",
        "documents": ["Paris.", "Bananas."],
        "instruct": "It answers the query.",
    }
    ranked = httpx.post(f"{url}/v1/rerank", json=body, timeout=60).json()
    assert sorted(item["index"] for item in ranked) == [0, 1]
    assert 1 > ranked[0]["score"] >= ranked[1]["score"] > 0
    other = httpx.post(f"{url}/v1/rerank", json={**body, "instruct": "It is about fruit."}, timeout=60).json()
    assert {item["score"] for item in other}.isdisjoint(item["score"] for item in ranked)
