"""`sgviz demo`: one chat request through the whole pipeline, and its journey on screen.

Components run in processes of their own, the request is a streamed POST by an HTTP client, and every
number shown comes from the recorded events. The tables and the figure are made from the file that was
written, so that they are what a reader of the file gets. Imports: engine, model.fetch, recording, viz.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from sgviz.cli.client import ChatClient, shown, text_of
from sgviz.cli.logs import configure_logging
from sgviz.cli.options import Parser
from sgviz.config import DEFAULT_MODEL
from sgviz.engine import Engine
from sgviz.errors import SgvizError
from sgviz.model.fetch import resolve_model
from sgviz.recording import Recording, load
from sgviz.viz.run_figure import run_figure
from sgviz.viz.terminal import iterations_table, journey_table, stages_table

DEFAULT_PROMPT = "What is the capital of France?"
RECORDING, FIGURE = "run.sgv", "run.png"
FIGURE_DPI = 150
NS_PER_MS = 1e6
SETTLE_S = 3.0  # the last events of other processes are at most this far behind the answer
POLL_S = 0.02
WIDE = 160  # columns when the output is no terminal


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    out = _folder(args.out)
    configure_logging("warning")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as orderly as Ctrl-C
    console = _console(to_stderr=args.json)
    with _started(args.model) as engine:
        reply, rid = _ask(engine, args, console)
        _settled(engine.recording(), rid).save(out / RECORDING)
    recording = load(out / RECORDING)
    run_figure(recording).savefig(out / FIGURE, dpi=FIGURE_DPI)
    if args.json:
        print(json.dumps(_as_json(reply, rid, recording, out)))
    else:
        _show(console, rid, recording, out)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="sgviz demo",
        description="Answer one chat request with a real pipeline and show its journey, type by type. "
        f"Writes {RECORDING} and {FIGURE}. The default model (98 MB) is fetched on first use.",
    )
    parser.add_argument(
        "--model", default=DEFAULT_MODEL, help="model name, folder or hub id (default: %(default)s)"
    )
    parser.add_argument("--prompt", default=DEFAULT_PROMPT, help="what to ask (default: %(default)s)")
    parser.add_argument(
        "--max-tokens", type=_positive, default=64, help="length of the answer at most (default: 64)"
    )
    parser.add_argument(
        "--out", default=".", help="folder for recording and figure (default: the current one)"
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON object on standard output instead of tables"
    )
    return parser


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _folder(path: str) -> Path:
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SgvizError(f"--out {path}: {error.strerror}; name a folder that can be written") from error
    if not os.access(folder, os.W_OK):
        raise SgvizError(f"--out {path}: nothing can be written there; name a folder that can be written")
    return folder


def _console(*, to_stderr: bool) -> Console:
    """As wide as the terminal or $COLUMNS; a file or pipe gets a fixed width."""
    stream = sys.stderr if to_stderr else sys.stdout
    return Console(file=stream, width=None if stream.isatty() or "COLUMNS" in os.environ else WIDE)


def _started(model: str) -> Engine:
    """A ready engine. The model is fetched before, so that its progress bar has the terminal to itself."""
    resolve_model(model)
    waiting = Console(stderr=True).status(f"starting the pipeline with {model}")
    with waiting if sys.stderr.isatty() else contextlib.nullcontext():
        return Engine(model, mode="processes", log_level="warning")


def _ask(engine: Engine, args: argparse.Namespace, console: Console) -> tuple[str, str]:
    """Send the prompt as a client would; returns the reply's text and its rid."""
    server = engine.serve(port=0)
    body = {
        "model": engine.settings.served_model_name,
        "messages": [{"role": "user", "content": args.prompt}],
        "max_tokens": args.max_tokens,
        "temperature": 0,
        "stream_options": {"include_usage": True},
    }
    console.print(f"[dim]POST {server.url}/v1/chat/completions[/dim]")
    console.print(f"[bold]user[/bold]       {args.prompt}", highlight=False)
    reply, rid = "", ""
    usage: dict[str, Any] = {}
    with ChatClient(server.url) as client:
        for chunk in client.stream(body):
            if not rid:
                console.print("[bold]assistant[/bold]  ", end="")
            rid = chunk["id"]
            reply += text_of(chunk)
            usage = chunk.get("usage") or usage
            console.out(shown(text_of(chunk)), end="", highlight=False)
    console.print(f"\n[bold]usage[/bold]      {_counted(usage)}\n", highlight=False)
    return reply, rid


def _counted(usage: dict[str, Any]) -> str:
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    of_them = f" ({cached} of them cached)" if cached else ""
    return f"{usage['prompt_tokens']} prompt tokens{of_them}, {usage['completion_tokens']} completion tokens"


def _settled(recording: Recording, rid: str) -> Recording:
    """The recording once every process has told of the request's end, the scheduler to its falling idle."""
    deadline = time.monotonic() + SETTLE_S
    while not _is_whole(recording.refresh(), rid) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return recording.freeze()


def _is_whole(recording: Recording, rid: str) -> bool:
    stats, events = recording.time_stats(rid), recording.events
    idle_ns = events.t_ns[events.kind == "loop.idle"].max()
    told = stats.completion and stats.output_streamed and stats.detokenized and stats.response_sent
    return bool(told and idle_ns >= stats.completion)


def _show(console: Console, rid: str, recording: Recording, out: Path) -> None:
    for table in (
        journey_table(recording.journey(rid)),
        iterations_table(recording.iterations),
        stages_table(recording.stages(rid)),
    ):
        console.print(table, "")
    dropped = f", {recording.dropped} events dropped" if recording.dropped else ""
    console.print(f"{len(recording)} events{dropped}  ->  {out / RECORDING}, {out / FIGURE}")


def _as_json(reply: str, rid: str, recording: Recording, out: Path) -> dict[str, Any]:
    """The whole as one object; times in ms, `t_ms` and `start_ms` since the request arrived.

    `total_ms` is end to end, the sum of the stages; `e2e_ms` ends in the engine, as in `Recording.requests`.
    """
    stats = recording.time_stats(rid)
    return {
        "reply": reply,
        "rid": rid,
        "types": [asdict(step) for step in recording.journey(rid)],
        "stages": [
            {
                "name": stage.name,
                "start_ms": (stage.start_ns - stats.created) / NS_PER_MS,
                "duration_ms": stage.duration_ns / NS_PER_MS,
            }
            for stage in recording.stages(rid)
        ],
        "total_ms": (stats.response_sent - stats.created) / NS_PER_MS,
        "e2e_ms": (stats.finished - stats.created) / NS_PER_MS,
        "iterations": json.loads(recording.iterations.to_json(orient="records")),
        "dropped_events": recording.dropped,
        "recording": str(out / RECORDING),
        "figure": str(out / FIGURE),
    }
