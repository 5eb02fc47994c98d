"""SimWorker: a serial timeline, tokens that depend on the request alone, and memory as the GPU has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from sgviz.batch.req import Req
from sgviz.batch.schedule_batch import ScheduleBatch
from sgviz.cache.kv_cache import KVCache
from sgviz.config import Settings
from sgviz.errors import ConfigError, SgvizError, Unavailable
from sgviz.events.tracer import Tracer
from sgviz.messages import EmbeddingSpec, SamplingParams
from sgviz.model.fetch import resolve_model
from sgviz.model.tokenizer import Tokenizer
from sgviz.worker.factory import make_worker
from sgviz.worker.protocol import EmbeddingBatchResult, WorkerInfo
from sgviz.worker.sim.build import MOST_KV_TOKENS, make_sim_worker
from sgviz.worker.sim.device_timer import WallTimer
from sgviz.worker.sim.step_work import StepWork
from sgviz.worker.sim.text_ids import text_ids
from sgviz.worker.sim.token_rule import EOS_EVERY, TokenRule
from sgviz.worker.sim.worker import SimWorker

VOCAB = 97
EOS = 2
STEP_NS = 1000


class HandTimer:
    """Time that passes when told to, and notes who waited."""

    def __init__(self) -> None:
        self.time = 0
        self.waits: list[int] = []

    def now(self) -> int:
        return self.time

    def wait_until(self, ns: int) -> None:
        self.waits.append(ns)
        self.time = max(self.time, ns)


class PerToken:
    def step_ns(self, work: StepWork) -> int:
        return STEP_NS * work.new_tokens


class Bench:
    """A worker with a real cache; batches are put together by hand."""

    def __init__(self, *, ids: Sequence[int] = range(10, 60), eos: int | None = EOS, seed: int = 42) -> None:
        self.timer = HandTimer()
        info = WorkerInfo(
            model="sim", vocab_size=VOCAB, context_len=4096, max_total_num_tokens=8192, eos_token_ids=(EOS,),
            device="sim:h100-sxm", dtype="bfloat16", simulated=True,
        )  # fmt: skip
        self.worker = SimWorker(info, PerToken(), TokenRule(ids, eos, seed), self.timer)
        self.cache = KVCache(
            size=8192, page_size=1, rows=16, max_context_len=4096, trace=Tracer("scheduler", None)
        )
        self.bid = 0

    def req(self, rid: str, prompt: int = 5, *, tops: int | None = None, **params: object) -> Req:
        return Req(
            rid=rid,
            origin_input_ids=list(range(prompt)),
            sampling_params=SamplingParams(**params).normalize(),
            max_new_tokens=64,
            return_logprob=tops is not None,
            top_logprobs_num=tops or 0,
        )

    def extend(self, reqs: Sequence[Req], most: int = 10_000) -> ScheduleBatch:
        for req in reqs:
            ids = req.fill_ids()
            if req.kv.node is None:
                self.cache.adopt(req, self.cache.match(ids, "", len(ids) - 1))
            req.prefix_len = req.kv.allocated
            req.extend_end = min(len(ids), req.prefix_len + most)
        batch = ScheduleBatch(self.cache.req_to_token_pool, list(reqs))
        self.bid += 1
        batch.prepare_for_extend(self.cache, self.bid)
        return batch

    def decode(self, reqs: Sequence[Req]) -> ScheduleBatch:
        batch = ScheduleBatch(self.cache.req_to_token_pool, list(reqs))
        self.bid += 1
        batch.prepare_for_decode(self.cache, self.bid)
        return batch

    def generate(self, reqs: Sequence[Req], tokens: int, most: int = 10_000) -> list[list[int]]:
        """All together, prompts in pieces of `most`."""
        for req in reqs:
            while not req.output_ids:
                token = self.worker.launch(self.extend([req], most)).result().next_token_ids[0]
                if req.extend_end == req.seqlen:
                    req.output_ids.append(token)
        while len(reqs[0].output_ids) < tokens:
            result = self.worker.launch(self.decode(reqs)).result()
            for req, token in zip(reqs, result.next_token_ids):
                req.output_ids.append(token)
        return [req.output_ids for req in reqs]


# ---------------------------------------------------------------- timeline


def test_a_batch_for_vectors_is_a_launch_like_any_other() -> None:
    bench = Bench()
    bench.worker.info = replace(bench.worker.info, embedding=EmbeddingSpec(dim=8))
    first = bench.worker.launch(bench.extend([bench.req("a", 4)]))
    reqs = [bench.req("b", 6), bench.req("c", 2)]
    for req in reqs:
        req.is_embedding = True
    launch = bench.worker.forward_batch_embedding(bench.extend(reqs))
    assert not launch.done()
    result = launch.result()
    assert first.done() and launch.done() and bench.timer.time == 12_000
    assert isinstance(result, EmbeddingBatchResult) and result.bid == launch.bid
    assert (result.start_ns, result.end_ns) == (4000, 12_000)
    assert [len(vector) for vector in result.embeddings] == [32, 32]


def test_launches_run_one_after_the_other_from_their_launch_on() -> None:
    bench = Bench()
    bench.timer.time = 500
    first = bench.worker.launch(bench.extend([bench.req("a", 4)]))
    second = bench.worker.launch(bench.extend([bench.req("b", 6)]))
    assert not first.done()
    result = first.result()
    assert (result.start_ns, result.end_ns) == (500, 4500)
    assert result.forward_end_ns == result.sample_start_ns == 0  # the cost is of the whole
    assert first.done() and not second.done()
    later = second.result()
    assert (later.start_ns, later.end_ns) == (4500, 10500)
    assert bench.timer.waits == [4500, 10500]
    assert (result.forward_pass_id, later.forward_pass_id) == (1, 2)


def test_an_idle_device_starts_at_the_launch() -> None:
    bench = Bench()
    bench.worker.launch(bench.extend([bench.req("a", 1)])).result()
    bench.timer.time = 50_000
    assert bench.worker.launch(bench.extend([bench.req("b", 1)])).result().start_ns == 50_000


def test_delayed_sampling_holds_the_device_until_it_is_sampled() -> None:
    bench = Bench()
    launch = bench.worker.launch(bench.extend([bench.req("a", 4)]), delay_sample=True)
    with pytest.raises(SgvizError, match="call sample"):
        launch.result()
    bench.timer.time = 9000
    assert not launch.done()
    launch.sample()
    assert launch.done()
    result = launch.result()
    # the matrices were done at 4000; the sampling that was waited for takes no time of its own
    assert (result.forward_end_ns, result.sample_start_ns, result.end_ns) == (4000, 9000, 9000)
    assert result.copy_start_ns == result.copy_end_ns == 0
    assert bench.worker.launch(bench.extend([bench.req("b", 1)])).result().start_ns == 9000


def test_sampling_that_comes_before_the_end_costs_nothing() -> None:
    bench = Bench()
    launch = bench.worker.launch(bench.extend([bench.req("a", 4)]), delay_sample=True)
    launch.sample()
    assert launch.result().end_ns == 4000


def test_nothing_is_launched_on_a_closed_device() -> None:
    bench = Bench()
    bench.worker.close()
    with pytest.raises(Unavailable, match="closed"):
        bench.worker.launch(bench.extend([bench.req("a")]))


def test_the_wall_timer_never_comes_back_early() -> None:
    timer = WallTimer()
    for ns in (0, 1000, 300_000, 2_000_000):
        until = timer.now() + ns
        timer.wait_until(until)
        assert timer.now() >= until


# ---------------------------------------------------------------- tokens


def test_company_chunks_and_rows_do_not_change_tokens() -> None:
    alone = Bench()
    expected = {rid: alone.generate([alone.req(rid, 7)], 20)[0] for rid in "abc"}
    together = Bench()
    others = [together.req(rid, 7) for rid in "cab"]
    assert dict(zip("cab", together.generate(others, 20, most=3))) == expected
    assert len({tuple(ids) for ids in expected.values()}) == 3


def test_a_seed_of_its_own_goes_before_the_name() -> None:
    bench = Bench()
    one, two, other = bench.generate(
        [bench.req("a", sampling_seed=7), bench.req("b", sampling_seed=7), bench.req("c", sampling_seed=8)],
        12,
    )
    assert one == two != other
    assert Bench(seed=1).generate([Bench().req("a")], 0) != Bench(seed=2).generate([Bench().req("a")], 0)


def test_who_ignores_the_end_never_gets_it_and_others_do_by_and_by() -> None:
    bench = Bench(ids=range(10, 20))
    reqs = [bench.req("a", ignore_eos=True), bench.req("b"), bench.req("c", min_new_tokens=600)]
    steady, may_end, late = bench.generate(reqs, 2000)
    assert EOS not in steady
    assert 1 <= may_end.count(EOS) <= 30  # about 2000 / EOS_EVERY
    assert EOS not in late[:600] and EOS in late[600:]
    assert 2000 / EOS_EVERY > 5


def test_logprobs_come_for_those_who_ask() -> None:
    bench = Bench()
    reqs = [bench.req("a", tops=3), bench.req("b", tops=0), bench.req("c")]
    result = bench.worker.launch(bench.extend(reqs)).result()
    assert result.logprobs is not None and result.top_logprobs is not None
    assert [len(tops) for tops in result.top_logprobs] == [3, 0, 0]
    values, ids = zip(*result.top_logprobs[0])
    assert ids[0] == result.next_token_ids[0] and len(set(ids)) == 3
    assert values[0] == result.logprobs[0] and list(values) == sorted(values, reverse=True)
    assert bench.worker.launch(bench.extend([bench.req("d")])).result().logprobs is None


def test_no_ids_is_an_error() -> None:
    with pytest.raises(ConfigError, match="at least one token id"):
        TokenRule([], EOS, 0)


@pytest.mark.parametrize("model", ["tiny-llama", "smollm2-135m-instruct"])
@pytest.mark.slow
def test_ids_of_text_read_like_text_and_keep_their_number(model: str) -> None:
    tokenizer = Tokenizer.load(resolve_model(model))
    ids = text_ids(tokenizer)
    assert ids == sorted(set(ids)) and not set(ids) & set(tokenizer.all_special_ids)
    text = tokenizer.decode(ids[:200])
    assert text.isprintable()
    if model.startswith("smollm2"):
        assert tokenizer.encode(text) == ids[:200]


# ---------------------------------------------------------------- from settings


def sim(**settings: object) -> Settings:
    return Settings.build(**{"model_path": "tiny-llama", "device": "sim:h100-sxm", **settings})


def test_memory_is_what_weights_leave_of_the_gpu() -> None:
    info = make_worker(sim(context_length=8192)).info
    left = (80e9 * 0.85 - 8.03e9 * 2) / 131072
    assert info.max_total_num_tokens == pytest.approx(left, rel=0.001)
    assert (info.model, info.device, info.dtype, info.simulated) == (
        "llama-3-8b",
        "sim:h100-sxm",
        "bfloat16",
        True,
    )
    assert (info.context_len, info.num_layers, info.bytes_per_token) == (8192, 32, 131072)
    assert info.vocab_size == 312  # the tokenizer's


def test_a_small_model_does_not_make_an_endless_pool() -> None:
    info = make_worker(sim(sim_model="smollm2-135m")).info
    assert info.max_total_num_tokens == MOST_KV_TOKENS


def test_a_70b_is_spread_over_four() -> None:
    four, eight = (make_worker(sim(sim_model="llama-3-70b", sim_tp=tp)).info for tp in (None, 8))
    assert four.weight_bytes == pytest.approx(141.1e9 / 4, rel=0.01)
    assert eight.max_total_num_tokens > four.max_total_num_tokens
    assert four.bytes_per_token == 2 * 80 * 8 * 128 * 2 // 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sim_model": "llama-3-70b", "sim_tp": 1}, "leaves no KV memory of 80 GB"),
        ({"sim_model": "llama-3-70b", "device": "sim:l4"}, "take more GPUs"),
        ({"context_length": 100_000}, "context_length 100000 is more than the model's 8192"),
        ({"sim_cost": "/nowhere.json"}, "nowhere.json"),
    ],
)
def test_what_does_not_fit_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_sim_worker(sim(**settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "sim:h100"}, r"one of auto, .*sim:h100-sxm.* \(did you mean 'sim:h100-sxm'\?\)"),
        ({"sim_model": "llama-3-8B"}, r"did you mean 'llama-3-8b'\?"),
        ({"sim_tp": 0}, ">= 1"),
    ],
)
def test_settings_say_what_is_allowed(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sim(**settings)
