"""`forward_batch_embedding`: the vectors of real models, whatever is cut, cached, or shares the forward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hand_driver import HandDriver, make_req
from tiny_bert import write_tiny_bert

from sgviz.batch.req import Req
from sgviz.batch.schedule_batch import ScheduleBatch
from sgviz.config import Settings
from sgviz.errors import BadRequest, ConfigError
from sgviz.messages import EmbeddingSpec
from sgviz.messages.embedding import Pooling, unpack_vector
from sgviz.model.embedding_config import embedding_spec
from sgviz.model.fetch import data_dir
from sgviz.worker.encoder_worker import EncoderWorker
from sgviz.worker.factory import mock_info_of
from sgviz.worker.mock_worker import MockWorker, mock_info
from sgviz.worker.protocol import EmbeddingBatchResult, GenerationBatchResult, Worker
from sgviz.worker.tp_worker import TpModelWorker

IDS = [[(7 * i + k) % 300 for i in range(size)] for k, size in enumerate((5, 1, 23))]


def vector_req(rid: str, ids: list[int], *, dimensions: int | None = None, whole: bool = False) -> Req:
    req = make_req(rid, ids, max_new_tokens=0)
    req.is_embedding, req.dimensions, req.whole_prompt = True, dimensions, whole
    return req


def embed(worker: Worker, batch: ScheduleBatch) -> list[np.ndarray | None]:
    result = worker.launch(batch).result()
    assert isinstance(result, EmbeddingBatchResult) and result.bid == batch.bid
    assert result.start_ns <= result.forward_end_ns <= result.end_ns or not result.forward_end_ns
    return [np.array(unpack_vector(packed)) if packed else None for packed in result.embeddings]


@pytest.fixture(scope="module", params=["last", "mean"])
def worker(request: pytest.FixtureRequest) -> Iterator[TpModelWorker]:
    pooling: Pooling = request.param
    worker = TpModelWorker(
        "tiny-llama", max_total_tokens=2048, embedding=EmbeddingSpec(dim=64, pooling=pooling)
    )
    yield worker
    worker.close()


def reference(ids: list[int], pooling: str) -> np.ndarray:
    """What transformers gives behind the final norm, pooled."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(data_dir() / "tiny-llama", dtype=torch.float32).eval()
    with torch.no_grad():
        hidden = model(torch.tensor([ids])).last_hidden_state[0]
    pooled = hidden[-1] if pooling == "last" else hidden.mean(0)
    return (pooled / pooled.norm()).numpy()


def test_vectors_are_those_of_transformers(worker: TpModelWorker) -> None:
    driver = HandDriver(worker)
    vectors = embed(worker, driver.extend([vector_req(str(k), ids) for k, ids in enumerate(IDS)]))
    assert worker.info.embedding is not None
    for ids, vector in zip(IDS, vectors):
        np.testing.assert_allclose(vector, reference(ids, worker.info.embedding.pooling), atol=1e-5)


def test_chunks_and_company_change_nothing(worker: TpModelWorker) -> None:
    driver = HandDriver(worker)
    (alone,) = embed(worker, driver.extend([vector_req("alone", IDS[2])]))
    cut = vector_req("cut", IDS[2], whole=True)
    driver.cache.adopt(cut, driver.cache.match(IDS[2], "", 0))
    pieces: list[np.ndarray | None] = []
    while not pieces or pieces[-1] is None:
        pieces += embed(worker, driver.extend([cut], most=9))
    assert len(pieces) == 3 and pieces[:2] == [None, None]
    np.testing.assert_allclose(pieces[2], alone, atol=1e-6)


def test_the_stream_stays_in_order_and_rows_get_no_token(worker: TpModelWorker) -> None:
    driver = HandDriver(worker)
    talker = make_req("talker", IDS[0], temperature=0.0)
    driver.step(driver.extend([talker]))
    driver.step(driver.decode([talker]))
    launches = [
        worker.launch(driver.extend([vector_req("between", IDS[2])])),
        worker.launch(driver.decode([talker])),
    ]
    results = [launch.result() for launch in launches]
    assert [type(result) for result in results] == [EmbeddingBatchResult, GenerationBatchResult]
    assert results[0].end_ns <= results[1].start_ns
    other = HandDriver(worker)
    again = make_req("again", IDS[0], temperature=0.0)
    tokens = other.generate([again], 3)[0]
    assert isinstance(results[1], GenerationBatchResult) and tokens == [
        *talker.output_ids,
        *results[1].next_token_ids,
    ]


def test_a_vector_may_be_shorter(worker: TpModelWorker) -> None:
    driver = HandDriver(worker)
    whole, short = embed(
        worker, driver.extend([vector_req("whole", IDS[2]), vector_req("short", IDS[2], dimensions=8)])
    )
    assert whole is not None and short is not None and len(short) == 8
    np.testing.assert_allclose(short, whole[:8] / np.linalg.norm(whole[:8]), atol=1e-6)


def test_the_mock_device_has_a_vector_by_rule() -> None:
    worker = MockWorker(mock_info(embedding=EmbeddingSpec(dim=8)), threaded=False, check=True)
    driver = HandDriver(worker)
    one, two, same = embed(
        worker,
        driver.extend([vector_req("a", [1, 2, 3]), vector_req("b", [1, 2, 4]), vector_req("c", [1, 2, 3])]),
    )
    assert one is not None and two is not None and same is not None
    assert one.tolist() == same.tolist() != two.tolist()
    assert np.linalg.norm(one) == pytest.approx(1.0) and abs(float(one @ two)) < 0.99


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_bert(tmp_path_factory.mktemp("bert"))


def encoder(folder: Path, **settings: object) -> EncoderWorker:
    return EncoderWorker(folder, Settings.build(model_path=str(folder), **settings), embedding_spec(folder))


def test_an_encoder_gives_vectors_and_says_that_it_gives_nothing_else(bert: Path) -> None:
    worker = encoder(bert, max_running_requests=4)
    try:
        assert not worker.info.is_generation and worker.info.is_encoder
        assert worker.info.bytes_per_token == 0 and worker.info.max_total_num_tokens == 4 * 40
        driver = HandDriver(worker)
        prompts = {"a": [2, 5, 3], "b": [2, 5, 3], "c": [2, 6, 3]}
        one, same, other = embed(
            worker, driver.extend([vector_req(rid, ids) for rid, ids in prompts.items()])
        )
        assert one is not None and same is not None and other is not None
        assert one.tolist() == same.tolist() != other.tolist()
        worker.forget([1])
        with pytest.raises(BadRequest, match="weights of an encoder cannot be replaced"):
            worker.load_weights("tiny-llama")
    finally:
        worker.close()


def test_settings_for_generating_models_are_refused_for_an_encoder(bert: Path) -> None:
    with pytest.raises(ConfigError, match="quantization 'w8a8_int8' is for generating models"):
        encoder(bert, quantization="w8a8_int8")
    with pytest.raises(ConfigError, match="context_length 41 is more than the model's 40"):
        encoder(bert, context_length=41)


def test_the_mock_of_an_encoder_has_the_sizes_of_the_real_one(bert: Path) -> None:
    settings = Settings.build(model_path=str(bert), device="mock")
    mock = mock_info_of(settings)
    worker = encoder(bert)
    worker.close()
    assert replace(mock, device="cpu", weight_bytes=worker.info.weight_bytes) == worker.info
