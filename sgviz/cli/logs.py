"""Logging of the main process, in the same form as the children's. Imports: nothing of sgviz."""

from __future__ import annotations

import logging
import sys


def configure_logging(level: str) -> None:
    """Log to standard error with a prefix for the component."""
    logging.basicConfig(
        level=level.upper(),
        format="[%(asctime)s main] %(levelname)s %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
    )
    for noisy in ("httpx", "httpx2", "httpcore", "httpcore2", "asyncio", "uvicorn.error"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
