"""What an engine leaves when it dies: the events of the last minutes, and what was under way.

Mirrors SGLang's `crash_dump_folder`, which pickles the requests of the last five minutes; here the events are a
recording that `sgviz.load` reads, and the live requests stand beside it as JSON. Imports: events, recording.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sgviz.errors import SgvizError, StartupError
from sgviz.events import RingSink
from sgviz.recording import Header
from sgviz.recording.store import StoredRun, write

log = logging.getLogger(__name__)

MINUTES = 5
MOST_EVENTS = 200_000  # some 30 MB
SETTLE_S = 0.3  # for the last events of the other processes, and those of the requests that end by the death
JOIN_S = 20.0

LiveRequest = dict[str, Any]  # as the request log tells it, with what was answered so far


class CrashDump:
    """Writes one dump, from a thread of its own, so that nobody waits for it but the end of the program.

    Args:
        header: of the recording; given what was lost before its first event.

    Raises:
        StartupError: nothing can be written into `folder`.
    """

    def __init__(self, folder: str, ring: RingSink, header: Callable[[int], Header]) -> None:
        self._folder = Path(folder)
        self._ring = ring
        self._header = header
        self._thread: threading.Thread | None = None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StartupError(f"crash_dump_folder {folder!r} cannot be used: {error}") from None
        if not os.access(self._folder, os.W_OK):
            raise StartupError(f"crash_dump_folder {folder!r} cannot be used: it is not writable")

    def start(self, why: str, live: Sequence[LiveRequest]) -> None:
        """Write the dump of a death by `why`, which found `live` requests; a second death is not written."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(why, list(live)), name="sgviz-crash-dump")
            self._thread.start()

    def join(self) -> None:
        """Wait for the dump, if one is being written."""
        if self._thread is not None:
            self._thread.join(JOIN_S)

    def _run(self, why: str, live: list[LiveRequest]) -> None:
        time.sleep(SETTLE_S)
        stem = self._folder / f"sgviz-crash-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        try:
            count = self._write_events(stem.with_suffix(".sgv"))
            told = {"why": why, "unix_s": time.time(), "settings": self._header(0).settings, "live": live}
            stem.with_suffix(".json").write_bytes(
                msgspec.json.format(msgspec.json.encode(told, enc_hook=str))
            )
        except (OSError, SgvizError) as error:
            log.error("the crash dump could not be written: %s", error)
        else:
            log.critical(
                "crash dump: %s.sgv (%d events), %d live requests in %s.json", stem, count, len(live), stem
            )

    def _write_events(self, path: Path) -> int:
        events = self._ring.snapshot()
        first = events[-1].t - MINUTES * 60 * 1_000_000_000 if events else 0
        kept = [event for event in events[-MOST_EVENTS:] if event.t >= first]
        write(path, StoredRun(self._header(self._ring.dropped + len(events) - len(kept)), kept, [], 0))
        return len(kept)
