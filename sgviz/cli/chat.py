"""`sgviz chat`: talk to a model in the terminal, on a server that runs or on an engine of its own. Imports: engine."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from sgviz.cli.client import ChatClient, shown, text_of
from sgviz.cli.logs import configure_logging
from sgviz.cli.options import Parser
from sgviz.config import DEFAULT_MODEL
from sgviz.errors import SgvizError

HELP = "/reset starts over, /exit (or Ctrl-D) ends, /help says this; Ctrl-C stops an answer."


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    configure_logging("warning")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as orderly as Ctrl-C
    with _server(args) as url, ChatClient(url, args.api_key) as client:
        model = args.model if args.url and args.model else client.first_model()
        print(f"{model} at {url}. {HELP}")
        _talk(client, model, args)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="sgviz chat", description="Talk to a model in the terminal.")
    parser.add_argument(
        "--url", help="a running server, e.g. http://127.0.0.1:30000; default: start an engine"
    )
    parser.add_argument("--api-key", help="key for --url")
    parser.add_argument(
        "--model",
        help=f"model of the engine to start (default: {DEFAULT_MODEL}), or to ask for at --url (default: its first)",
    )
    parser.add_argument("--system", help="a system message")
    parser.add_argument(
        "--max-tokens", type=int, default=512, help="length of an answer at most (default: 512)"
    )
    parser.add_argument("--temperature", type=float, default=0.7, help="0 is deterministic (default: 0.7)")
    return parser


@contextlib.contextmanager
def _server(args: argparse.Namespace) -> Iterator[str]:
    """The server's address without /v1."""
    if args.url:
        yield args.url.rstrip("/").removesuffix("/v1")
        return
    from sgviz.engine import Engine

    name = args.model or DEFAULT_MODEL
    print(f"starting {name} ...", file=sys.stderr)
    with Engine(name, mode="processes", log_level="warning") as engine:
        yield engine.serve(port=0).url


def _talk(client: ChatClient, model: str, args: argparse.Namespace) -> None:
    opening = [{"role": "system", "content": args.system}] if args.system else []
    messages = list(opening)
    while (line := _line()) is not None:
        if line == "/exit":
            return
        if line == "/reset":
            messages = list(opening)
        elif line.startswith("/"):
            print(HELP if line == "/help" else f"there is no {line.split()[0]}; {HELP}")
        elif line:
            messages.append({"role": "user", "content": line})
            answer = _answer(client, model, messages, args)
            messages = [*messages, {"role": "assistant", "content": answer}] if answer else messages[:-1]


def _line() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        print()
        return None


def _answer(client: ChatClient, model: str, messages: list[dict[str, Any]], args: argparse.Namespace) -> str:
    """Print the answer as it comes; Ctrl-C keeps what came, an error is said and the talk goes on."""
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
    }
    text = ""
    try:
        for chunk in client.stream(body):
            text += text_of(chunk)
            print(shown(text_of(chunk)), end="", flush=True)
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    except SgvizError as error:
        print(f"[{error}]", end="", file=sys.stderr)
    print()
    return text
