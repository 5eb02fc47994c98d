"""One short check of everything that needs a GPU: worker, streams, sampler; ids and logprobs against the CPU.

    python benchmarks/device_check.py [--model NAME ...] [--json FILE]

Meant for a machine with one CUDA GPU and nothing but this repository and its dependencies; runs in a few minutes
and needs no network for the tiny models in `data/`. The default model is checked where its cache lies at hand.
Every check prints a line; the exit code is the number of checks that failed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "worker"))
import itertools

from hand_driver import HandDriver, make_req

from sgviz.engine import Engine
from sgviz.model.fetch import DEFAULT_MODEL, cache_dir, tiny_models
from sgviz.worker.tp_worker import TpModelWorker

NEAR = 1e-3  # ids may part where the CPU's two best logprobs are closer than this
TOKENS = 24
PROMPTS = ([5, 6, 7, 8, 9], [40] * 17, list(range(60, 100)), [200], list(range(3, 250)))


class Report:
    """Results by name; `check` runs one and never lets it end the others."""

    def __init__(self) -> None:
        self.results: dict[str, object] = {}
        self.failed = 0

    def check(self, name: str, work: Callable[[], object]) -> None:
        start = time.perf_counter()
        try:
            value, word = work(), "ok"
        except Exception as error:
            self.failed += 1
            traceback.print_exc()
            value, word = f"{type(error).__name__}: {error}", "FAILED"
        self.results[name] = value
        print(f"{word:6} {name} ({time.perf_counter() - start:.1f} s): {value}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--model", action="append", help="default: the tiny models, and SmolLM2 if it is cached"
    )
    parser.add_argument("--json", type=Path, help="also write the results there")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no usable GPU here: torch.cuda.is_available() is False")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    report = Report()
    for model in args.model or default_models():
        for page_size in (1, 16):
            report.check(
                f"{model} page {page_size}: ids as on the CPU", lambda m=model, p=page_size: same_ids(m, p)
            )
        report.check(f"{model}: sampling as on the CPU", lambda m=model: same_sampling(m))
        report.check(f"{model}: launches without a result between them", lambda m=model: chained(m))
        report.check(f"{model}: device intervals in order", lambda m=model: intervals(m))
        report.check(f"{model}: a failing forward is told", lambda m=model: failing(m))
        for loop in ("normal", "overlap"):
            report.check(f"{model}: engine, {loop} loop", lambda m=model, kind=loop: engine(m, kind))
        for dtype in ("float32", "bfloat16"):
            report.check(f"{model}: timings {dtype}", lambda m=model, kind=dtype: timings(m, kind))
    if args.json:
        args.json.write_text(json.dumps(report.results, indent=1))
    print(f"{report.failed} checks failed")
    raise SystemExit(report.failed)


def default_models() -> list[str]:
    cached = any(cache_dir().glob(f"models/{DEFAULT_MODEL}*"))
    return tiny_models() + ([DEFAULT_MODEL] if cached else [])


def worker(model: str, device: str, **settings: object) -> TpModelWorker:
    options: dict[str, object] = {"dtype": "float32", "max_total_tokens": 8192, **settings}
    return TpModelWorker(model, device=device, **options)  # type: ignore[arg-type]


def greedy_run(
    made: TpModelWorker, page_size: int = 1
) -> list[tuple[list[int], list[list[tuple[float, int]]]]]:
    """Ids and the two best logprobs of each step, by prompt."""
    reqs = [make_req(f"g{i}", ids, temperature=0.0, logprobs=2) for i, ids in enumerate(PROMPTS)]
    HandDriver(made, page_size=page_size).generate(reqs, TOKENS, 33)
    return [(list(req.output_ids), list(req.output_top_logprobs)) for req in reqs]


def same_ids(model: str, page_size: int) -> str:
    """Greedy ids equal the CPU's up to a near tie."""
    outputs = []
    for device in ("cpu", "cuda"):
        made = worker(model, device, page_size=page_size)
        outputs.append(greedy_run(made, page_size))
        made.close()
    ties = 0
    for (expected, best), (actual, _) in zip(*outputs):
        for at, (a, b) in enumerate(zip(expected, actual)):
            if a != b:
                gap = best[at][0][0] - best[at][1][0]
                assert gap < NEAR, f"position {at}: CPU {a}, GPU {b}, with a gap of {gap:.2e}"
                ties += 1
                break
    return f"{len(PROMPTS)} prompts of {TOKENS} tokens, {ties} parted at a near tie"


def same_sampling(model: str) -> str:
    """Seeds, penalties, filters and biases draw the same tokens, logprobs agree."""
    settings: Sequence[dict[str, object]] = (
        {"sampling_seed": 3, "top_p": 0.9},
        {"sampling_seed": 4, "repetition_penalty": 1.5, "frequency_penalty": 0.5},
        {"temperature": 0.0, "presence_penalty": 1.0, "min_new_tokens": 5},
        {"sampling_seed": 5, "top_k": 20, "temperature": 0.7, "logit_bias": {"7": 2.0}},
        {"sampling_seed": 6, "min_p": 0.1},
    )
    runs = []
    for device in ("cpu", "cuda"):
        made = worker(model, device)
        reqs = [make_req(f"s{i}", p, logprobs=2, **settings[i]) for i, p in enumerate(PROMPTS)]
        HandDriver(made).generate(reqs, TOKENS)
        runs.append([(list(req.output_ids), list(req.output_logprobs)) for req in reqs])
        made.close()
    same = sum(a[0] == b[0] for a, b in zip(*runs))
    assert same >= len(PROMPTS) - 1, f"only {same} of {len(PROMPTS)} draws agree: {runs}"
    worst = max(abs(x - y) for a, b in zip(*runs) if a[0] == b[0] for x, y in zip(a[1], b[1]))
    assert worst < 1e-2, f"logprobs differ by {worst}"
    return f"{same} of {len(PROMPTS)} equal (one may part at a boundary), logprobs within {worst:.1e}"


def chained(model: str) -> str:
    """Launched one behind the other with no result read: inputs come through the FutureMap on the device."""
    made = worker(model, "cuda")
    expected = [ids for ids, _ in greedy_run(made)]
    driver = HandDriver(made)
    reqs = [make_req(f"c{i}", ids, temperature=0.0) for i, ids in enumerate(PROMPTS)]
    start = time.perf_counter()
    launches = [made.launch(driver.extend(reqs))]
    launches += [made.launch(driver.decode(reqs)) for _ in range(TOKENS - 1)]
    enqueued = time.perf_counter() - start
    tokens = zip(*(launch.result().next_token_ids for launch in launches))
    done = time.perf_counter() - start
    made.close()
    assert [list(row) for row in tokens] == expected
    return f"{TOKENS} launches enqueued in {1000 * enqueued:.1f} ms, done after {1000 * done:.1f} ms"


def intervals(model: str) -> str:
    """Forward, sampling and copy of each batch on the host's clock: in order, and within the host's own bounds."""
    made = worker(model, "cuda")
    driver = HandDriver(made)
    reqs = [make_req(f"i{i}", ids, temperature=0.0) for i, ids in enumerate(PROMPTS)]
    before = time.monotonic_ns()
    results = [driver.step(driver.extend(reqs))] + [driver.step(driver.decode(reqs)) for _ in range(5)]
    after = time.monotonic_ns()
    made.close()
    slack = 2_000_000  # ns; the anchor is read on the host, so it is late by the way there
    edges = [edge for result in results for edge in (result.start_ns, result.end_ns)]
    assert all(a <= b + 1000 for a, b in itertools.pairwise(edges)), edges
    assert before - slack <= edges[0], (before, edges)
    assert edges[-1] <= after + slack, (after, edges)
    for result in results:
        parts = [result.start_ns, result.forward_end_ns, result.sample_start_ns, result.end_ns]
        parts += [result.copy_start_ns, result.copy_end_ns]
        assert all(a <= b + 1000 for a, b in itertools.pairwise(parts)), parts
    last = results[-1]
    spent = {
        "forward": last.forward_end_ns - last.start_ns,
        "sampling": last.end_ns - last.sample_start_ns,
        "copy": last.copy_end_ns - last.copy_start_ns,
    }
    words = ", ".join(f"{name} {ns / 1e6:.3f} ms" for name, ns in spent.items())
    return f"{len(results)} forwards within {(after - before) / 1e6:.1f} ms; the last: {words}"


def failing(model: str) -> str:
    """A broken launch raises in the launching process and leaves the next one alone (checked before the GPU)."""
    made = worker(model, "cuda")
    driver = HandDriver(made)
    good = make_req("good", PROMPTS[0], temperature=0.0)
    batch = driver.extend([make_req("bad", [1, 2, 3])])
    batch.input_ids.append(5)
    try:
        made.launch(batch)
    except ValueError as error:
        driver.step(driver.extend([good]))
        made.close()
        return f"{type(error).__name__}, and the next launch gave a token"
    raise AssertionError("a batch whose lists disagree was launched")


def engine(model: str, loop: str) -> str:
    """The whole pipeline on the GPU, against the CPU's ids."""
    outputs = []
    params = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    for device in ("cpu", "cuda"):
        settings = {"device": device, "dtype": "float32", "max_total_tokens": 8192, "event_loop": loop}
        with Engine(model, **settings) as made:  # type: ignore[arg-type]
            asked = [list(ids) for ids in PROMPTS]
            outputs.append(
                [out["output_ids"] for out in made.generate(input_ids=asked, sampling_params=params)]
            )
    same = sum(a == b for a, b in zip(*outputs))
    assert same >= len(PROMPTS) - 1, outputs
    return f"{same} of {len(PROMPTS)} equal"


def timings(model: str, dtype: str) -> dict[str, float]:
    """Median ms of a decode step by rows, device time, and of a prefill of 1,024 tokens."""
    made = worker(model, "cuda", dtype=dtype, max_total_tokens=65536)
    found: dict[str, float] = {}
    for rows in (1, 8, 32, 128):
        driver = HandDriver(made, rows=rows + 1)
        reqs = [
            make_req(f"t{i}", [3 + (i + j) % 250 for j in range(64)], temperature=0.0) for i in range(rows)
        ]
        driver.step(driver.extend(reqs))
        results = [driver.step(driver.decode(reqs)) for _ in range(20)]
        steps = [(result.end_ns - result.start_ns) / 1e6 for result in results[5:]]
        found[f"decode {rows}"] = round(statistics.median(steps), 3)
        made.forget([req.kv.req_pool_idx for req in reqs])
    prompt = [3 + j % 250 for j in range(1024)]
    results = [HandDriver(made).step(HandDriver(made).extend([make_req(f"p{i}", prompt)])) for i in range(4)]
    found["prefill 1024"] = round(statistics.median((r.end_ns - r.start_ns) / 1e6 for r in results[1:]), 3)
    made.close()
    return found


if __name__ == "__main__":
    main()
