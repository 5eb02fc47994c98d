"""Throughput and latency of `sgviz serve` over HTTP, streamed, from a client in a process of its own.

    python benchmarks/online.py [--concurrency 1 8 32] [--quantization w8a8_int8]
    python benchmarks/online.py --url http://127.0.0.1:30000

Without `--url` it starts a server, on a free port, and stops it at the end. Each of `concurrency` clients sends its
next request when its last one is answered. Prompts are cuts of the documentation that Python brings along, as
ids, each one used once, so the prefix cache finds nothing. The client parses only the last piece of an answer: it
shares the cores with the server.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2

START_S = 120.0
DATA = "data: "
DONE = "data: [DONE]"


@dataclass(slots=True, kw_only=True)
class Answer:
    """When the request went out and when each piece of its answer came, in seconds of one clock.

    A piece holds one token, or several if the stream fell behind.
    """

    sent: float
    pieces: list[float]
    tokens: int = 0

    @property
    def ttft(self) -> float:
        return self.pieces[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in itertools.pairwise(self.pieces)]


def main() -> None:
    args = parse_args()
    print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
    with server(args) as url:
        prompts = cuts(args)
        asyncio.run(load(url, [next(prompts)], 1, args.output_tokens))  # warm-up
        for repeat in range(args.repeats):
            for concurrency in args.concurrency:
                count = max(args.least_requests, 2 * concurrency)
                chosen = [next(prompts) for _ in range(count)]
                start = time.perf_counter()
                answers = asyncio.run(load(url, chosen, concurrency, args.output_tokens))
                print(line(repeat, concurrency, answers, time.perf_counter() - start), flush=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--url", help="a running server; default: start one")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--quantization", choices=("w8a8_int8",))
    parser.add_argument("--concurrency", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--least-requests", type=int, default=4, help="at least so many, and two a client")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--flag", action="append", default=[], help="for the server, like --flag=--page-size=16"
    )
    return parser.parse_args()


@contextmanager
def server(args: argparse.Namespace) -> Iterator[str]:
    """The address of a server that is ready."""
    if args.url:
        yield args.url
        return
    command = [sys.executable, "-m", "sgviz", "serve", "--model-path", args.model, "--port", "0", *args.flag]
    if args.quantization:
        command += ["--quantization", args.quantization]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        with log.open("w") as out:
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        try:
            yield _ready_url(process, log)
        finally:
            process.terminate()
            process.wait(60)


def _ready_url(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        found = re.search(r"ready: (http://\S+)/v1", log.read_text())
        if found:
            return found.group(1)
        if process.poll() is not None:
            raise SystemExit(f"the server ended with code {process.returncode}:\n{log.read_text()}")
        time.sleep(0.1)
    raise SystemExit(f"the server was not ready after {START_S:.0f} s:\n{log.read_text()}")


def cuts(args: argparse.Namespace) -> Iterator[list[int]]:
    """Prompts as ids, no two from the same place."""
    from pydoc_data.topics import topics

    from sgviz.model.fetch import resolve_model
    from sgviz.model.tokenizer import Tokenizer

    ids = Tokenizer.load(resolve_model(args.model)).encode("\n\n".join(topics[key] for key in sorted(topics)))
    for start in range(0, len(ids) - args.prompt_tokens, args.prompt_tokens):
        yield ids[start : start + args.prompt_tokens]


async def load(url: str, prompts: Sequence[list[int]], concurrency: int, tokens: int) -> list[Answer]:
    """Answer all prompts, `concurrency` at a time."""
    waiting, answers = list(prompts), []
    limits = httpx2.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    async with httpx2.AsyncClient(base_url=url, timeout=None, limits=limits, trust_env=False) as client:

        async def work() -> None:
            while waiting:
                answers.append(await ask(client, waiting.pop(), tokens))

        await asyncio.gather(*(work() for _ in range(concurrency)))
    return answers


async def ask(client: httpx2.AsyncClient, prompt: list[int], tokens: int) -> Answer:
    params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": params, "stream": True}
    answer = Answer(sent=time.perf_counter(), pieces=[])
    async with client.stream("POST", "/generate", json=body) as response:
        if response.status_code != 200:
            raise SystemExit(f"status {response.status_code}: {(await response.aread()).decode()}")
        last = ""
        async for text in response.aiter_lines():
            if text.startswith(DATA) and text != DONE:
                answer.pieces.append(time.perf_counter())
                last = text
    answer.tokens = json.loads(last.removeprefix(DATA))["meta_info"]["completion_tokens"]
    if answer.tokens != tokens:
        raise SystemExit(f"{answer.tokens} tokens came, {tokens} were asked for")
    return answer


def line(repeat: int, concurrency: int, answers: list[Answer], seconds: float) -> str:
    tokens = sum(answer.tokens for answer in answers)
    gaps = sorted(gap for answer in answers for gap in answer.gaps)
    ttft = sorted(answer.ttft for answer in answers)
    return (
        f"run {repeat + 1}  concurrency {concurrency:3}  requests {len(answers):3}  {tokens / seconds:7.1f} tok/s  "
        f"TTFT median {1000 * statistics.median(ttft):6.0f} ms  worst {1000 * ttft[-1]:6.0f} ms  "
        f"ITL median {1000 * statistics.median(gaps):6.1f} ms  p99 {1000 * gaps[int(0.99 * len(gaps))]:6.1f} ms"
    )


if __name__ == "__main__":
    main()
