"""What a prefill rank tells the bootstrap server of itself, and in what pieces its KV goes.

Imports: config, disaggregation, errors, worker protocol.
"""

from __future__ import annotations

import logging
import time
import uuid

from sgviz.config import Settings
from sgviz.disaggregation import shared_memory
from sgviz.disaggregation.bootstrap_client import put_rank
from sgviz.disaggregation.wire import Carrier, RankRoute
from sgviz.errors import SgvizError, StartupError
from sgviz.worker.protocol import KVLayout

log = logging.getLogger(__name__)
PIECE_BYTES = 16 << 20  # of a buffer: so many that what a piece costs beside its bytes is little
MOST_PIECE_TOKENS = 1024
WHOLE = 16  # a piece is a multiple of this many tokens where it can be, so that most pages are whole
TRIES, RETRY_S = 15, 1.0


def make_route(
    settings: Settings, layout: KVLayout, host: str, ports: tuple[int, int], dp_rank: int
) -> RankRoute:
    """How the rank is reached. Leaves a token in shared memory where KV may go through it.

    Args:
        ports: of the KV channel, and of the signs of life.

    Raises:
        StartupError: the settings want shared memory alone, and there is none.
    """
    backend = settings.disaggregation.disaggregation_transfer_backend
    token = uuid.uuid4().hex
    name = _leave_token(token, needed=backend == "shm") if backend in ("auto", "shm") else ""
    carriers: list[Carrier] = []
    if name:
        carriers.append("shm")
    if backend != "shm":
        carriers.append("tcp")
    return RankRoute(
        dp_rank=dp_rank,
        dp_size=settings.parallel.dp_size,
        rank_ip=host,
        rank_port=ports[0],
        heart_port=ports[1],
        page_size=settings.cache.page_size,
        tag=layout.tag,
        wire_bytes=layout.wire_bytes,
        follow_bootstrap_room=settings.parallel.load_balance_method in ("auto", "follow_bootstrap_room"),
        carriers=carriers,
        boot_id=shared_memory.boot_id() if name else "",
        token_name=name,
        token=token,
    )


def _leave_token(token: str, *, needed: bool) -> str:
    """The name of the file; "" where shared memory takes none and is not `needed`."""
    try:
        shared_memory.sweep()
        return shared_memory.write_token(token)
    except SgvizError as error:
        if needed:
            raise StartupError(f"disaggregation_transfer_backend shm: {error.message}") from error
        log.warning("KV goes over TCP: %s", error.message)
        return ""


def register(bootstrap: tuple[str, int], route: RankRoute) -> None:
    """Tell the bootstrap server, trying for a while. Raises StartupError."""
    for left in reversed(range(TRIES)):
        try:
            put_rank(*bootstrap, route)
            return
        except SgvizError as error:
            if not left:
                raise StartupError(f"prefill rank {route.dp_rank} cannot register: {error}") from error
        time.sleep(RETRY_S)


def piece_tokens_of(wire_bytes: int) -> int:
    """How many tokens a buffer holds."""
    if not wire_bytes:
        return MOST_PIECE_TOKENS
    tokens = max(1, min(MOST_PIECE_TOKENS, PIECE_BYTES // wire_bytes))
    return tokens - tokens % WHOLE if tokens > WHOLE else WHOLE
