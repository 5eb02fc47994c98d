"""sgviz bench: what a client measures of answers made by hand, the layout and keys of the result, and real servers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import msgspec
import pytest

from sgviz.__main__ import main as sgviz
from sgviz.cli import bench
from sgviz.cli.bench_answers import Measured, Tokens, share_out
from sgviz.cli.bench_backends import BACKENDS, Options, backend_of
from sgviz.cli.bench_client import _events
from sgviz.cli.bench_report import result_of, table
from sgviz.engine import Engine
from sgviz.errors import BadRequest

NAMES = ("mean", "median", "std", "p90", "p95", "p99")


def measured_of(tokens: Tokens, latency: float) -> Measured:
    out = Measured("r", 5, latency=latency)
    tokens.into(out)
    return out


# ---------------------------------------------------------------- one answer


def test_native_chunks_are_cumulative_and_a_gap_is_shared_by_the_tokens_of_its_chunk() -> None:
    backend, tokens = backend_of("sglang"), Tokens()
    for now, text, total in ((0.5, "", 1), (1.0, "ab", 2), (1.0 + 0.3, "abcd", 5), (2.0, "abcdef", 6)):
        meta = {"prompt_tokens": 9, "completion_tokens": total, "cached_tokens": 4}
        backend.take(msgspec.json.encode({"text": text, "meta_info": meta}), now, tokens)
    out = measured_of(tokens, 2.0)
    # the first chunk had no text: nothing was seen until 1.0, when two tokens were there
    assert out.ttft == 1.0 and out.counts == [2, 3, 1]
    assert out.itl == pytest.approx([0.1, 0.1, 0.1, 0.7])
    assert (out.prompt_tokens, out.output_tokens, out.cached_tokens, out.text) == (9, 6, 4, "abcdef")


def test_the_role_chunk_is_no_first_token() -> None:
    backend, tokens = backend_of("sglang-oai-chat"), Tokens()
    chunks = [
        (0.1, {"choices": [{"delta": {"role": "assistant", "content": ""}}]}),
        (0.4, {"choices": [{"delta": {"reasoning_content": "hm"}}]}),
        (0.6, {"choices": [{"delta": {"content": "yes sir"}}]}),
        (0.7, {"choices": [{"delta": {}, "finish_reason": "stop"}]}),
        (0.8, {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 9}}),
    ]
    for now, chunk in chunks:
        backend.take(msgspec.json.encode(chunk), now, tokens)
    out = measured_of(tokens, 0.6)
    assert out.ttft == 0.4 and out.text == "hmyes sir" and out.output_tokens == 9
    # without counts by chunk, characters share the tokens out: 2 and 7
    assert out.counts == [2, 7] and out.itl == pytest.approx([0.2 / 7] * 7)


def test_usage_of_every_chunk_gives_exact_counts() -> None:
    backend, tokens = backend_of("sglang-oai"), Tokens()
    for now, text, total in ((0.2, "a long first piece", 1), (0.8, "b", 4)):
        usage = {
            "prompt_tokens": 3,
            "completion_tokens": total,
            "prompt_tokens_details": {"cached_tokens": 2},
        }
        backend.take(msgspec.json.encode({"choices": [{"text": text}], "usage": usage}), now, tokens)
    out = measured_of(tokens, 0.8)
    assert out.counts == [1, 3] and out.itl == pytest.approx([0.2] * 3) and out.cached_tokens == 2


def test_an_error_in_a_stream_is_raised() -> None:
    for name in ("sglang", "sglang-oai"):
        with pytest.raises(Exception, match="went wrong"):
            backend_of(name).take(b'{"error": {"message": "went wrong"}}', 1.0, Tokens())


@pytest.mark.parametrize(
    ("total", "weights", "parts"),
    [
        (9, [2, 7], [2, 7]),
        (3, [1, 1], [2, 1]),
        (0, [4], [0]),
        (5, [], []),
        (7, [1, 1, 1], [2, 3, 2]),
        (4, [0, 0], [0, 0]),
    ],
)
def test_sharing_out_loses_nothing(total: int, weights: list[int], parts: list[int]) -> None:
    assert share_out(total, weights) == parts


async def _cut(data: bytes, at: int) -> list[bytes]:
    async def pieces():
        for start in range(0, len(data), at):
            yield data[start : start + at]

    return [event async for event in _events(pieces())]


@pytest.mark.parametrize("at", [1, 2, 3, 7, 100])
def test_events_are_found_however_the_bytes_are_cut(at: int) -> None:
    import asyncio

    data = b'data: {"a": 1}\n\n: comment\n\ndata: {"b": "x y"}\n\ndata: [DONE]\n\n'
    assert asyncio.run(_cut(data, at)) == [b'{"a": 1}', b'{"b": "x y"}', b"[DONE]"]


def test_bodies_say_what_was_asked() -> None:
    options = Options(model="m", extra={"top_k": 4})
    native = backend_of("sglang").body("r1", [1, 2], 7, options)
    assert native["input_ids"] == [1, 2] and native["rid"] == "r1" and native["top_k"] == 4
    assert native["sampling_params"]["max_new_tokens"] == 7 and native["sampling_params"]["ignore_eos"]
    text = backend_of("sglang-oai").body("r1", [1, 2], 7, options)
    assert text["prompt"] == [1, 2] and text["max_tokens"] == 7 and text["stream_options"]["include_usage"]
    chat = backend_of("sglang-oai-chat").body("r1", "hi", 7, Options(model="m", stream=False))
    assert chat["messages"] == [{"role": "user", "content": "hi"}] and "stream_options" not in chat
    with pytest.raises(BadRequest, match="sglang-oai"):
        backend_of("sglang-oia")
    assert {"sglang", "sglang-oai", "sglang-oai-chat"} <= set(BACKENDS)


# ---------------------------------------------------------------- the result


def two_answers() -> dict[str, object]:
    one = Measured("a", 10, 100.0, 0.2, 1.2, 11, itl=[0.1] * 10, stamps=[0.2, 1.2], counts=[1, 10])
    two = Measured("b", 30, 100.5, 0.4, 0.9, 6, itl=[0.1] * 5, stamps=[0.4, 0.9], counts=[1, 5])
    bad = Measured("c", 99, 100.0, error="status 500")
    facts = {"tag": None, "backend": "sglang", "request_rate": math.inf, "max_concurrency": 2}
    return result_of([one, two, bad], duration=2.0, facts=facts)


def test_the_numbers_are_those_of_bench_serving() -> None:
    result = two_answers()
    assert (result["completed"], result["failed"]) == (2, 1)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (40, 17)
    assert result["request_throughput"] == 1.0 and result["output_throughput"] == 8.5
    assert result["input_throughput"] == 20.0 and result["total_throughput"] == 28.5
    assert result["mean_ttft_ms"] == pytest.approx(300) and result["median_e2e_latency_ms"] == pytest.approx(
        1050
    )
    assert result["mean_tpot_ms"] == pytest.approx(100) and result["p99_itl_ms"] == pytest.approx(100)
    assert result["concurrency"] == pytest.approx(1.05) and result["max_concurrent_requests"] == 2
    # chunks came 0, 0.7, 1.0 and 1.2 s after the first one
    assert result["max_output_tokens_per_s"] == 15
    for name in ("e2e_latency", "ttft", "tpot", "itl"):
        assert {f"{which}_{name}_ms" for which in NAMES} <= set(result)


def test_the_table_has_the_layout_of_bench_serving() -> None:
    lines = table(two_answers()).splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert lines[1] == "Backend:                                 sglang    "
    labels = [line[:40].strip() for line in lines]
    order = [
        "Backend:", "Traffic request rate:", "Max request concurrency:", "Successful requests:",
        "Benchmark duration (s):", "Total input tokens:", "Total generated tokens:",
        "Request throughput (req/s):", "Input token throughput (tok/s):", "Output token throughput (tok/s):",
        "Peak output token throughput (tok/s):", "Peak concurrent requests:", "Total token throughput (tok/s):",
        "Concurrency:", "Mean E2E Latency (ms):", "P99 E2E Latency (ms):", "Mean TTFT (ms):", "Mean TPOT (ms):",
        "Mean ITL (ms):", "Max ITL (ms):",
    ]  # fmt: skip
    assert [labels.index(label) for label in order] == sorted(labels.index(label) for label in order)
    assert "---------------Time to First Token----------------" in lines
    assert lines[-1] == "=" * 50 and "Output token throughput (tok/s):         8.50      " in lines


def test_without_streaming_nothing_is_said_of_first_tokens() -> None:
    whole = Measured("a", 10, 100.0, 1.2, 1.2, 11, stamps=[1.2], counts=[11], streamed=False)
    result = result_of([whole], duration=2.0, facts={})
    assert math.isnan(result["mean_ttft_ms"]) and math.isnan(result["mean_tpot_ms"])
    assert result["mean_e2e_latency_ms"] == pytest.approx(1200)


# ---------------------------------------------------------------- options


def options(*argv: str) -> object:
    return bench.workload_of(bench._parser().parse_args(argv))


def test_options_make_the_workload_of_bench_serving() -> None:
    made = options("--num-prompts", "50", "--random-input-len", "100", "--random-range-ratio", "0.5")
    assert len(made.requests) == 50 and made.concurrency == 50
    assert all(50 <= request.prompt_tokens <= 100 for request in made.requests)
    assert options("--num-prompts", "5", "--request-rate", "3").requests[-1].at_s > 0
    assert options("--num-prompts", "5", "--max-concurrency", "2").concurrency == 2
    shared = options("--dataset-name", "generated-shared-prefix", "--gsp-num-groups", "3")
    assert len(shared.requests) == 48 and len({request.group for request in shared.requests}) == 3
    with pytest.raises(BadRequest, match="dataset-path"):
        options("--dataset-name", "trace")
    with pytest.raises(BadRequest, match="ratio"):
        options("--random-range-ratio", "2")


def test_a_mistyped_option_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["--num-promts", "5"])
    assert "--num-prompts" in capsys.readouterr().err


def test_nobody_there_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert sgviz(["bench", "--port", "9", "--ready-check-timeout-sec", "0"]) == 1
    assert "no server answers" in capsys.readouterr().err


# ---------------------------------------------------------------- a real server


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    path = tmp_path_factory.mktemp("bench") / "server.sgv"
    with Engine("tiny-llama", device="mock", event_loop="overlap", record=str(path)) as engine:
        yield engine.serve(port=0).url, path


def run(capsys: pytest.CaptureFixture[str], url: str, *more: str) -> dict[str, object]:
    small = [
        "--num-prompts",
        "12",
        "--random-input-len",
        "30",
        "--random-output-len",
        "9",
        "--max-concurrency",
        "4",
    ]
    code = bench.main(["--base-url", url, "--json", *small, *more])
    result = json.loads(capsys.readouterr().out)
    assert code == 0 and result["failed"] == 0, result["first_error"]
    return result


@pytest.mark.parametrize("backend", ["sglang", "sglang-oai", "sglang-oai-chat"])
def test_a_server_is_measured_and_its_events_are_joined(
    served: tuple[str, Path], capsys: pytest.CaptureFixture[str], backend: str
) -> None:
    url, path = served
    result = run(capsys, url, "--backend", backend, "--output-details")
    wanted = options("--num-prompts", "12", "--random-input-len", "30", "--random-output-len", "9")
    assert result["completed"] == 12 and result["total_output_tokens"] == wanted.output_tokens
    assert result["output_lens"] == [request.output_tokens for request in wanted.requests]
    if backend != "sglang-oai-chat":  # there the template adds its own
        assert result["input_lens"] == [request.prompt_tokens for request in wanted.requests]
    assert all(len(itl) < max(1, length) for itl, length in zip(result["itls"], result["output_lens"]))
    assert 0 < result["mean_ttft_ms"] <= result["mean_e2e_latency_ms"]
    assert result["max_concurrent_requests"] <= 4
    server = result["server"]
    assert server["joined"] == 12 and server["recording"] == path.name and server["dropped_events"] == 0
    assert 0 <= server["mean_server_e2e_ms"] <= result["mean_e2e_latency_ms"]


def test_whole_answers_results_files_and_the_table(
    served: tuple[str, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    url, path = served
    out = tmp_path / "results.jsonl"
    result = run(
        capsys,
        url,
        "--disable-stream",
        "--no-join",
        "--flush-cache",
        "--output-file",
        str(out),
        "--tag",
        "t1",
    )
    assert result["mean_ttft_ms"] is None and result["server"] is None and result["request_rate"] == "inf"
    again = ["--base-url", url, "--num-prompts", "3", "--random-output-len", "4", "--random-input-len", "8"]
    assert sgviz(["bench", *again, "--output-file", str(out), "--recording", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "Serving Benchmark Result" in printed and "Requests joined:                         3" in printed
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["tag"] for line in lines] == ["t1", None] and lines[1]["completed"] == 3


def test_a_server_that_refuses_is_reported(
    served: tuple[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    url, _ = served
    small = ["--base-url", url, "--num-prompts", "2", "--random-input-len", "8", "--random-output-len", "4"]
    code = bench.main([*small, "--json", "--warmup-requests", "0", "--temperature", "-1"])
    captured = capsys.readouterr()
    assert code == 1 and "temperature" in captured.err and json.loads(captured.out)["failed"] == 2
    assert sgviz(["bench", *small, "--temperature", "-1"]) == 1
    assert "warm-up" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["nope", "localhost:30000", "ftp://host", "http://", "http://a:b"])
def test_what_is_no_url_is_told_before_anybody_waits(capsys: pytest.CaptureFixture[str], url: str) -> None:
    assert sgviz(["bench", "--base-url", url, "--ready-check-timeout-sec", "1e9"]) == 1
    assert f"{url!r} is no URL of a server" in capsys.readouterr().err
