"""The request log: a line when a request comes and one when it ends, as detailed as `log_requests_level` says.

Mirrors SGLang's RequestLogger: 0 tells counts and reasons, 1 also the sampling parameters, 2 texts and ids up to
2048 characters or ids, 3 all of them. What is simplified: no filter by duration. Lines go to the logger
`sgviz.requests`. Imports: messages, errors.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from sgviz.messages import GenerateReqInput, SamplingParams
from sgviz.tokenizer_manager.meta import Output
from sgviz.tokenizer_manager.state import ReqState

logger = logging.getLogger("sgviz.requests")

SHOWN = 2048  # characters of a text, or ids, at level 2


class RequestLog:
    """What is logged of requests; changed at any time from the manager's loop."""

    def __init__(self, on: bool = False, level: int = 2, form: str = "text") -> None:
        self.on = on
        self.level = level
        self.form = form

    def configure(
        self, on: bool | None = None, level: int | None = None, form: str | None = None
    ) -> dict[str, bool | int | str]:
        """Change what is given, for requests that come from now on; how it is then, under the settings' names."""
        self.on = self.on if on is None else on
        self.level = self.level if level is None else level
        self.form = self.form if form is None else form
        return {
            "log_requests": self.on, "log_requests_level": self.level, "log_requests_format": self.form
        }  # fmt: skip

    def opened(self, obj: GenerateReqInput) -> OpenEntry | None:
        """Log the arrival of `obj`; what logs its end, or None if nothing is logged."""
        if not self.on:
            return None
        entry = OpenEntry(self.level, self.form, obj.rid)
        _write("request.received", entry.form, {"rid": obj.rid, **_asked(obj, self.level)})
        return entry


@dataclass(slots=True)
class OpenEntry:
    """A logged request under way; it keeps the way in which its arrival was logged."""

    level: int
    form: str
    rid: str | list[str] | None
    started: float = field(default_factory=time.monotonic)
    outputs: dict[object, Output] = field(default_factory=dict)

    def note(self, item: Output | list[Output]) -> None:
        """The newest output of an answer holds all before it."""
        for output in item if isinstance(item, list) else [item]:
            self.outputs[output.get("index")] = output

    @property
    def _complete(self) -> bool:
        """All is there that was asked for: whoever has that may close what gave it."""
        ends = [output["meta_info"].get("finish_reason") for output in self.outputs.values()]
        return bool(ends) and all(ends)

    def closed(self, error: BaseException | None) -> None:
        """Log the end: by an answer, or by `error` (also that the caller left)."""
        told: dict[str, Any] = {"rid": self.rid, "seconds": round(time.monotonic() - self.started, 6)}
        if error is not None and not (isinstance(error, GeneratorExit) and self._complete):
            told["error"] = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        answers = [_answered(output, self.level) for output in self.outputs.values()]
        if answers:
            told |= answers[0] if len(answers) == 1 else {"answers": answers}
        _write("request.finished", self.form, told)


def live_request(state: ReqState, now: int) -> dict[str, Any]:
    """A request under way at clock time `now`, in as much detail as level 2."""
    return {
        "rid": state.rid,
        "age_s": (now - state.stats.created) / 1e9,
        "dispatched": state.dispatched,
        **_asked(state.obj, 2),
        "prompt_tokens": state.prompt_tokens,
        "completion_tokens": state.completion_tokens,
        "output_text": _cut(state.text, 2),
        "output_ids": _cut(list(state.output_ids), 2),
    }


def _asked(obj: GenerateReqInput, level: int) -> dict[str, Any]:
    prompts = obj.prompts
    told: dict[str, Any] = {
        "stream": obj.stream,
        "prompts": len(prompts),
        "length": sum(len(prompt) for prompt in prompts if isinstance(prompt, str | list)),
        "unit": "ids" if obj.text is None else "characters",
    }
    if level >= 1:
        params = obj.sampling_params
        told["sampling_params"] = (
            [_given(each) for each in params] if isinstance(params, list) else _given(params)
        )
    if level >= 2:
        shown = [_cut(prompt, level) for prompt in prompts]
        told["text" if obj.text is not None else "input_ids"] = shown[0] if obj.is_single else shown
    return told


def _given(params: SamplingParams) -> dict[str, Any]:
    """The parameters that differ from the defaults."""
    default = SamplingParams()
    pairs = ((name, getattr(params, name)) for name in params.__struct_fields__)
    return {name: value for name, value in pairs if value != getattr(default, name)}


def _answered(output: Output, level: int) -> dict[str, Any]:
    meta: Mapping[str, Any] = output["meta_info"]
    names = ("finish_reason", "prompt_tokens", "completion_tokens", "cached_tokens", "e2e_latency")
    told = {name: meta[name] for name in names if name in meta}
    if meta.get("id") is not None:
        told = {"id": meta["id"], **told}
    if level >= 2:
        told |= {name: _cut(output[name], level) for name in ("text", "output_ids") if name in output}
    return told


def _cut(value: Any, level: int) -> Any:
    """At level 2 the beginning, and how much more there is; a sequence of any kind (`Grown`, too) as a list."""
    if not isinstance(value, Sequence):
        return value
    shown = len(value) if level >= 3 else SHOWN
    more = f"... ({len(value) - shown} more)" if len(value) > shown else ""
    if isinstance(value, str):
        return value[:shown] + more
    return [*value[:shown], more] if more else list(value)


def _write(event: str, form: str, told: dict[str, Any]) -> None:
    if form == "json":
        logger.info("%s", msgspec.json.encode({"event": event, **told}, enc_hook=str).decode())
        return
    logger.info("%s %s", event, " ".join(f"{name}={value!r}" for name, value in told.items()))
