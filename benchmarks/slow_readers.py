"""What clients that read slowly cost the others: throughput beside 50 of them over throughput without.

    python benchmarks/slow_readers.py [--readers 50] [--pairs 9] [--json]

The mock device (a fixed time a step), components in processes, a server as `sgviz serve` makes it. A slow reader asks
for a long streamed answer and reads one chunk of it a second over a connection with the smallest receive buffer; its
answer is made before the others begin, so all that is left of it is the reading. Each pair runs the same requests of
the others once beside the slow readers and once without, in an order that alternates; printed is the median of the
pairwise ratios with its 95 % interval (bootstrap), once of the throughput and once of the slowest gaps between two
pieces (p99), and what the server's memory grew by while 50 answers waited. Target: 0.95 of the throughput.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import httpx2
import psutil
from online import Answer, ask
from overhead import interval

from sgviz.engine import Engine

TARGET = 0.95
SLOW_TOKENS = 400  # each piece has the whole text so far, so such an answer is more than sockets hold
SMALL_BUFFER = 4096  # bytes: the kernel makes no smaller one
PAUSE_S = 1.0
EVENT_END = b"\n\n"


class SlowReader:
    """A client that reads one chunk, waits, and reads the next.

    Attributes:
        raw: the bytes of the body so far, as they came.
        chunks: events read.
    """

    def __init__(
        self, url: str, body: dict[str, Any], path: str = "/generate", pause_s: float = PAUSE_S
    ) -> None:
        self._url, self._path, self._pause_s = urlsplit(url), path, pause_s
        self._body = json.dumps({**body, "stream": True}).encode()
        self._writer: asyncio.StreamWriter | None = None
        self.raw, self.chunks, self.status = b"", 0, 0

    async def open(self) -> None:
        """Send the request and read until the first event has come."""
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (self._url.hostname, self._url.port))
        self._reader, self._writer = await asyncio.open_connection(sock=sock, limit=SMALL_BUFFER)
        head = [
            f"POST {self._path} HTTP/1.1", f"Host: {self._url.netloc}", "Content-Type: application/json",
            f"Content-Length: {len(self._body)}", "Connection: close", "", "",
        ]  # fmt: skip
        self._writer.write("\r\n".join(head).encode() + self._body)
        answered = await self._reader.readuntil(b"\r\n\r\n")
        self.status = int(answered.split(b" ", 2)[1])
        await self._chunk()

    async def read_slowly(self) -> None:
        """One chunk a pause, until it is cancelled or the answer has ended."""
        while not self._reader.at_eof():
            await asyncio.sleep(self._pause_s)
            await self._chunk()

    async def read_rest(self) -> str:
        """The rest at once; the data of the last event."""
        while piece := await self._reader.read(1 << 16):
            self.raw += piece
        await self.close()
        events = [line for line in _unchunked(self.raw).decode().split("\n\n") if line]
        assert events[-1] == "data: [DONE]", events[-1][:200]
        return events[-2].removeprefix("data: ")

    async def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    async def _chunk(self) -> None:
        """One event, which may be longer than the buffer of the reader."""
        seen = b""
        while EVENT_END not in seen and (piece := await self._reader.read(SMALL_BUFFER)):
            seen += piece
        self.raw += seen
        self.chunks += bool(seen)


def _unchunked(raw: bytes) -> bytes:
    """The body without the lengths of chunked transfer coding."""
    out, at = b"", 0
    while at < len(raw):
        end = raw.index(b"\r\n", at)
        size = int(raw[at:end], 16)
        out += raw[end + 2 : end + 2 + size]
        at = end + 2 + size + 2
    return out


def slow_body(number: int, tokens: int = SLOW_TOKENS) -> dict[str, Any]:
    params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    return {"input_ids": [20 + number] * 8, "sampling_params": params}


@asynccontextmanager
async def beside(readers: Sequence[SlowReader]) -> AsyncIterator[None]:
    """Opens them, and reads slowly for as long as the block lasts."""
    await asyncio.gather(*(reader.open() for reader in readers))
    tasks = [asyncio.create_task(reader.read_slowly()) for reader in readers]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until_made(url: str) -> None:
    """Wait until the engine works on no request any more."""
    async with httpx2.AsyncClient(base_url=url, trust_env=False, timeout=30) as client:
        while (await client.get("/server_info")).json()["internal_states"][0]["num_live_reqs"]:
            await asyncio.sleep(0.05)


async def others(url: str, requests: int, running: int, tokens: int) -> list[Answer]:
    """Streamed answers, `running` at a time."""
    waiting, answers = [[100 + number] * 16 for number in range(requests)], []
    limits = httpx2.Limits(max_connections=running, max_keepalive_connections=running)
    async with httpx2.AsyncClient(base_url=url, timeout=None, limits=limits, trust_env=False) as client:

        async def work() -> None:
            while waiting:
                answers.append(await ask(client, waiting.pop(), tokens))

        await asyncio.gather(*(work() for _ in range(running)))
    return answers


async def run(url: str, args: argparse.Namespace, pids: Sequence[int], *, slow: bool) -> SimpleNamespace:
    """The others once: tokens a second, p99 of their gaps (ms), and what memory grew by (MiB)."""
    readers = [SlowReader(url, slow_body(number)) for number in range(args.readers if slow else 0)]
    before = resident(pids)
    async with beside(readers):
        await until_made(url)
        grown = resident(pids) - before
        start = time.perf_counter()
        answers = await others(url, args.requests, args.running, args.tokens)
        seconds = time.perf_counter() - start
        still = sum(reader.status == 200 and reader.chunks > 0 for reader in readers)
    assert still == len(readers), [reader.raw[:200] for reader in readers if reader.status != 200]
    for reader in readers:
        await reader.close()
    gaps = sorted(gap for answer in answers for gap in answer.gaps)
    return SimpleNamespace(
        rate=sum(answer.tokens for answer in answers) / seconds,
        p99=1e3 * gaps[int(0.99 * len(gaps))],
        grown=grown,
    )


def resident(pids: Sequence[int]) -> float:
    """MiB in memory of these processes."""
    return sum(psutil.Process(pid).memory_info().rss for pid in pids) / 2**20


def measure(engine: Engine, args: argparse.Namespace) -> dict[str, float]:
    """Interleaved pairs; the first one is thrown away."""
    url = engine.serve(port=0).url
    pids = [process.pid for process in psutil.Process().children()] + [psutil.Process().pid]
    seen: dict[bool, list[SimpleNamespace]] = {True: [], False: []}
    for pair in range(args.pairs + 1):
        for slow in (True, False) if pair % 2 else (False, True):
            found = asyncio.run(run(url, args, pids, slow=slow))
            if pair:
                seen[slow].append(found)
            what = f"beside {args.readers} slow readers" if slow else "without"
            told = f"{found.rate:8.1f} tok/s, p99 {found.p99:.1f} ms, {found.grown:+.0f} MiB"
            print(f"  pair {pair}/{args.pairs} {what:24} {told}", file=sys.stderr)
    ratios = [beside.rate / alone.rate for beside, alone in zip(seen[True], seen[False], strict=True)]
    gaps = [beside.p99 / alone.p99 for beside, alone in zip(seen[True], seen[False], strict=True)]
    low, high = interval(ratios)
    return {
        "ratio": statistics.median(ratios), "ratio_low": low, "ratio_high": high,
        "gap_ratio": statistics.median(gaps),
        "tok_s_beside": statistics.median(each.rate for each in seen[True]),
        "tok_s_alone": statistics.median(each.rate for each in seen[False]),
        "grown_mib": max(each.grown for each in seen[True]),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--readers", type=int, default=50)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--running", type=int, default=8)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--step-ms", type=float, default=20.0, help="of the mock device")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    settings: dict[str, Any] = {"device": "mock", "mock_step_ms": args.step_ms, "log_level": "warning"}
    with Engine("tiny-llama", mode="processes", max_running_requests=64, **settings) as engine:
        found = measure(engine, args)
    if args.json:
        print(json.dumps(found))
        return 0
    print(
        f"beside {args.readers} slow readers over without: {found['ratio']:.3f} [{found['ratio_low']:.3f}, "
        f"{found['ratio_high']:.3f}] of the throughput (target {TARGET}), {found['tok_s_beside']:.0f} against "
        f"{found['tok_s_alone']:.0f} tok/s; p99 of the gaps {found['gap_ratio']:.2f} times; "
        f"{found['grown_mib']:.0f} MiB more memory while their answers wait"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
