"""The command `sgviz`. Each subcommand lives in `sgviz.cli`; nothing heavy is imported before it is chosen."""

from __future__ import annotations

import argparse
import importlib
import os
import select
import sys
from collections.abc import Sequence

from sgviz import __version__
from sgviz.errors import SgvizError

# name -> (module, one line)
COMMANDS = {
    "demo": ("sgviz.cli.demo", "answer one chat request and show its journey"),
    "serve": ("sgviz.cli.serve", "run an OpenAI-compatible server"),
    "router": ("sgviz.cli.router", "stand in front of prefill and decode servers"),
    "chat": ("sgviz.cli.chat", "talk to a model in the terminal"),
    "bench": ("sgviz.cli.bench", "load a running server and measure it"),
    "explain": ("sgviz.cli.explain", "say where the time of a recorded request went"),
    "diff": ("sgviz.cli.diff", "compare two recordings of the same workload"),
    "export": ("sgviz.cli.export", "write a recording for Perfetto, OpenTelemetry, Parquet, CSV"),
    "report": ("sgviz.cli.report", "write one HTML file about a recording"),
    "lab": ("sgviz.cli.lab", "open JupyterLab on the notebooks"),
    "doctor": ("sgviz.cli.doctor", "say what this machine has"),
}
INTERRUPTED = 130
READER_LEFT = 141  # as a shell says it of a program that SIGPIPE ended


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit code. Errors that sgviz raises on purpose are one sentence."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    if not arguments or arguments[0] not in COMMANDS:
        parser.parse_args(arguments)
        parser.print_help()
        return 0 if not arguments else 2
    try:
        command = importlib.import_module(
            COMMANDS[arguments[0]][0]
        )  # takes a second: Ctrl-C may come here too
        code: int = command.main(arguments[1:])
        sys.stdout.flush()
        return code
    except SgvizError as error:
        print(f"sgviz {arguments[0]}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        if not _reader_left():
            raise
        return READER_LEFT
    except KeyboardInterrupt:
        print(f"sgviz {arguments[0]}: interrupted", file=sys.stderr)
        return INTERRUPTED
    finally:
        _forget_interrupt()


def _forget_interrupt() -> None:
    """Leave with the exit code that was chosen, also after a Ctrl-C in code that `exec` ran (dataclasses are so made).

    CPython notes such a KeyboardInterrupt as unhandled, whoever catches it, and would end by the signal; it forgets
    the note when it runs another text.
    """
    exec("")


def _reader_left() -> bool:
    """Whether it is standard output that nobody reads any more (`| head`); then the rest goes nowhere."""
    watch = select.poll()
    watch.register(sys.stdout.fileno(), select.POLLOUT)
    if not any(flags & (select.POLLERR | select.POLLHUP) for _, flags in watch.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def _parser() -> argparse.ArgumentParser:
    lines = "\n".join(f"  {name:8} {text}" for name, (_, text) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="sgviz",
        description="An LLM serving pipeline in the shape of SGLang whose every decision is an event.",
        epilog=f"commands:\n{lines}\n\n`sgviz COMMAND --help` says more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="sgviz COMMAND [options]",
    )
    parser.add_argument("--version", action="version", version=f"sgviz {__version__}")
    parser.add_argument("command", nargs="?", choices=list(COMMANDS), help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
