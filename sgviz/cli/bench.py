"""`sgviz bench`: a load test of a running server, from the client's side.

Options, output names and the result file are those of SGLang's bench_serving, as far as they matter here; any
server with the same endpoints can be measured. Where the server is an sgviz one of this machine that writes a
recording (`sgviz serve --record`), its events are joined to the requests by rid. Imports: workload, experiment.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2
import msgspec

from sgviz import workload as workloads
from sgviz.cli.bench_answers import Measured
from sgviz.cli.bench_backends import BACKENDS, Options, Prompt, backend_of
from sgviz.cli.bench_client import Client
from sgviz.cli.bench_prompts import count_tokens, id_prompts, text_prompts
from sgviz.cli.bench_report import Result, details_of, join, result_of, table
from sgviz.cli.options import Parser
from sgviz.errors import BadRequest, SgvizError, Unavailable
from sgviz.experiment.progress import shown
from sgviz.workload import Length, Workload

DATASETS = ("random-ids", "generated-shared-prefix", "trace")
SINK_S = 0.6  # a server's recording is at most this far behind its answers
READY_POLL_S = 0.5


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    result = asyncio.run(_bench(args))
    text = msgspec.json.encode(_plain(result))
    if args.output_file:
        _append(Path(args.output_file), text)
    print(text.decode() if args.json else table(result))
    if result["failed"]:
        print(f"sgviz bench: {result['failed']} requests failed: {result['first_error']}", file=sys.stderr)
    return 0 if result["completed"] else 1


# ---------------------------------------------------------------- options


def _parser() -> Parser:
    parser = Parser(
        prog="sgviz bench",
        description="Load a running server and measure it as its clients feel it. Options and output are those of "
        "SGLang's bench_serving.",
    )
    _server_options(parser.add_argument_group("server"))
    _load_options(parser.add_argument_group("load"))
    _output_options(parser.add_argument_group("output"))
    return parser


def _server_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--backend", choices=list(BACKENDS), default="sglang", help="endpoint (default: %(default)s)"
    )
    group.add_argument("--base-url", help="server without /v1; goes before --host and --port")
    group.add_argument("--host", default="127.0.0.1", help="default: %(default)s")
    group.add_argument("--port", type=int, default=30000, help="default: %(default)s")
    group.add_argument("--api-key", help="bearer key")
    group.add_argument("--model", help="name to ask for (default: the first that the server lists)")
    group.add_argument(
        "--vocab-size", type=int, help="ids of prompts lie below (default: as an sgviz server says)"
    )
    group.add_argument(
        "--ready-check-timeout-sec", type=float, default=60.0, help="default: %(default)s; 0: none"
    )


def _load_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--dataset-name", choices=DATASETS, default="random-ids", help="default: %(default)s")
    group.add_argument(
        "--dataset-path", help="file of --dataset-name trace (arrived_at, num_prefill_tokens, ...)"
    )
    group.add_argument("--num-prompts", type=int, help="requests (default: 1000, or all of a trace)")
    group.add_argument("--random-input-len", type=int, default=1024, help="default: %(default)s")
    group.add_argument("--random-output-len", type=int, default=1024, help="default: %(default)s")
    group.add_argument(
        "--random-range-ratio", type=float, default=0.0, help="lengths from LEN x this to LEN (default: 0)"
    )
    group.add_argument("--gsp-num-groups", type=int, default=64, help="default: %(default)s")
    group.add_argument("--gsp-prompts-per-group", type=int, default=16, help="default: %(default)s")
    group.add_argument("--gsp-system-prompt-len", type=int, default=2048, help="default: %(default)s")
    group.add_argument("--gsp-question-len", type=int, default=128, help="default: %(default)s")
    group.add_argument("--gsp-output-len", type=int, default=256, help="default: %(default)s")
    group.add_argument(
        "--request-rate",
        type=float,
        default=math.inf,
        help="arrivals a second, Poisson (default: all at once)",
    )
    group.add_argument(
        "--trace-time-scale", type=float, default=1.0, help="2: the trace's gaps twice as long"
    )
    group.add_argument("--max-concurrency", type=int, help="requests at a time at most")
    group.add_argument("--seed", type=int, default=42, help="default: %(default)s")
    group.add_argument("--temperature", type=float, default=0.0, help="default: %(default)s")
    group.add_argument("--top-p", type=float, default=1.0, help="default: %(default)s")
    group.add_argument(
        "--disable-ignore-eos", action="store_true", help="let answers end before their length"
    )
    group.add_argument("--disable-stream", action="store_true", help="whole answers: no TTFT, TPOT and ITL")
    group.add_argument(
        "--extra-request-body", type=_object, default={}, help="JSON object added to every body"
    )
    group.add_argument("--warmup-requests", type=int, default=1, help="default: %(default)s")
    group.add_argument("--flush-cache", action="store_true", help="empty the server's prefix cache first")


def _output_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--output-file", help="append the result as one JSON line")
    group.add_argument("--output-details", action="store_true", help="with the lists of all requests")
    group.add_argument("--tag", help="a name in the result")
    group.add_argument(
        "--json", action="store_true", help="the JSON line on standard output instead of the table"
    )
    group.add_argument("--recording", help="the server's .sgv file (default: the one it says it writes)")
    group.add_argument("--no-join", action="store_true", help="leave the server's events alone")


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return found


def workload_of(args: argparse.Namespace) -> Workload:
    """The workload that the options describe. BadRequest names what is wrong."""
    if not 0.0 <= args.random_range_ratio <= 1.0:
        raise BadRequest(f"--random-range-ratio is {args.random_range_ratio}; it lies between 0 and 1")
    rate = None if args.request_rate == math.inf else args.request_rate
    common: dict[str, Any] = {"seed": args.seed, "concurrency": args.max_concurrency}
    if args.dataset_name == "trace":
        if not args.dataset_path:
            raise BadRequest("--dataset-name trace needs --dataset-path FILE")
        return workloads.trace(
            args.dataset_path, limit=args.num_prompts, time_scale=args.trace_time_scale, **common
        )
    if args.dataset_name == "generated-shared-prefix":
        return workloads.shared_prefix(
            groups=args.gsp_num_groups, prompts_per_group=args.gsp_prompts_per_group,
            prefix_tokens=args.gsp_system_prompt_len, question_tokens=args.gsp_question_len,
            output_tokens=args.gsp_output_len, rate=rate, **common,
        )  # fmt: skip
    count = 1000 if args.num_prompts is None else args.num_prompts
    sizes: dict[str, Any] = {
        "num_requests": count,
        "prompt_tokens": _range(args.random_input_len, args.random_range_ratio),
        "output_tokens": _range(args.random_output_len, args.random_range_ratio),
    }
    if rate is None:
        common["concurrency"] = args.max_concurrency or max(1, count)
        return workloads.closed_loop(**sizes, **common)
    return workloads.poisson(rate=rate, **sizes, **common)


def _range(length: int, ratio: float) -> Length:
    return length if ratio == 1.0 else (max(1, int(length * ratio)), length)


# ---------------------------------------------------------------- run


async def _bench(args: argparse.Namespace) -> Result:
    workload, backend = workload_of(args), backend_of(args.backend)
    client = Client(_url(args), backend, Options(model=""), args.api_key)
    try:
        await _wait_ready(client, args.ready_check_timeout_sec)
        facts = await _facts(client)
        client.ask_with(_options(args, facts))
        prompts = await _prompts(args, workload, client, facts, takes_ids=backend.takes_ids)
        await _prepare(args, client, workload, prompts)
        prefix = f"bench-{uuid.uuid4().hex[:8]}-"
        with shown(False if args.json else None) as start:
            on_done = start("requests", len(workload.requests))
            begun = time.perf_counter()
            measured = await client.run(workload, prompts, on_done, prefix)
            duration = time.perf_counter() - begun
        result = result_of(measured, duration=duration, facts=_about(args, facts))
        result["total_output_tokens_retokenized"] = await _retokenized(measured, client.http)
        result["first_error"] = next((each.error for each in measured if not each.ok), None)
        result["server"] = await _server_side(args, facts, measured)
        return {**result, **details_of(measured)} if args.output_details else result
    finally:
        await client.close()


def _url(args: argparse.Namespace) -> str:
    """The server's address; BadRequest if it is none, before anybody waits for an answer."""
    given: str = args.base_url or f"http://{args.host}:{args.port}"
    try:
        url = httpx2.URL(given)
    except httpx2.InvalidURL as error:
        raise BadRequest(f"{given!r} is no URL of a server, like http://127.0.0.1:30000: {error}") from error
    if url.scheme not in ("http", "https") or not url.host:
        raise BadRequest(
            f"{given!r} is no URL of a server: it must begin with http:// or https:// and name a host"
        )
    return given.rstrip("/").removesuffix("/v1")


async def _wait_ready(client: Client, seconds: float) -> None:
    """Ask for the models until somebody answers."""
    begun, told = time.monotonic(), False
    while True:
        try:
            await client.get("/v1/models")
            return
        except Unavailable as error:
            # another certificate will not come by waiting
            if time.monotonic() > begun + seconds or "CERTIFICATE" in str(error):
                raise
            if not told:
                print(f"{error}; trying again for {seconds:.0f} s", file=sys.stderr)
                told = True
            await asyncio.sleep(READY_POLL_S)


async def _facts(client: Client) -> dict[str, Any]:
    """What the server says of itself: `models`, `model_info`, `server_info`, each empty if it does not."""
    pages = {"models": "/v1/models", "model_info": "/model_info", "server_info": "/server_info"}
    return {name: await client.get(path) or {} for name, path in pages.items()}


def _options(args: argparse.Namespace, facts: dict[str, Any]) -> Options:
    listed = facts["models"].get("data") or [{}]
    return Options(
        model=args.model or listed[0].get("id") or "default",
        stream=not args.disable_stream,
        ignore_eos=not args.disable_ignore_eos,
        temperature=args.temperature,
        top_p=args.top_p,
        extra=args.extra_request_body,
    )


async def _prompts(
    args: argparse.Namespace, workload: Workload, client: Client, facts: dict[str, Any], *, takes_ids: bool
) -> dict[str, Prompt]:
    if takes_ids:
        vocab = args.vocab_size or facts["model_info"].get("vocab_size")
        if not vocab:
            raise BadRequest("the server does not say how many token ids its model has; give --vocab-size")
        return id_prompts(workload, int(vocab))
    prompts, counted = await text_prompts(workload, client.http)
    if not counted:
        _say("the server has no /tokenize: prompts have as many words as tokens were asked for")
    return prompts


async def _prepare(
    args: argparse.Namespace, client: Client, workload: Workload, prompts: dict[str, Prompt]
) -> None:
    """Warm-up requests, then an empty cache if wanted. SgvizError if not even the warm-up works."""
    first = workload.requests[0]
    for number in range(args.warmup_requests):
        rid = f"bench-warmup-{uuid.uuid4().hex[:8]}-{number}"
        done = await client.ask(rid, prompts[first.rid], first.prompt_tokens, min(32, first.output_tokens))
        if not done.ok:
            raise SgvizError(f"the warm-up request failed: {done.error}")
    if args.flush_cache:
        response = await client.http.post("/flush_cache", params={"timeout": 5})
        if response.status_code != 200:
            raise SgvizError(
                f"the server did not empty its cache: {response.status_code} {response.text[:200]}"
            )


def _about(args: argparse.Namespace, facts: dict[str, Any]) -> dict[str, Any]:
    info = facts["server_info"]
    return {
        "tag": args.tag,
        "backend": args.backend,
        "dataset_name": args.dataset_name,
        "request_rate": "trace" if args.dataset_name == "trace" else args.request_rate,
        "max_concurrency": args.max_concurrency,
        "random_input_len": args.random_input_len,
        "random_output_len": args.random_output_len,
        "random_range_ratio": args.random_range_ratio,
        "seed": args.seed,
        "simulated": str(info.get("device", "")).startswith("sim:"),
        "server_info": info or None,
    }


async def _retokenized(measured: Sequence[Measured], http: httpx2.AsyncClient) -> int | None:
    """Tokens of the texts as the server's tokenizer counts them again; None where it has no /tokenize."""
    try:
        counts = await count_tokens([each.text for each in measured if each.text], http)
    except httpx2.TransportError:
        return None
    return None if counts is None else sum(counts)


async def _server_side(
    args: argparse.Namespace, facts: dict[str, Any], measured: Sequence[Measured]
) -> Result | None:
    """The join with the server's recording, where there is one that can be read from here."""
    told = facts["server_info"].get("record")
    path = args.recording or told
    if args.no_join or (args.recording is None and not (told and Path(told).is_file())):
        return None
    from sgviz.recording import load  # with pandas: not everybody who measures a server needs it

    await asyncio.sleep(SINK_S)
    found = join(measured, load(path))
    if not found["joined"]:
        _say(f"none of the requests is in {path}")
    return found


def _say(text: str) -> None:
    print(f"sgviz bench: {text}", file=sys.stderr)


def _plain(result: Result) -> Result:
    """What JSON has: no infinity (bench_serving writes the rate as text, too), NaN becomes null."""
    return {key: "inf" if value == math.inf else value for key, value in result.items()}


def _append(path: Path, line: bytes) -> None:
    try:
        with path.open("ab") as file:
            file.write(line + b"\n")
    except OSError as error:
        raise SgvizError(f"cannot write --output-file {str(path)!r}: {error.strerror}") from error
