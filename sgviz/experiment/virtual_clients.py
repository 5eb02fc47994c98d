"""The clients of a workload in virtual time: who sends what when, told to `run_virtual` as things end.

The same rules as `drive` on the wall clock: arrivals when they are due, a closed loop's next request when an
answer is there, a turn after the turn before. Simplified: with turns *and* a limit at once, a freed place goes to
the earliest request known by then, even if that is due later than a turn still to come.
Imports: virtual, workload, model (facts only).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import Any, Literal

from sgviz.config import Settings
from sgviz.errors import BadRequest, SgvizError
from sgviz.messages import SamplingParams
from sgviz.model.fetch import resolve_model
from sgviz.model.model_config import model_facts
from sgviz.scheduler.policy import SchedulePolicy
from sgviz.virtual import Arrival, HostModel, MeasuredHost, VirtualRun, run_virtual
from sgviz.workload import Request, Workload

NS = 1_000_000_000
Host = Literal["measured", "modelled"] | MeasuredHost | HostModel


def run_in_virtual_time(
    settings: Settings,
    workload: Workload,
    *,
    host: Host = "measured",
    policy: SchedulePolicy | None = None,
    stream: bool = False,
    on_done: Callable[[], None] | None = None,
) -> VirtualRun:
    """Run the workload on the simulated device of `settings`.

    Raises:
        ConfigError: the device is not simulated. BadRequest: a request is longer than the context.
        SgvizError: a request was refused.
    """
    facts = model_facts(resolve_model(settings.model.model_path))
    clients = _Clients(workload, facts.vocab_size, stream, on_done or (lambda: None))
    run = run_virtual(settings, clients.first(), host=host, policy=policy, after=clients.after)
    failed = {**run.failures, **clients.failures}
    if failed:
        rid, error = next(iter(failed.items()))
        raise SgvizError(f"{len(failed)} requests failed; {rid}: {error}")
    return run


class _Clients:
    def __init__(
        self, workload: Workload, vocab_size: int, stream: bool, on_done: Callable[[], None]
    ) -> None:
        self._workload, self._vocab, self._stream = workload, vocab_size, stream
        self._on_done = on_done
        self._free = workload.concurrency or len(workload.requests)
        self._due: list[tuple[int, int, Request]] = []  # when, number, what: earliest first
        self._followers: dict[str, list[tuple[int, Request]]] = {}
        self._prompts: dict[str, list[int]] = {}
        self._histories: dict[str, list[int]] = {}
        self.failures: dict[str, SgvizError] = {}
        for number, request in enumerate(workload.requests):
            if request.after:
                self._followers.setdefault(request.after, []).append((number, request))
            else:
                heapq.heappush(self._due, (round(request.at_s * NS), number, request))

    def first(self) -> list[Arrival]:
        """What is sent before anything has ended."""
        return list(self._send(0))

    def after(self, rid: str, output: dict[str, Any] | None, ns: int) -> list[Arrival]:
        """What the end of `rid` at `ns` makes possible."""
        self._on_done()
        self._free += 1
        followers = self._followers.pop(rid, [])
        if followers and output is not None:
            self._histories[rid] = [*self._prompts.pop(rid), *output["output_ids"]]
        elif followers:
            self.failures[rid] = BadRequest(f"{len(followers)} turns after it were not sent")
            followers = []
        for number, request in followers:
            heapq.heappush(self._due, (ns + round(request.at_s * NS), number, request))
        return list(self._send(ns))

    def _send(self, now: int) -> Iterator[Arrival]:
        while self._free and self._due:
            due, _, request = heapq.heappop(self._due)
            self._free -= 1
            ids = self._workload.ids_of(request, self._vocab, self._histories.get(request.after, ()))
            if request.rid in self._followers:
                self._prompts[request.rid] = ids
            yield Arrival(
                at_ns=max(due, now),
                rid=request.rid,
                prompt=tuple(ids),
                output_tokens=request.output_tokens,
                sampling=SamplingParams(temperature=0.0, sampling_seed=self._workload.seed),
                stream=self._stream,
            )
