"""Embeddings, scores and rankings over HTTP, by engines that give both, vectors only, or are an encoder."""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tiny_bert import write_tiny_bert

from sgviz.engine import Engine
from sgviz.errors import BadRequest
from sgviz.model.fetch import data_dir
from sgviz.serving.serving_score import probabilities

SETTINGS: dict[str, Any] = {"max_total_tokens": 4096, "context_length": 256, "event_loop": "overlap"}


class Face:
    """An engine and its port."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._client = httpx.Client(base_url=engine.serve(port=0).url, timeout=60)

    def post(self, path: str, body: object) -> httpx.Response:
        return self._client.post(path, json=body)

    def good(self, path: str, body: object) -> Any:
        response = self.post(path, body)
        assert response.status_code == 200, response.text
        return response.json()

    def refused(self, path: str, body: object) -> dict[str, Any]:
        response = self.post(path, body)
        assert response.status_code == 400, response.text
        error: dict[str, Any] = response.json()["error"]
        assert error["type"] == "BadRequestError" and error["code"] == 400
        return error

    def close(self) -> None:
        self._client.close()


@contextmanager
def serving(model: str, **settings: Any) -> Iterator[Face]:
    with Engine(model, **{**SETTINGS, **settings}) as engine:
        face = Face(engine)
        yield face
        face.close()
        state = engine.internal_state()
        assert state["num_live_reqs"] == state["protected_tokens"] == state["private_tokens"] == 0
        report = engine.recording().audit()
        assert report.balanced, str(report)


@pytest.fixture(scope="module")
def both() -> Iterator[Face]:
    with serving("tiny-llama") as face:
        yield face


@pytest.fixture(scope="module")
def vectors_only() -> Iterator[Face]:
    with serving("tiny-llama", device="mock", is_embedding=True) as face:
        yield face


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Face]:
    folder = write_tiny_bert(tmp_path_factory.mktemp("bert") / "tiny-bert")
    with serving(str(folder), context_length=None, max_total_tokens=None, served_model_name="bert") as face:
        yield face


def test_every_shape_of_input_has_its_vectors_in_order(both: Face) -> None:
    text = both.good("/v1/embeddings", {"input": "hello", "model": "tiny-llama"})
    assert text["object"] == "list" and text["model"] == "tiny-llama"
    ids = both.good("/v1/tokenize", {"prompt": ["hello", "there"]})["tokens"]
    listed = both.good("/v1/embeddings", {"input": ["there", "hello"]})
    assert [(item["object"], item["index"]) for item in listed["data"]] == [
        ("embedding", 0),
        ("embedding", 1),
    ]
    hello = text["data"][0]["embedding"]
    assert listed["data"][1]["embedding"] == pytest.approx(hello, abs=1e-6)
    assert both.good("/v1/embeddings", {"input": ids[0]})["data"][0]["embedding"] == pytest.approx(
        hello, abs=1e-6
    )
    both_ids = both.good("/v1/embeddings", {"input": [ids[1], ids[0]]})
    assert both_ids["data"][1]["embedding"] == pytest.approx(hello, abs=1e-6)
    tokens = len(ids[0]) + len(ids[1])
    assert both_ids["usage"] == {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens}


def test_base64_is_the_same_vector_in_float32(both: Face) -> None:
    plain = both.good("/v1/embeddings", {"input": "hello", "encoding_format": "float"})["data"][0][
        "embedding"
    ]
    packed = both.good("/v1/embeddings", {"input": "hello", "encoding_format": "base64"})["data"][0][
        "embedding"
    ]
    assert np.frombuffer(base64.b64decode(packed), dtype="<f4").tolist() == plain
    assert np.linalg.norm(plain) == pytest.approx(1.0)


BAD_INPUTS = [
    ({"input": ""}, "input", "empty text"),
    ({"input": " \n"}, "input", "white space"),
    ({"input": ["a", ""]}, "input", "empty text"),
    ({"input": []}, "input", "must not be empty"),
    ({"input": [[]]}, "input", "no tokens"),
    ({"input": [[1], []]}, "input", "no tokens"),
    ({"input": [[1], "a"]}, "input[1]", "a list of integers"),
    ({"input": ["a", 3]}, "input[1]", "a string"),
    ({"input": [-1]}, "input", "token id -1"),
    ({"input": [312]}, "input", "token id 312 is outside the vocabulary"),
    ({"input": [1] * 256}, "input", "256 tokens"),
    ({"input": None}, "input", "str | array"),
    ({}, "input", "required"),
    ({"input": "a", "encoding_format": "hex"}, "encoding_format", "one of float, base64, got 'hex'"),
    ({"input": "a", "encoding_format": 3}, "encoding_format", "str"),
    ({"input": "a", "dimensions": 8}, "dimensions", "64 or left out, got 8"),
    ({"input": "a", "dimensions": 0}, "dimensions", "got 0"),
    ({"input": "a", "dimensions": "8"}, "dimensions", "int"),
    ({"input": ["a", "b"], "rid": ["x"]}, "rid", "1 entries for 2 prompts"),
]


@pytest.mark.parametrize(("body", "param", "told"), BAD_INPUTS)
def test_bad_input_is_told_by_field(both: Face, body: dict[str, Any], param: str, told: str) -> None:
    error = both.refused("/v1/embeddings", body)
    assert error["param"] == param and told in error["message"]


def test_dimensions_may_be_all_there_are(both: Face) -> None:
    assert len(both.good("/v1/embeddings", {"input": "a", "dimensions": 64})["data"][0]["embedding"]) == 64


def test_an_unknown_model_is_not_found(both: Face) -> None:
    assert both.post("/v1/embeddings", {"input": "a", "model": "other"}).status_code == 404


def test_encode_has_the_shape_of_the_engine(both: Face) -> None:
    one = both.good("/encode", {"text": "hello", "rid": "mine"})
    assert set(one) == {"embedding", "meta_info"}
    meta = one["meta_info"]
    assert (meta["id"], meta["prompt_tokens"]) == ("mine", 3)
    assert meta["finish_reason"] == {"type": "length", "length": 0} and meta["e2e_latency"] > 0
    listed = both.good("/encode", {"text": ["hello", "there"]})
    assert [item["index"] for item in listed] == [0, 1]
    assert listed[0]["embedding"] == pytest.approx(one["embedding"], abs=1e-6)
    assert both.engine.encode("hello")["embedding"] == pytest.approx(one["embedding"], abs=1e-6)
    assert both.refused("/encode", {})["param"] == "text"
    assert both.refused("/encode", {"text": "a", "input_ids": [1]})["param"] == "text"
    assert both.refused("/encode", {"text": "a", "image_data": "x"})["param"] == "image_data"


def test_python_calls_are_checked_as_http_is(both: Face) -> None:
    with pytest.raises(BadRequest, match=r"encode: unknown option 'dimension' .did you mean 'dimensions'"):
        both.engine.encode("a", dimension=3)
    with pytest.raises(BadRequest, match="no tokens"):
        both.engine.encode("")
    with pytest.raises(BadRequest, match="64 or left out"):
        both.engine.encode("a", dimensions=3)
    pair = both.engine.encode(input_ids=[[1, 2], [3]], rid="pair")
    assert [out["meta_info"]["id"] for out in pair] == ["pair_0", "pair_1"]


def test_the_way_of_a_vector_is_whole(both: Face) -> None:
    both.good("/v1/embeddings", {"input": "hello world", "rid": "way"})
    rec = both.engine.recording()
    assert [step.type for step in rec.journey("way")] == [
        "EmbeddingRequest", "EmbeddingReqInput", "TokenizedEmbeddingReqInput", "Req", "ScheduleBatch",
        "EmbeddingBatchResult", "Pooler", "BatchEmbeddingOutput", "BatchEmbeddingOutput", "response body",
    ]  # fmt: skip
    explanation = rec.explain("way")
    assert explanation.unexplained_ns == 0
    assert sum(part.duration_ns for part in explanation.parts) == explanation.total_ns


# ---------------------------------------------------------------- scores


def reference_probabilities(ids: list[int]) -> np.ndarray:
    """Of the next token, by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(data_dir() / "tiny-llama", dtype=torch.float32).eval()
    with torch.no_grad():
        return torch.softmax(model(torch.tensor([ids])).logits[0, -1].double(), -1).numpy()


def test_scores_are_the_probabilities_of_the_next_token(both: Face) -> None:
    labels = [7, 300, 12]
    body = {"query": [5, 6, 7], "items": [[8, 9], [10]], "label_token_ids": labels}
    answer = both.good("/v1/score", body)
    assert answer["object"] == "scoring" and answer["usage"]["prompt_tokens"] == 9
    for scores, item in zip(answer["scores"], [[8, 9], [10]]):
        np.testing.assert_allclose(scores, reference_probabilities([5, 6, 7, *item])[labels], rtol=1e-4)
    first = both.good("/v1/score", {**body, "item_first": True})["scores"][1]
    np.testing.assert_allclose(first, reference_probabilities([10, 5, 6, 7])[labels], rtol=1e-4)
    shared = both.good("/v1/score", {**body, "apply_softmax": True})["scores"]
    for scores, plain in zip(shared, answer["scores"]):
        np.testing.assert_allclose(scores, np.array(plain) / sum(plain), rtol=1e-5)


def test_a_hundred_thousand_labels_share_one() -> None:
    """Added up once, not once for each."""
    entries = [(-float(number % 7), number, None) for number in range(100_000)]
    output: Any = {"meta_info": {"output_token_ids_logprobs": [entries]}}
    shares, plain = probabilities(output, softmax=True), probabilities(output, softmax=False)
    assert sum(shares) == pytest.approx(1.0)
    np.testing.assert_allclose(shares, np.array(plain) / sum(plain))


def test_items_may_be_texts_and_one_alone(both: Face) -> None:
    listed = both.good("/v1/score", {"query": "a", "items": ["bc"], "label_token_ids": [5]})["scores"]
    assert both.good("/v1/score", {"query": "a", "items": "bc", "label_token_ids": [5]})["scores"][
        0
    ] == pytest.approx(listed[0])
    assert len(listed) == len(listed[0]) == 1


@pytest.mark.parametrize(
    ("change", "param", "told"),
    [
        ({"label_token_ids": []}, "label_token_ids", "must not be empty"),
        ({"label_token_ids": [4, 4]}, "label_token_ids", "twice"),
        ({"label_token_ids": [312]}, "label_token_ids", "id 312 is outside the vocabulary"),
        ({"label_token_ids": ["yes"]}, "label_token_ids[0]", "int"),
        ({"items": []}, "items", "must not be empty"),
        ({"items": [[1]]}, "items", "expected a string"),
        ({"query": [1], "items": ["a"]}, "items", "expected a list of integers"),
        ({"query": "", "items": [""]}, "items", "no tokens"),
        ({"query": "a" * 999}, "items", "tokens"),
        ({"rid": ["a", "b"]}, "rid", "2 entries for 1 prompts"),
    ],
)
def test_bad_scoring_is_told_by_field(both: Face, change: dict[str, Any], param: str, told: str) -> None:
    error = both.refused("/v1/score", {"query": "a", "items": ["b"], "label_token_ids": [4], **change})
    assert error["param"] == param and told in error["message"]


# ---------------------------------------------------------------- rankings


def test_an_encoder_ranks_by_the_cosine(encoder: Face) -> None:
    documents = ["the lazy dog", "quick brown fox", "jumps over a fox"]
    ranked = encoder.good("/v1/rerank", {"query": "the quick fox", "documents": documents})
    vectors = encoder.good("/v1/embeddings", {"input": ["the quick fox", *documents]})["data"]
    query, *others = [np.array(item["embedding"]) for item in vectors]
    wanted = sorted(((float(query @ other), i) for i, other in enumerate(others)), reverse=True)
    assert [item["index"] for item in ranked] == [index for _, index in wanted]
    assert [item["score"] for item in ranked] == pytest.approx([score for score, _ in wanted], abs=1e-6)
    assert [item["document"] for item in ranked] == [documents[index] for _, index in wanted]
    assert all(item["meta_info"]["prompt_tokens"] > 2 for item in ranked)
    best = encoder.good(
        "/v1/rerank",
        {"query": "the quick fox", "documents": documents, "top_n": 1, "return_documents": False},
    )
    assert [item["index"] for item in best] == [wanted[0][1]] and "document" not in best[0]


def test_a_model_without_words_for_its_verdict_cannot_rank(both: Face) -> None:
    told = both.refused("/v1/rerank", {"query": "q", "documents": ["d"]})["message"]
    assert "no single tokens for yes and no" in told


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"query": " "}, "query"),
        ({"documents": []}, "documents"),
        ({"documents": [3]}, "documents[0]"),
        ({"top_n": 0}, "top_n"),
        ({"documents": ["the " * 60]}, "documents"),
    ],
)
def test_bad_rankings_are_told_by_field(encoder: Face, change: dict[str, Any], param: str) -> None:
    assert encoder.refused("/v1/rerank", {"query": "q", "documents": ["d"], **change})["param"] == param


# ---------------------------------------------------------------- what gives vectors only


GENERATING = [
    ("/generate", {"text": "a"}),
    ("/generate", {"text": "a", "stream": True}),
    ("/v1/completions", {"prompt": "a"}),
    ("/v1/completions", {"prompt": "a", "stream": True}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ("/v1/score", {"query": "a", "items": ["b"], "label_token_ids": [4]}),
]


@pytest.mark.parametrize(("path", "body"), GENERATING)
@pytest.mark.parametrize("which", ["vectors_only", "encoder"])
def test_generating_endpoints_say_that_there_are_vectors_only(
    request: pytest.FixtureRequest, which: str, path: str, body: dict[str, Any]
) -> None:
    face: Face = request.getfixturevalue(which)
    assert "gives embeddings only" in face.refused(path, body)["message"]


@pytest.mark.parametrize("which", ["vectors_only", "encoder"])
def test_a_server_of_vectors_is_healthy_and_says_what_it_is(
    request: pytest.FixtureRequest, which: str
) -> None:
    face: Face = request.getfixturevalue(which)
    assert face._client.get("/health").status_code == 200
    assert face._client.get("/model_info").json()["is_generation"] is False
    with pytest.raises(BadRequest, match="gives embeddings only"):
        face.engine.generate("a")


def test_an_encoder_takes_special_tokens_from_its_tokenizer_and_cuts_nothing(encoder: Face) -> None:
    usage = encoder.good("/v1/embeddings", {"input": "the quick brown fox jumps over a lazy dog"})["usage"]
    assert usage["prompt_tokens"] == 11
    assert "at most" in encoder.refused("/v1/embeddings", {"input": "the " * 40})["message"]


def test_an_encoder_gives_what_its_folder_says(encoder: Face, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModel

    model = AutoModel.from_pretrained(encoder.engine.settings.model.model_path).eval()
    with torch.no_grad():
        hidden = model(torch.tensor([[2, 5, 6, 7, 3]])).last_hidden_state[0].mean(0)
    (item,) = encoder.good("/v1/embeddings", {"input": [[2, 5, 6, 7, 3]]})["data"]
    np.testing.assert_allclose(item["embedding"], (hidden / hidden.norm()).numpy(), atol=1e-5)


def test_who_leaves_or_aborts_leaves_nothing_behind() -> None:
    with serving("tiny-llama", device="mock", mock_step_ms=150, chunked_prefill_size=16) as face:
        slow = {"input": [[i % 200 + k for i in range(120)] for k in range(3)]}  # eight steps each
        with pytest.raises(httpx.ReadTimeout):
            face._client.post("/v1/embeddings", json=slow, timeout=0.3)
        answers: list[httpx.Response] = []
        asking = threading.Thread(
            target=lambda: answers.append(face.post("/encode", {"input_ids": [5] * 120, "rid": "x"}))
        )
        asking.start()
        while "x" not in face.engine.pipeline.manager.rid_to_state:
            time.sleep(0.01)
        face.good("/encode", {"text": "beside"})
        assert face.post("/abort_request", {"rid": "x"}).status_code == 200
        asking.join()
        assert answers[0].status_code == 200
        while face.engine.internal_state()["num_live_reqs"]:
            time.sleep(0.01)
