"""`sgviz demo`: one chat request through the whole pipeline, and its journey on screen.

Components run in processes of their own, the request is a streamed POST by an HTTP client, and every
number shown comes from the recorded events. Imports: engine, recording, viz.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from sgviz.cli.client import ChatClient, text_of
from sgviz.cli.logs import configure_logging
from sgviz.config import DEFAULT_MODEL
from sgviz.engine import Engine
from sgviz.errors import SgvizError
from sgviz.recording import Recording
from sgviz.viz.run_figure import run_figure
from sgviz.viz.terminal import iterations_table, journey_table, stages_table

DEFAULT_PROMPT = "What is the capital of France?"
RECORDING, FIGURE = "run.sgv", "run.png"
FIGURE_DPI = 150
LAST_KINDS = {"response.finished", "request.finished", "output.streamed", "text.emitted", "tokens.sampled"}
SETTLE_S = 3.0  # the last events of other processes are at most this far behind the answer
POLL_S = 0.02
WIDE = 160  # columns when the output is no terminal


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    out = _folder(args.out)
    configure_logging("warning")
    console = Console(stderr=args.json, width=None if sys.stdout.isatty() else WIDE)
    with console.status(f"starting the pipeline with {args.model}") if sys.stderr.isatty() else _quiet():
        engine = Engine(args.model, mode="processes", log_level="warning")
    with engine:
        reply, rid = _ask(engine, args, console)
        recording = _settled(engine.recording(), rid)
    recording.save(out / RECORDING)
    run_figure(recording).savefig(out / FIGURE, dpi=FIGURE_DPI)
    if args.json:
        print(json.dumps(_as_json(reply, rid, recording, out)))
    else:
        _show(console, rid, recording, out)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
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
    return folder


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
    console.print("[bold]assistant[/bold]  ", end="")
    reply, rid = "", ""
    with ChatClient(server.url) as client:
        for chunk in client.stream(body):
            rid = chunk["id"]
            reply += text_of(chunk)
            console.print(text_of(chunk), end="", markup=False, highlight=False)
    console.print("\n")
    return reply, rid


def _settled(recording: Recording, rid: str) -> Recording:
    """The recording once every process has told of the request's end."""
    deadline = time.monotonic() + SETTLE_S
    while time.monotonic() < deadline:
        frozen = recording.freeze()
        if set(frozen.events_of(rid)["kind"]) >= LAST_KINDS:
            return frozen
        time.sleep(POLL_S)
    return recording.freeze()


def _show(console: Console, rid: str, recording: Recording, out: Path) -> None:
    console.print(journey_table(recording.journey(rid)))
    console.print(iterations_table(recording.iterations))
    console.print(stages_table(recording.stages(rid)))
    dropped = f", {recording.dropped} events dropped" if recording.dropped else ""
    console.print(f"{len(recording)} events{dropped}  ->  {out / RECORDING}, {out / FIGURE}")


def _as_json(reply: str, rid: str, recording: Recording, out: Path) -> dict[str, Any]:
    types = [
        {
            "type": step.type,
            "component": step.component,
            "pid": step.pid,
            "t_ms": step.t_ms,
            "holds": step.holds,
        }
        for step in recording.journey(rid)
    ]
    stages = [
        {"name": stage.name, "start_ms": (stage.start_ns - recording.stages(rid)[0].start_ns) / 1e6,
         "duration_ms": stage.duration_ns / 1e6}
        for stage in recording.stages(rid)
    ]  # fmt: skip
    return {
        "reply": reply,
        "rid": rid,
        "types": types,
        "stages": stages,
        "e2e_ms": sum(stage["duration_ms"] for stage in stages),
        "iterations": json.loads(recording.iterations.to_json(orient="records")),
        "dropped_events": recording.dropped,
        "recording": str(out / RECORDING),
        "figure": str(out / FIGURE),
    }


class _quiet:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...
