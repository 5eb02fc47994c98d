"""What an event of the scheduler decided and why, as a sentence. SGLang has no counterpart. Imports: events."""

from __future__ import annotations

from sgviz.events import Event, Reason, schema

_UNITS = {
    Reason.KV: "KV tokens",
    Reason.ROWS: "rows",
    Reason.RUNNING_SLOTS: "running slots",
    Reason.CHUNK_BUDGET: "tokens of the chunk budget",
    Reason.PREFILL_BUDGET: "tokens of the prefill budget",
    Reason.MAX_REQUESTS: "requests in the batch",
}
_SHOWN = 6  # names of a list


def sentence(event: Event) -> str:
    """One line, e.g. `r3 was refused (kv): it needs 120 KV tokens, 80 are to be had; r1 holds 64`."""
    body = event.body
    match body:
        case schema.AdmitRefused():
            return _refused(body)
        case schema.AdmitOk():
            return _admitted(body)
        case schema.AdmitRepeated():
            return f"{body.rid} was refused {body.count} times more ({body.reason}), and that is over"
        case schema.ScanStopped(reason=Reason.OTHER_KIND):
            more = f", and {body.behind} more of its kind" if body.behind else ""
            return f"{body.rid} waits for a batch of its own kind{more}"
        case schema.ScanStopped():
            return f"the scan of the queue stopped at {body.rid} ({body.reason}); {body.behind} behind it wait untried"
        case schema.ChunkCut():
            return f"of {body.rid} the tokens {body.start} to {body.end} (of {body.total}) run in this batch"
        case schema.RequestRetracted() if body.preempted_by:
            return (
                f"{body.rid} made way after {body.output_tokens} output tokens for {body.preempted_by}, which has a "
                f"higher priority and needs {body.need} KV tokens, {body.have} were to be had"
            )
        case schema.RequestRetracted():
            return (
                f"{body.rid} was retracted after {body.output_tokens} output tokens: the next step needs {body.need} "
                f"KV tokens, {body.have} are to be had; new token ratio "
                f"{body.ratio_before:.3f} -> {body.ratio_after:.3f}"
            )
        case schema.TreeEvicted():
            return f"tree node {body.node} was evicted: {body.tokens} tokens, last used at step {body.last_access}"
        case _:
            return _others(event)


def _refused(body: schema.AdmitRefused) -> str:
    unit = _UNITS.get(body.reason, "")
    held = ", ".join(f"{rid} holds {amount}" for rid, amount in body.holders[:_SHOWN])
    need = f"it needs {body.need} {unit}, {body.have} are to be had".replace("  ", " ")
    return f"{body.rid} was refused ({body.reason}): {need}" + (f"; {held}" if held else "")


def _admitted(body: schema.AdmitOk) -> str:
    if not body.need:
        return f"{body.rid} goes on with {body.extend} tokens behind {body.prefix} (a continued chunk)"
    cut = ", cut to the chunk budget" if body.chunked else ""
    return (
        f"{body.rid} was admitted: {body.extend} new and {body.prefix} cached tokens{cut}; "
        f"{body.need} needed < {body.have} to be had, {body.rem_total} left"
    )


def _others(event: Event) -> str:
    body = event.body
    match body:
        case schema.QueueEntered():
            again = " again" if body.again else ""
            return f"{body.rid} entered the queue{again} at place {body.position}, {body.prompt_tokens} prompt tokens"
        case schema.GrammarQueued():
            return f"{body.rid} waits for its grammar ({body.grammar}, {body.chars} characters) to compile"
        case schema.GrammarReady():
            got = "was there" if body.hit else f"was compiled in {body.compile_ns / 1e6:.2f} ms"
            return (
                f"the grammar of {body.rid} ({body.grammar}) {f'failed: {body.error}' if body.error else got}"
            )
        case schema.PrefixMatched():
            return f"the tree holds the first {body.tokens} tokens of {body.rid} (at most {body.limit} may be used)"
        case schema.BatchPlanned():
            return (
                f"batch {body.bid} is planned: {body.mode} of {len(body.rids)} ({_list(body.rids)}), "
                f"{sum(body.extend_lens)} new tokens; {body.waiting} wait, {body.kv_free} KV tokens free"
            )
        case schema.TokensSampled():
            return f"batch {body.bid} gave tokens to {_list(body.rids)}"
        case schema.BatchProcessed() if body.finished:
            return f"batch {body.bid} is processed; finished: {_list(body.finished)}"
        case schema.RequestAborted():
            return f"{body.rid} is aborted ({body.where}): {body.why}"
        case schema.PoolTaken():
            return f"{len(body.slots) // 4} KV slots went to {_list(body.rids)}; {body.free} remain free"
        case schema.PoolReturned():
            return f"{len(body.slots) // 4} KV slots came back ({body.why}) {('from ' + body.rid) if body.rid else ''}"
        case _:
            return _plain(event)


def _plain(event: Event) -> str:
    """The kind with its short fields, for those that need no explanation."""
    body = event.body
    pairs = [(name, getattr(body, name)) for name in body.__struct_fields__]
    shown = [f"{name} {value}" for name, value in pairs if isinstance(value, int | str) and value != ""]
    return f"{event.kind}: {', '.join(shown)}" if shown else event.kind


def _list(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
