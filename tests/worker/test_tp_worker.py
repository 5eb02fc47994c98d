"""TpModelWorker on tiny models: the same tokens as transformers, however the batches are put together."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hand_driver import HandDriver, make_req

from sgviz.batch.req import Req
from sgviz.batch.schedule_batch import ScheduleBatch
from sgviz.config import Settings
from sgviz.errors import ConfigError, StartupError, Unavailable
from sgviz.model.decoder import CausalLM
from sgviz.model.fetch import resolve_model
from sgviz.model.loader import load_model
from sgviz.worker import model_runner
from sgviz.worker.factory import make_worker
from sgviz.worker.future_map import FutureMap
from sgviz.worker.mock_worker import MockWorker
from sgviz.worker.torch_threads import one_thread, threads_of_new_threads
from sgviz.worker.tp_worker import TpModelWorker

MODEL = "tiny-llama"
PROMPTS = ([5, 6, 7, 8, 9], [40] * 17, list(range(60, 100)), [200])
TOKENS = 12


@pytest.fixture(scope="module")
def worker() -> Iterator[TpModelWorker]:
    made = TpModelWorker(MODEL, device="cpu", max_total_tokens=1000, torch_threads=1)
    yield made
    made.close()


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Greedy continuations by transformers, one prompt at a time, in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(resolve_model(MODEL), dtype=torch.float32)
    model.eval()
    outputs = []
    with torch.inference_mode():
        for prompt in PROMPTS:
            ids = list(prompt)
            for _ in range(TOKENS):
                logits = model(torch.tensor([ids])).logits[0, -1]
                best = logits.topk(2).values
                assert best[0] - best[1] > 1e-3, "a near-tie proves nothing: choose another prompt"
                ids.append(int(logits.argmax()))
            outputs.append(ids[len(prompt) :])
    return outputs


def greedy(prefix: str = "r", **params: object) -> list[Req]:
    return [make_req(f"{prefix}{i}", p, temperature=0.0, **params) for i, p in enumerate(PROMPTS)]


@pytest.mark.parametrize("chunk", [None, 7])
def test_prefill_and_batched_decode_equal_transformers(
    worker: TpModelWorker, expected: list[list[int]], chunk: int | None
) -> None:
    assert HandDriver(worker).generate(greedy(), TOKENS, chunk) == expected


def test_mixed_cached_and_retracted_runs_equal_transformers(
    worker: TpModelWorker, expected: list[list[int]]
) -> None:
    driver = HandDriver(worker)
    reqs = greedy()
    driver.generate(reqs[:2], 3)
    driver.step(driver.mixed(reqs[2:], reqs[:2]))
    driver.retract(reqs[1])
    driver.step(driver.decode([reqs[2], reqs[0]]))
    driver.step(driver.mixed([reqs[1]], [reqs[3], reqs[0], reqs[2]]))
    while len(reqs[3].output_ids) < TOKENS:
        driver.step(driver.decode([req for req in reqs if len(req.output_ids) < TOKENS]))
    assert [req.output_ids for req in reqs] == [
        tokens[: len(req.output_ids)] for req, tokens in zip(reqs, expected)
    ]
    driver.finish(reqs[2])
    again = greedy("again")[2]
    driver.generate([again], TOKENS)
    assert again.output_ids == expected[2]
    driver.cache.check([req for req in [*reqs, again] if req.kv.req_pool_idx])


def test_launches_behind_one_another_need_no_result(worker: TpModelWorker, expected: list[list[int]]) -> None:
    """All launched before any result is read: every decode input comes through the FutureMap."""
    driver = HandDriver(worker)
    reqs = greedy()
    launches = [worker.launch(driver.extend(reqs))]
    launches += [worker.launch(driver.decode(reqs)) for _ in range(TOKENS - 1)]
    results = [launch.result() for launch in launches]
    assert [list(tokens) for tokens in zip(*[r.next_token_ids for r in results])] == expected
    numbers = [result.forward_pass_id for result in results]
    assert numbers == list(range(numbers[0], numbers[0] + TOKENS))
    for before, after in itertools.pairwise(results):
        assert before.start_ns <= before.end_ns <= after.start_ns
    for result in results:
        parts = (result.start_ns, result.forward_end_ns, result.end_ns, result.copy_end_ns)
        assert list(parts) == sorted(parts) and result.start_ns < result.forward_end_ns
        assert result.sample_start_ns == result.forward_end_ns and result.copy_start_ns == result.end_ns


def test_sampling_does_not_depend_on_the_batch(worker: TpModelWorker) -> None:
    """Seeds, penalties and logprobs: together with everybody, alone, and as pages of 16."""
    settings = [
        {"sampling_seed": 3, "top_p": 0.9},
        {"repetition_penalty": 1.5, "frequency_penalty": 0.5},
        {"temperature": 0.0, "presence_penalty": 1.0, "min_new_tokens": 5},
        {"top_k": 20, "temperature": 0.7, "logit_bias": {"7": 2.0}},
    ]

    def reqs() -> list[Req]:
        return [make_req(f"s{i}", p, logprobs=2, **settings[i]) for i, p in enumerate(PROMPTS)]

    together = reqs()
    HandDriver(worker).generate(together, TOKENS)
    for i, wanted in enumerate(together):
        single = reqs()[i]
        HandDriver(worker).generate([single], TOKENS, most=3)
        assert single.output_ids == wanted.output_ids
        assert single.output_logprobs == pytest.approx(wanted.output_logprobs, abs=1e-3)


def test_a_retraction_changes_neither_draws_nor_penalties(worker: TpModelWorker) -> None:
    def req() -> Req:
        return make_req("p", PROMPTS[0], sampling_seed=9, frequency_penalty=0.7, repetition_penalty=1.3)

    plain, interrupted = req(), req()
    HandDriver(worker).generate([plain], TOKENS)
    driver = HandDriver(worker)
    driver.generate([interrupted], 5)
    driver.retract(interrupted)
    while len(interrupted.output_ids) < 6:
        driver.step(driver.extend([interrupted], most=4))
    while len(interrupted.output_ids) < TOKENS:
        driver.step(driver.decode([interrupted]))
    assert interrupted.output_ids == plain.output_ids


def test_pages_of_16_give_the_same_tokens(expected: list[list[int]]) -> None:
    worker = TpModelWorker(MODEL, device="cpu", max_total_tokens=1007, page_size=16, torch_threads=1)
    assert worker.info.max_total_num_tokens == 992  # whole pages
    assert HandDriver(worker, page_size=16).generate(greedy(), TOKENS, 9) == expected
    worker.close()


def test_int8_runs_whole_requests_and_a_row_does_not_depend_on_its_batch() -> None:
    worker = TpModelWorker(
        MODEL, device="cpu", max_total_tokens=1000, torch_threads=1, quantization="w8a8_int8"
    )
    together = HandDriver(worker).generate(greedy(), TOKENS)
    for i, wanted in enumerate(together):
        assert HandDriver(worker).generate([greedy("alone")[i]], TOKENS, most=5) == [wanted]
    assert worker.info.weight_bytes < 4 * 250_000
    worker.close()
    with pytest.raises(StartupError, match="w8a8_int8"):
        TpModelWorker(MODEL, device="cpu", dtype="bfloat16", quantization="w8a8_int8")


def test_rows_too_unequal_for_the_graph_give_the_same_tokens(worker: TpModelWorker) -> None:
    """One long and many short rows decode eagerly, and go back to the graph when the long one has gone."""

    def reqs() -> list[Req]:
        prompts = [list(range(3, 250)), [7], [8, 9], [10], [11, 12]]
        return [make_req(f"u{i}", p, temperature=0.0, logprobs=0) for i, p in enumerate(prompts)]

    together = reqs()
    HandDriver(worker).generate(together, 4)
    driver = HandDriver(worker)
    for req, wanted in zip(reqs(), together):
        driver.generate([req], 4)
        assert req.output_ids == wanted.output_ids
        assert req.output_logprobs == pytest.approx(wanted.output_logprobs, abs=1e-4)


def test_logprobs_are_those_of_the_model(worker: TpModelWorker) -> None:
    req = make_req("a", PROMPTS[0], temperature=0.0, logprobs=5)
    result = HandDriver(worker).step(HandDriver(worker).extend([req]))
    model = transformers.AutoModelForCausalLM.from_pretrained(resolve_model(MODEL), dtype=torch.float32)
    with torch.inference_mode():
        wanted = model(torch.tensor([PROMPTS[0]])).logits[0, -1].log_softmax(-1).topk(5)
    assert result.logprobs is not None
    assert result.top_logprobs is not None
    assert result.logprobs[0] == pytest.approx(float(wanted.values[0]), abs=1e-4)
    assert [token for _, token in result.top_logprobs[0]] == wanted.indices.tolist()
    assert [value for value, _ in result.top_logprobs[0]] == pytest.approx(wanted.values.tolist(), abs=1e-4)


def test_a_failing_forward_is_told_and_the_worker_goes_on(
    worker: TpModelWorker, expected: list[list[int]]
) -> None:
    driver = HandDriver(worker)
    broken = driver.extend([make_req("bad", [1, 2, 3])])
    broken.input_ids[1] = 10**6
    launch = worker.launch(broken)
    good = greedy()[0]
    after = driver.extend([good])
    with pytest.raises(IndexError):
        launch.result()
    driver.step(after)
    assert good.output_ids == expected[0][:1]
    never = make_req("never", [1, 2])
    driver.step(driver.extend([never]))
    worker.forget([never.kv.req_pool_idx])
    with pytest.raises(RuntimeError, match="nothing was sampled"):
        driver.step(driver.decode([never]))


def test_info_says_what_the_planner_needs(worker: TpModelWorker) -> None:
    info = worker.info
    assert (info.model, info.vocab_size, info.context_len) == (MODEL, 312, 2048)
    assert (info.max_total_num_tokens, info.eos_token_ids) == (1000, (2,))
    assert (info.device, info.dtype, info.num_layers) == ("cpu", "float32", 4)
    assert info.bytes_per_token == 4 * 2 * 2 * 16 * 4  # layers, K and V, KV heads, head_dim, bytes
    stored = sum(file.stat().st_size for file in resolve_model(MODEL).glob("*.safetensors"))
    assert info.weight_bytes == pytest.approx(2 * stored, rel=0.05)  # float32 here, bfloat16 in the file


def test_default_memory_is_a_gibibyte_or_what_requests_can_use() -> None:
    made = TpModelWorker(MODEL, device="cpu", max_running_requests=3, context_length=100, page_size=16)
    assert made.info.max_total_num_tokens == 288
    assert made.info.context_len == 100
    made.close()
    large = make_worker(Settings.build(model_path=MODEL, device="mock"))
    assert large.info.max_total_num_tokens == min(2048 * 256, (1 << 30) // 1024)
    large.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context_length": 4096}, "4096 is more than the model's 2048"),
        ({"max_total_tokens": 20, "page_size": 64}, "less than one page of 64"),
        ({"dtype": "int3"}, "dtype 'int3'"),
        ({"device": "tpu"}, "device 'tpu'"),
    ],
)
def test_settings_that_do_not_fit_are_refused_and_leave_no_thread(
    options: dict[str, object], message: str
) -> None:
    before = set(threading.enumerate())
    with pytest.raises(ConfigError, match=message):
        TpModelWorker(MODEL, **({"device": "cpu"} | options))
    assert set(threading.enumerate()) <= before


def test_close_ends_the_thread_and_refuses_launches() -> None:
    made = TpModelWorker(MODEL, device="cpu", max_total_tokens=64)
    driver = HandDriver(made)
    launch = made.launch(driver.extend([make_req("a", [1, 2], temperature=0.0)]))
    made.close()
    assert launch.done()
    assert len(launch.result().next_token_ids) == 1
    with pytest.raises(Unavailable):
        made.launch(driver.extend([make_req("b", [1, 2])]))


def test_an_idle_batch_runs_nothing(worker: TpModelWorker) -> None:
    before = [layer.clone() for layer in worker.runner.kv_pool.layers]
    result = worker.launch(ScheduleBatch(HandDriver(worker).cache.req_to_token_pool)).result()
    assert result.next_token_ids == [] and result.logprobs is None
    assert all(map(torch.equal, before, worker.runner.kv_pool.layers))


def test_what_the_runner_reports_is_in_the_result(
    worker: TpModelWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = HandDriver(worker)
    newest = worker.runner.forward_pass_id
    launch = worker.launch(driver.extend(greedy()[:1]))
    result = launch.result()
    assert launch.forward_pass_id == result.forward_pass_id == newest + 1 == worker.runner.forward_pass_id
    assert result.can_run_cuda_graph is False
    monkeypatch.setattr(worker.runner, "can_run_cuda_graph", True)
    assert worker.launch(driver.extend(greedy("x")[:1])).result().can_run_cuda_graph is True


def test_torch_threads_are_put_back() -> None:
    """What threads that come later find is as before, in whichever order two workers end."""
    before = threads_of_new_threads()
    for first in (0, 1):
        workers = [
            TpModelWorker(MODEL, device="cpu", max_total_tokens=64, torch_threads=before + 2)
            for _ in range(2)
        ]
        assert threads_of_new_threads() == before + 2
        for each in (workers[first], workers[1 - first], workers[0]):
            each.close()
        assert threads_of_new_threads() == before


def test_one_thread_is_for_the_calling_thread_alone() -> None:
    mine, others = torch.get_num_threads(), threads_of_new_threads()
    with one_thread():
        assert torch.get_num_threads() == 1
        assert threads_of_new_threads() == others
    assert (torch.get_num_threads(), threads_of_new_threads()) == (mine, others)


def test_the_thread_that_runs_the_model_has_loaded_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """So no other thread has a team of OpenMP's, which would make every operator of the stream sleep and wake."""
    where: list[tuple[str, int]] = []

    def load(*args: Any, **kwargs: Any) -> CausalLM:
        where.append((threading.current_thread().name, torch.get_num_threads()))
        return load_model(*args, **kwargs)

    monkeypatch.setattr(model_runner, "load_model", load)
    made = TpModelWorker(MODEL, device="cpu", max_total_tokens=64, torch_threads=3)
    made.load_weights(MODEL).install()
    made.close()
    assert where == [("sgviz-forward", 3), ("sgviz-weights", 1)]


def test_a_model_that_cannot_be_loaded_leaves_no_thread_and_no_setting(tmp_path: Path) -> None:
    before, threads = threads_of_new_threads(), set(threading.enumerate())
    with pytest.raises(StartupError):
        TpModelWorker(str(tmp_path), device="cpu", torch_threads=before + 1)
    assert threads_of_new_threads() == before and set(threading.enumerate()) <= threads


def test_two_workers_in_one_process_do_not_touch_each_other(expected: list[list[int]]) -> None:
    workers = [TpModelWorker(MODEL, device="cpu", max_total_tokens=500) for _ in range(2)]
    drivers = [HandDriver(worker) for worker in workers]
    members = [greedy("x"), greedy("y")[::-1]]
    launches = []
    for driver, worker, reqs in zip(drivers, workers, members):
        launches.append([worker.launch(driver.extend(reqs))])
    for _ in range(TOKENS - 1):
        for driver, worker, reqs, started in zip(drivers, workers, members, launches):
            started.append(worker.launch(driver.decode(reqs)))
    for started, wanted in zip(launches, (expected, expected[::-1])):
        tokens = zip(*[launch.result().next_token_ids for launch in started])
        assert [list(row) for row in tokens] == wanted
    for worker in workers:
        worker.close()


def test_factory_makes_what_the_settings_name(tmp_path: Path) -> None:
    mock = make_worker(
        Settings.build(model_path=MODEL, device="mock", page_size=8, max_total_tokens=100, mock_step_ms=1)
    )
    assert isinstance(mock, MockWorker)
    assert (mock.info.vocab_size, mock.info.max_total_num_tokens, mock.info.device) == (312, 96, "mock")
    assert len(HandDriver(mock, page_size=8).generate([make_req("a", [1, 2, 3])], 20)[0]) == 20
    mock.close()
    real = make_worker(
        Settings.build(model_path=MODEL, device="cpu", max_total_tokens=100, context_length=64)
    )
    assert isinstance(real, TpModelWorker)
    assert (real.info.context_len, real.info.max_total_num_tokens) == (64, 100)
    real.close()
    with pytest.raises(StartupError):
        make_worker(Settings.build(model_path=str(tmp_path / "nothing"), device="cpu"))


def test_future_map_relays_by_row() -> None:
    relay = FutureMap(rows=4)
    relay.store(torch.tensor([2, 4]), torch.tensor([70, 71]))
    prefill = torch.tensor([5, 6, 7])
    nobody = torch.empty(0, dtype=torch.int64)
    assert relay.resolve(prefill, nobody).tolist() == [5, 6, 7]
    assert relay.resolve(nobody, torch.tensor([4, 2])).tolist() == [71, 70]
    assert relay.resolve(prefill, torch.tensor([2])).tolist() == [5, 6, 7, 70]
    relay.store(torch.tensor([2]), torch.tensor([72]))
    assert relay.resolve(nobody, torch.tensor([2])).tolist() == [72]
    relay.reserve(9)
    assert relay.resolve(nobody, torch.tensor([4])).tolist() == [71]
    relay.store(torch.tensor([9]), torch.tensor([1]))
    relay.forget(torch.tensor([4]))
    with pytest.raises(RuntimeError, match="row 4"):
        relay.resolve(nobody, torch.tensor([9, 4]))


def test_a_closed_worker_holds_no_kv_memory_though_somebody_holds_it() -> None:
    made = TpModelWorker(MODEL, device="cpu", max_total_tokens=64)
    held = weakref.ref(made.runner.kv_pool)
    gc.collect()
    gc.disable()  # rings of references wait for it; the memory must not
    try:
        made.close()
        made.close()
        assert held() is None
    finally:
        gc.enable()
