"""The stages of one request, from its stamps: a pure fold, used live (`meta_info`) and on recordings.

A stamp is monotonic nanoseconds, 0 when not reached. The stages of a finished request lie end to end
between `created` and its last stamp, so their durations add up to the whole by construction.
Names are those of SGLang's time_stats where it has one.

Imports: msgspec only.
"""

from __future__ import annotations

import msgspec


class TimeStats(msgspec.Struct, kw_only=True, array_like=True):
    """The stamps of one request in the order in which they are reached (monotonic ns, 0: not yet)."""

    created: int = 0
    tokenize_start: int = 0
    tokenize_finish: int = 0
    api_server_dispatch: int = 0
    scheduler_recv: int = 0
    wait_queue_entry: int = 0
    forward_entry: int = 0
    prefill_finished: int = 0
    completion: int = 0
    output_streamed: int = 0
    detokenized: int = 0
    finished: int = 0
    response_sent: int = 0
    # beside the line: the first token's arrival at the tokenizer manager, and the sum over stays in the queue
    first_token: int = 0
    queue_ns: int = 0


class Stage(msgspec.Struct, frozen=True):
    """One interval of a request's life: `name`, `start_ns` (absolute), `duration_ns`."""

    name: str
    start_ns: int
    duration_ns: int


# the stage that ends at each stamp
STAGES: tuple[tuple[str, str], ...] = (
    ("tokenize_start", "convert"),
    ("tokenize_finish", "tokenize"),
    ("api_server_dispatch", "api_server_dispatch"),
    ("scheduler_recv", "to_scheduler"),
    ("wait_queue_entry", "request_process"),
    ("forward_entry", "prefill_waiting"),
    ("prefill_finished", "prefill_forward"),
    ("completion", "decode"),
    ("output_streamed", "output_stream"),
    ("detokenized", "detokenize"),
    ("finished", "to_tokenizer_manager"),
    ("response_sent", "respond"),
)


def stages(stats: TimeStats) -> list[Stage]:
    """The stages reached so far, end to end. A stamp that was skipped gives no stage of its own.

    Without `created` (a recording that began later) the first stamp there is begins the first stage.
    """
    out: list[Stage] = []
    last = stats.created
    for stamp, name in STAGES:
        at: int = getattr(stats, stamp)
        if at and not last:
            last = at
        elif at:
            at = max(at, last)  # two processes may stamp within the same tick
            out.append(Stage(name, last, at - last))
            last = at
    return out


def end_to_end_ns(stats: TimeStats) -> int:
    """From `created` to the last stamp reached; the sum of `stages`."""
    return sum(stage.duration_ns for stage in stages(stats))
