"""What one streamed chunk costs the API process: its CPU time over the SSE chunks it sent, events on.

    python benchmarks/chunk_cost.py [--streams 64] [--tokens 300] [--rounds 5] [--floor] [--profile FILE] [--json]

A server process (`sgviz serve`, mock device without device time, the tiny model's tokenizer) streams `streams`
answers of `/v1/chat/completions` at once, round after round. The API process is the one that serves HTTP and holds
the TokenizerManager; scheduler and detokenizer are others and don't count. Its user and system time comes from the
operating system, so other load on the machine matters little. Printed: the median over the rounds in microseconds a
chunk, with the range. Target: 60.

`--floor` measures a bare ASGI app under the same server library that sends as many chunks of the same size at the pace
of tokens: what no code of ours can go below. `--profile` writes cProfile's figures of the API process (which slow it).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

TARGET_US = 60.0
MODEL = "tiny-llama"
READY = re.compile(rb"ready: https?://([\d.]+):(\d+)")
WARM_TOKENS = 20
SERVE = "import sys; from sgviz.__main__ import main; sys.exit(main(sys.argv[1:]))"
PROFILED = """
import cProfile, sys, threading
from sgviz.__main__ import main
from sgviz.launch.loop_thread import LoopThread
profile, run = cProfile.Profile(), LoopThread._run
LoopThread._run = lambda self: profile.runcall(run, self)
try:
    code = main(sys.argv[2:])
finally:
    profile.dump_stats(sys.argv[1])
sys.exit(code)
"""
BARE = """
import asyncio, sys
from sgviz.serving.server import ServerHandle, loop_factory
async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        while (message := await receive())["type"] != "lifespan.shutdown":
            await send({"type": "lifespan.startup.complete"})
        return await send({"type": "lifespan.shutdown.complete"})
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    for _ in range(int(sys.argv[1])):
        await send({"type": "http.response.body", "body": b"data: " + b"x" * 230 + b"\\n\\n", "more_body": True})
        await asyncio.sleep(0.004)
    await send({"type": "http.response.body", "body": b"", "more_body": False})
async def main():
    handle = await ServerHandle.start(app)
    print("ready:", handle.url, flush=True)
    await asyncio.Event().wait()
with asyncio.Runner(loop_factory=loop_factory()) as runner:
    runner.run(main())
"""


@contextmanager
def serving(command: list[str]) -> Iterator[tuple[psutil.Process, str, int]]:
    """The server's process and address, from its ready line to the end of the block."""
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log) as process,
    ):
        assert process.stdout is not None
        try:
            found = next((m for line in process.stdout if (m := READY.search(line))), None)
            if found is None:
                log.seek(0)
                raise SystemExit(f"the server did not start:\n{log.read().decode()}")
            yield psutil.Process(process.pid), found[1].decode(), int(found[2])
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()


async def one_stream(host: str, port: int, tokens: int) -> int:
    """Run one stream; the number of its chunks."""
    body = json.dumps(
        {"model": MODEL, "messages": [{"role": "user", "content": "tell me"}], "max_tokens": tokens,
         "ignore_eos": True, "temperature": 0, "stream": True}
    ).encode()  # fmt: skip
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 20)
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body) + body
    )
    chunks, rest = 0, b""
    while piece := await reader.read(1 << 16):
        chunks += (rest + piece).count(b"data: ")
        rest = piece[-5:]
    writer.close()
    return chunks


async def one_round(host: str, port: int, streams: int, tokens: int) -> int:
    return sum(await asyncio.gather(*(one_stream(host, port, tokens) for _ in range(streams))))


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def measure(command: list[str], args: argparse.Namespace) -> list[float]:
    """Microseconds of the process's CPU a chunk, by round."""
    out = []
    with serving(command) as (process, host, port):
        asyncio.run(one_round(host, port, args.streams, WARM_TOKENS))
        for _ in range(args.rounds):
            before = cpu_s(process)
            chunks = asyncio.run(one_round(host, port, args.streams, args.tokens))
            out.append((cpu_s(process) - before) / chunks * 1e6)
    return out


def serve_command(profile: Path | None) -> list[str]:
    flags = ["serve", "--model-path", MODEL, "--device", "mock", "--port", "0", "--disable-radix-cache"]
    if profile is None:
        return [sys.executable, "-c", SERVE, *flags]
    return [sys.executable, "-c", PROFILED, str(profile.resolve()), *flags]


def told(name: str, costs: list[float]) -> dict[str, Any]:
    result = {"median_us": statistics.median(costs), "least_us": min(costs), "most_us": max(costs)}
    print(
        f"{name}: {result['median_us']:.1f} us of CPU a chunk ({min(costs):.1f} to {max(costs):.1f})",
        file=sys.stderr,
    )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--floor", action="store_true")
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    out = {"target_us": TARGET_US, "streams": args.streams, "cpus": os.cpu_count()}
    out["sgviz"] = told("sgviz", measure(serve_command(args.profile), args))
    if args.floor:
        out["floor"] = told(
            "server library alone", measure([sys.executable, "-c", BARE, str(args.tokens)], args)
        )
    if args.json:
        print(json.dumps(out, indent=2))


if __name__ == "__main__":
    main()
