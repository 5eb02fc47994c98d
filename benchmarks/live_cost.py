"""What watching costs a server: throughput with one reader of `/sgviz/events` over none, on the same engine.

    python benchmarks/live_cost.py [--model smollm2-135m-instruct] [--pairs 9] [--only real|mock] [--json]

Two settings, the requests of `overhead.py`: the real model with 8 requests at a time, and the mock device (no device
time) with 64; HTTP `/generate`, components in processes. The reader is a process of its own that reads and discards.
Each pair runs the same requests once with and once without it, in an order that alternates. Printed: the median of the
pairwise ratios with its 95 % interval (bootstrap), and how many events a second were read. Targets: 0.97 (real
model), 0.93 (mock). Apart from that, the same load once beside a headless Chromium that shows `/viz`: its
processor time, and the throughput beside it (no target: browser and server share the machine).
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx2
import psutil
from overhead import interval, load

from sgviz.engine import Engine

TARGETS = {"real": 0.97, "mock": 0.93}
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome") or ""
CHUNK = 1 << 16
SETTLE_S = 4.0  # until a browser has drawn its page
LONGER = 4  # a browser is looked at for so many times a run


def read_and_discard(url: str, seq: int) -> None:
    """Read the events behind number `seq` until this process is ended; says when the stream is open."""
    place = urlsplit(url)
    assert place.hostname is not None
    link = http.client.HTTPConnection(place.hostname, place.port)
    link.request("GET", f"/sgviz/events?seq={seq}")
    stream = link.getresponse()
    print(stream.status, flush=True)
    while stream.read1(CHUNK):
        pass


@contextmanager
def reader(url: str, seq: int) -> Iterator[None]:
    """A process that does so, for as long as the block lasts."""
    command = [sys.executable, __file__, "--read", url, "--seq", str(seq)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            if process.stdout.readline() != "200\n":
                raise SystemExit(f"{url}/sgviz/events did not open")
            yield
            if process.poll() is not None:
                raise SystemExit("the reader ended before the load did")
        finally:
            process.kill()


@contextmanager
def browser(url: str) -> Iterator[psutil.Process]:
    """A headless Chromium that shows `/viz`, with a profile of its own."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = ["--headless=new", "--no-sandbox", "--remote-debugging-port=0", f"--user-data-dir={profile}"]
        command = [BROWSER, *flags, "--window-size=1400,1200", f"{url}/viz"]
        process = psutil.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            time.sleep(SETTLE_S)
            yield process
        finally:
            family = [*process.children(recursive=True), process]
            for each in family:
                each.kill()
            psutil.wait_procs(family)


def cpu_s(process: psutil.Process) -> float:
    """Processor time of it and its children so far."""
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def measure(engine: Engine, running: int, requests: int, tokens: int, pairs: int) -> dict[str, Any]:
    """Interleaved pairs on one engine; the first run of each kind is thrown away."""
    url = engine.serve(port=0).url
    seen: dict[bool, list[float]] = {True: [], False: []}
    events: list[float] = []

    def run(watched: bool) -> float:
        engine.flush_cache()
        if not watched:
            return asyncio.run(load(url, running, requests, tokens))
        before = engine.pipeline.ring.total
        with reader(url, before):
            start = time.perf_counter()
            rate = asyncio.run(load(url, running, requests, tokens))
            events.append((engine.pipeline.ring.total - before) / (time.perf_counter() - start))
        return rate

    for pair in range(pairs + 1):
        for watched in (True, False) if pair % 2 else (False, True):
            rate = run(watched)
            if pair:
                seen[watched].append(rate)
            print(
                f"  pair {pair}/{pairs} {'one reader' if watched else 'no reader '} {rate:8.1f} tok/s",
                file=sys.stderr,
            )
    ratios = [on / off for on, off in zip(seen[True], seen[False], strict=True)]
    low, high = interval(ratios)
    return {
        "tok_s_read": statistics.median(seen[True]),
        "tok_s_alone": statistics.median(seen[False]),
        "ratio": statistics.median(ratios),
        "ratio_low": low,
        "ratio_high": high,
        "events_s": statistics.median(events),
        **(beside_a_browser(engine, url, running, requests, tokens) if BROWSER else {}),
    }


def beside_a_browser(engine: Engine, url: str, running: int, requests: int, tokens: int) -> dict[str, float]:
    """The share of one core that Chromium takes while the load runs, and the throughput then."""
    engine.flush_cache()
    httpx2.get(
        f"{url}/sgviz/state", timeout=None, trust_env=False
    ).raise_for_status()  # all until now is folded once
    with browser(url) as process:
        idle, start = cpu_s(process), time.perf_counter()
        rate = asyncio.run(load(url, running, LONGER * requests, tokens))
        used, spent = cpu_s(process) - idle, time.perf_counter() - start
    return {"browser_cores": used / spent, "tok_s_browser": rate}


def say(name: str, found: dict[str, Any]) -> None:
    print(
        f"{name}: one reader over none {found['ratio']:.3f} [{found['ratio_low']:.3f}, {found['ratio_high']:.3f}] "
        f"(target {TARGETS[name]}), {found['tok_s_read']:.0f} against {found['tok_s_alone']:.0f} tok/s, "
        f"{found['events_s']:.0f} events/s read"
    )
    if "browser_cores" in found:
        print(
            f"{name}: a browser on /viz takes {found['browser_cores']:.2f} of a core, "
            f"{found['tok_s_browser']:.0f} tok/s beside it"
        )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--only", choices=("real", "mock"))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--read", help=argparse.SUPPRESS)
    parser.add_argument("--seq", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.read:
        read_and_discard(args.read, args.seq)
        return 0
    results = {}
    if args.only != "mock":
        with Engine(args.model, mode="processes", log_level="warning") as engine:
            results["real"] = measure(engine, running=8, requests=16, tokens=32, pairs=args.pairs)
    if args.only != "real":
        with Engine(args.model, mode="processes", device="mock", log_level="warning") as engine:
            results["mock"] = measure(engine, running=64, requests=256, tokens=64, pairs=args.pairs)
    if args.json:
        print(json.dumps(results))
        return 0
    for name, found in results.items():
        say(name, found)
    if not BROWSER:
        print("no chromium here: what a browser takes was not measured")
    return 0


if __name__ == "__main__":
    sys.exit(main())
