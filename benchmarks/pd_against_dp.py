"""One prefill and one decode server against `--dp-size 2`, on simulated devices: what clients of each wait for.

    python benchmarks/pd_against_dp.py TRACE.csv [--seconds 60] [--repeats 1] [--json]
    python benchmarks/pd_against_dp.py --generated          # a workload of the same shape, made here

Both shapes have two devices. `sgviz serve --disaggregation-mode prefill`, `... decode` and `sgviz router` in front of
them, then `sgviz serve --dp-size 2`, are processes as a user starts them; a client in this one sends each request when
the trace says and reads its answer streamed. Wall clock: the devices take as long as their cost models say, KV travels
at the rate of the device table's link, everything else is what this machine does. The shapes take turns, so a machine
that gets slower does so to both. The trace has columns arrived_at (s), num_prefill_tokens, num_decode_tokens; its first
`--seconds` are sent. Figures are the client's, but for the devices and the transfers: those are from the recordings.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pandas as pd

from sgviz.cli.bench_backends import Options, backend_of
from sgviz.cli.bench_client import Client
from sgviz.cli.bench_prompts import id_prompts
from sgviz.cli.bench_report import result_of
from sgviz.experiment.pair_trade import Trade
from sgviz.recording import PairedRecording, Recording, load, load_pair
from sgviz.recording.balance import imbalance
from sgviz.workload import LogNormal, Workload, poisson, trace

START_S, STOP_S = 120.0, 60.0
SINK_S = 1.0  # a recording is at most this far behind the answers
MAX_PROMPT, MAX_OUTPUT = 7000, 1000  # what the simulated context holds
RATE = 191 / 60  # requests/s of a conversation trace's first minute
WARM_UP = "warm-up"
DP, PD = "dp 2", "pd 1 + 1"
READY = re.compile(r'ready: (http://\S+)/v1|"url": ?"(http://[^"]+)"')
SHOWN = (
    *(f"{which}_{name}_ms" for name in ("ttft", "itl", "e2e_latency") for which in ("median", "p90", "p99")),
    "output_throughput", "duration",
)  # fmt: skip


def workload_of(args: argparse.Namespace) -> Workload:
    """The first seconds of the trace, or as many of its shape."""
    if args.generated:
        return poisson(
            rate=RATE,
            num_requests=max(2, round(RATE * args.seconds)),
            prompt_tokens=LogNormal(665, 0.9, 2, 4100),
            output_tokens=LogNormal(148, 0.8, 12, 600),
            seed=7,
        )
    whole = trace(args.trace, max_prompt_tokens=MAX_PROMPT, max_output_tokens=MAX_OUTPUT)
    first = tuple(each for each in whole.requests if each.at_s < args.seconds)
    return msgspec.structs.replace(whole, requests=first)


# ---------------------------------------------------------------- servers


@contextmanager
def command(*words: str, folder: Path, name: str) -> Iterator[str]:
    """`sgviz WORDS` in a process of its own; its address once it is ready. Ended, with its children, at the end."""
    log = folder / f"{name}.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "sgviz", *words],
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield _ready_url(process, log)
        process.terminate()
        if process.wait(STOP_S):
            raise SystemExit(f"{name} ended with code {process.returncode}:\n{log.read_text()}")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _ready_url(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if found := READY.search(log.read_text()):
            return found[1] or found[2]
        if process.poll() is not None:
            break
        time.sleep(0.05)
    raise SystemExit(f"{log.stem} is not ready:\n{log.read_text()}")


def serve(args: argparse.Namespace) -> tuple[str, ...]:
    device = ("--device", args.device, "--sim-model", args.sim_model)
    return ("serve", "--model-path", "tiny-llama", "--port", "0", "--log-level", "warning", *device)


@contextmanager
def pair(args: argparse.Namespace, folder: Path) -> Iterator[str]:
    """A prefill server, a decode server and the router's address."""
    flags = {"prefill": ("--disaggregation-bootstrap-port", "0"), "decode": ()}
    with ExitStack() as stack:
        urls = {}
        for side, own in flags.items():
            words = (
                *serve(args),
                "--disaggregation-mode",
                side,
                *own,
                "--record",
                str(folder / f"{side}.sgv"),
            )
            urls[side] = stack.enter_context(command(*words, folder=folder, name=side))
        words = ("router", "--port", "0", "--json", "--record", str(folder / "router.sgv"))
        to = ("--prefill", urls["prefill"], "--decode", urls["decode"])
        yield stack.enter_context(command(*words, *to, folder=folder, name="router"))


@contextmanager
def ranks(args: argparse.Namespace, folder: Path) -> Iterator[str]:
    """One server with two schedulers."""
    own = ("--dp-size", "2", "--load-balance-method", args.policy, "--record", str(folder / "ranks.sgv"))
    with command(*serve(args), *own, folder=folder, name="ranks") as url:
        yield url


def recorded(shape: str, folder: Path) -> Recording | PairedRecording:
    if shape == DP:
        return load(folder / "ranks.sgv")
    prefill, decode, router = [folder / f"{name}.sgv" for name in ("prefill", "decode", "router")]
    return load_pair(prefill, decode, router)


# ---------------------------------------------------------------- load and figures


async def drive(url: str, work: Workload) -> dict[str, Any]:
    """What the client measured, under bench_serving's names."""
    client = Client(url, backend_of("sglang"), Options(model="tiny-llama"))
    try:
        info = await client.get("/model_info") or {}
        prompts = id_prompts(work, int(info["vocab_size"]))
        warm = work.requests[0]
        await client.ask(WARM_UP, prompts[warm.rid][:64], 64, 4)
        begun = time.perf_counter()
        measured = await client.run(work, prompts)
        duration = time.perf_counter() - begun
    finally:
        await client.close()
    failed = [each for each in measured if not each.ok]
    if failed:
        raise SystemExit(f"{len(failed)} requests failed; {failed[0].rid}: {failed[0].error}")
    await asyncio.sleep(SINK_S)
    return result_of(measured, duration=duration, facts={})


def run(shape: str, args: argparse.Namespace, work: Workload, folder: Path) -> dict[str, Any]:
    """One shape, from its start to its end."""
    folder.mkdir(parents=True)
    before = cpu_seconds()
    with (ranks if shape == DP else pair)(args, folder) as url:
        result = asyncio.run(drive(url, work))
    cpu = cpu_seconds() - before
    found = recorded(shape, folder)
    devices = Trade({shape: found}).devices.loc[shape]
    numbers = {
        "cpu_s": cpu,
        **{name: result[name] for name in ("completed", "total_input_tokens", "total_output_tokens", *SHOWN)},
        "devices": {
            str(name): {key: float(row[key]) for key in row.index} for name, row in devices.iterrows()
        },
    }
    if isinstance(found, PairedRecording):
        return {**numbers, "transfer": transfer_of(found), "audit": str(found.audit())}
    return {**numbers, "imbalance": imbalance(found), "audit": str(found.audit())}


def cpu_seconds() -> float:
    """Of this process and of all children that have ended: where they are near cores times duration, the host was the
    bottleneck, and the figures are its."""
    used = [resource.getrusage(which) for which in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def transfer_of(found: PairedRecording) -> dict[str, float]:
    """How the KV travelled: from the first piece sent until all was in place, and what of it came after the prefill."""
    table = found.requests
    table = table[table.rid != WARM_UP]
    middle, worst = table.quantile(0.5, numeric_only=True), table.quantile(0.99, numeric_only=True)
    return {
        "requests": len(table),
        "bytes": float(table.transfer_bytes.sum()),
        "median_ms": float(middle.transfer_ms),
        "p99_ms": float(worst.transfer_ms),
        "median_after_prefill_ms": float(middle.after_prefill_ms),
        "p99_after_prefill_ms": float(worst.after_prefill_ms),
        "median_bytes_per_s": float(middle.bytes_per_s),
        "median_bootstrap_ms": float(middle.bootstrap_ms),
    }


def medians(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of the repeats of one shape."""
    return {name: float(pd.Series([row[name] for row in rows]).median()) for name in SHOWN}


def table(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    found = {shape: medians(rows) for shape, rows in runs.items()}
    lines = [f"{'':24}{DP:>12}{PD:>12}{'pd / dp':>10}"]
    for name in SHOWN:
        one, two = found[DP][name], found[PD][name]
        lines.append(f"{name:24}{one:12,.1f}{two:12,.1f}{two / one:10.2f}")
    for shape, rows in runs.items():
        last = rows[-1]
        for device, row in last["devices"].items():
            lines.append(
                f"{shape}, {device}: busy {row['busy_share']:.1%} of the time, {row['prompt_tokens']:,.0f} prompt "
                f"tokens, {row['output_tokens']:,.0f} output tokens, KV peak {row['kv_peak']:,.0f} of "
                f"{row['kv_tokens']:,.0f} tokens"
            )
        lines.append(f"{shape}: {last['cpu_s']:.0f} CPU seconds of the host, with the start of its processes")
        if "imbalance" in last:
            lines.append(
                f"{shape}: prompt tokens of the busiest rank: {last['imbalance']:.2f} times the mean"
            )
        if "transfer" in last:
            lines.append(_transfer_line(shape, last["transfer"]))
        lines.append(f"{shape}: {last['audit']}")
    return "\n".join(lines)


def _transfer_line(shape: str, moved: Mapping[str, float]) -> str:
    return (
        f"{shape}: {moved['bytes'] / 1e9:,.1f} GB of KV for {moved['requests']:.0f} requests; a transfer takes "
        f"{moved['median_ms']:.1f} ms (p99 {moved['p99_ms']:.1f}), {moved['median_bytes_per_s'] / 1e9:.1f} GB/s, and "
        f"ends {moved['median_after_prefill_ms']:.1f} ms (p99 {moved['p99_after_prefill_ms']:.1f}) after the prefill; "
        f"the handshake before it takes {moved['median_bootstrap_ms']:.1f} ms"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", nargs="?")
    parser.add_argument("--generated", action="store_true")
    parser.add_argument("--seconds", type=float, default=60.0, help="of arrivals (default: %(default)s)")
    parser.add_argument(
        "--repeats", type=int, default=1, help="of each shape, in turns (default: %(default)s)"
    )
    parser.add_argument(
        "--policy", default="auto", help="--load-balance-method of the ranks (default: %(default)s)"
    )
    parser.add_argument("--device", default="sim:a100-80g")
    parser.add_argument("--sim-model", default="llama-3-8b")
    parser.add_argument("--save", metavar="FOLDER", help="keep recordings and logs there")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    if bool(args.trace) == args.generated:
        parser.error("give a trace file or --generated")
    work, cpus, busy = workload_of(args), os.cpu_count(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(args.save or temporary)
        runs: dict[str, list[dict[str, Any]]] = {DP: [], PD: []}
        for repeat in range(args.repeats):
            for number, (shape, rows) in enumerate(runs.items()):
                rows.append(run(shape, args, work, folder / f"{repeat}-{number}"))
    if args.json:
        print(json.dumps({"workload": str(work), "cpus": cpus, "load": busy, "runs": runs}))
    else:
        print(
            f"{work}\n{cpus} CPUs, load {busy:.1f} before; {args.sim_model} on {args.device}, SIMULATED; wall clock"
        )
        print(table(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
