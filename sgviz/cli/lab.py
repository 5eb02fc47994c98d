"""`sgviz lab`: JupyterLab on the notebooks, with this Python as their kernel.

JupyterLab runs in this very process, so no signal has to be passed on and no process can be left behind; the
first Ctrl-C ends it and its kernels. Imports: serving (the port), cli.options, errors, jupyterlab.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import shutil
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from sgviz.cli.options import LAST_PORT, Parser
from sgviz.errors import SgvizError
from sgviz.serving.server import check_address

HOST = "127.0.0.1"
FIRST = "01_one_request.ipynb"


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog="sgviz lab", description="Open JupyterLab on the notebooks. Ctrl-C ends it.")
    parser.add_argument(
        "--port", type=int, metavar="N", help="port of JupyterLab, 0 for a free one (default: its own choice)"
    )
    parser.add_argument(
        "--no-browser", action="store_true", help="open no browser; the address is printed either way"
    )
    parser.add_argument(
        "--dir",
        metavar="FOLDER",
        help="work on copies in this folder, made if need be; what lies there already is kept "
        "(default: the notebooks of the checkout themselves)",
    )
    args = parser.parse_args(argv)
    if args.port is not None and not 0 <= args.port <= LAST_PORT:
        parser.error(f"--port {args.port} is not between 0 and {LAST_PORT}")
    if importlib.util.find_spec("jupyterlab") is None:
        raise SgvizError(
            f"JupyterLab is not installed for {sys.executable}; `pip install jupyterlab` does that"
        )
    source = notebooks_dir()
    port = _port(args.port)
    folder = working_copy(source, Path(args.dir).expanduser()) if args.dir else source
    print(f"JupyterLab on {folder}; Ctrl-C ends it", flush=True)
    # kernels of this environment go before those that the user has for other Pythons
    os.environ.setdefault("JUPYTER_PREFER_ENV_PATH", "1")
    signal.signal(signal.SIGINT, _as_sigterm)
    sys.argv = ["jupyter-lab", *lab_options(folder, port, browser=not args.no_browser)]
    runpy.run_module("jupyterlab", run_name="__main__", alter_sys=True)
    return 0


def notebooks_dir() -> Path:
    """The folder beside the package, as in a checkout.

    Raises:
        SgvizError: the package was installed without it.
    """
    folder = Path(__file__).resolve().parents[2] / "notebooks"
    if not folder.is_dir():
        raise SgvizError(
            f"there are no notebooks at {folder}: they come with a checkout of sgviz, installed with `pip install -e .`"
        )
    return folder


def working_copy(source: Path, target: Path) -> Path:
    """`target` with a copy of every notebook of `source` that it lacks; says how many.

    Raises:
        SgvizError: it cannot be written.
    """
    try:
        target.mkdir(parents=True, exist_ok=True)
        missing = [each for each in sorted(source.glob("*.ipynb")) if not (target / each.name).exists()]
        for notebook in missing:
            shutil.copyfile(notebook, target / notebook.name)
    except OSError as error:
        raise SgvizError(
            f"cannot copy the notebooks to {str(target)!r}: {error.strerror or error}"
        ) from error
    print(f"{len(missing)} notebooks copied to {target}; what was there is unchanged")
    return target.resolve()


def lab_options(folder: Path, port: int | None, *, browser: bool) -> list[str]:
    """The command line of JupyterLab. `port`: this one or none; None: 8888, or a free one if it is taken."""
    found = [
        f"--ServerApp.ip={HOST}",
        f"--ServerApp.root_dir={folder}",
        "--ServerApp.answer_yes=True",  # else Ctrl-C in a terminal asks, and goes on if nobody answers
    ]
    if (folder / FIRST).is_file():
        found.append(f"--LabApp.default_url=/lab/tree/{FIRST}")
    if port is not None:
        found += [f"--ServerApp.port={port}", "--ServerApp.port_retries=0"]
    if not browser:
        found.append("--no-browser")
    if os.geteuid() == 0:
        found.append("--allow-root")  # whoever runs this as root runs everything here as root
    return found


def _port(wanted: int | None) -> int | None:
    """The port to ask for: free, if one was named; JupyterLab itself would print the address of port 0."""
    if wanted is None:
        return None
    if wanted:
        check_address(HOST, wanted)
        return wanted
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        free: int = probe.getsockname()[1]
        return free


def _as_sigterm(number: int, frame: FrameType | None) -> None:
    """Without a terminal JupyterLab has no handler for SIGINT and would end without ending its kernels."""
    os.kill(os.getpid(), signal.SIGTERM)
