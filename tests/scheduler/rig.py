"""A scheduler with real cache and mock worker, driven turn by turn without sockets or threads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from sgviz.config import Settings
from sgviz.events import RingSink, TimeStats, Tracer, VirtualClock
from sgviz.messages import AbortReq, BatchTokenIDOutput, SamplingParams, TokenizedGenerateReqInput
from sgviz.scheduler.scheduler import Scheduler
from sgviz.scheduler.stops import Stop
from sgviz.worker.mock_worker import MockWorker, mock_info
from sgviz.worker.protocol import Worker


@dataclass
class Box:
    """An inbox and outbox in memory."""

    messages: list[msgspec.Struct] = field(default_factory=list)

    def drain(self, limit: int = 1024) -> list[msgspec.Struct]:
        out, self.messages = self.messages[:limit], self.messages[limit:]
        return out

    def wait(self, timeout_ms: int) -> bool:
        return bool(self.messages)

    def send(self, message: msgspec.Struct) -> None:
        self.messages.append(message)


@dataclass
class Answer:
    """What a client of the scheduler saw of one request."""

    output_ids: list[int] = field(default_factory=list)
    decode_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: str | None = None
    finals: int = 0
    messages: int = 0
    cached_tokens: int = 0
    status: int | None = None


class Rig:
    """`submit`, `turn`, `run`, and the answers so far."""

    def __init__(
        self,
        *,
        tokens: int = 512,
        context_len: int = 256,
        vocab_size: int = 97,
        eos_every: int = 0,
        worker: Worker | None = None,
        policy: object | None = None,
        decode: Callable[[list[int]], str] = lambda ids: "".join(chr(97 + i % 26) for i in ids),
        events: bool = True,
        **settings: object,
    ) -> None:
        self.ring = RingSink()
        self.clock = VirtualClock(1)
        self.inbox, self.to_tokenizer, self.to_detokenizer = Box(), Box(), Box()
        info = mock_info(vocab_size=vocab_size, context_len=context_len, max_total_num_tokens=tokens)
        self.worker = worker or MockWorker(
            info, eos_every=eos_every, threaded=False, check=True, page_size=int(settings.get("page_size", 1))
        )
        self.scheduler = Scheduler(
            Settings.build(**settings),
            self.worker,
            inbox=self.inbox,
            to_tokenizer=self.to_tokenizer,
            to_detokenizer=self.to_detokenizer,
            decode=decode,
            trace=Tracer("scheduler", self.ring if events else None, self.clock),
            policy=policy,
        )
        self.state = self.scheduler.state
        self.answers: dict[str, Answer] = {}
        self._loop = self.scheduler.event_loop()
        self._numbers = itertools.count()

    def submit(self, ids: Iterable[int], max_new_tokens: int = 8, *, rid: str | None = None, stream: bool = True,
               extra_key: str | None = None, logprob: bool = False, **params: object) -> str:  # fmt: skip
        rid = rid or f"r{next(self._numbers)}"
        sampling = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, **params).normalize(len)
        self.answers[rid] = Answer()
        self.inbox.send(
            TokenizedGenerateReqInput(
                rid=rid, input_ids=list(ids), sampling_params=sampling, stream=stream, time_stats=TimeStats(created=1),
                extra_key=extra_key, return_logprob=logprob,
            )  # fmt: skip
        )
        return rid

    def abort(self, rid: str) -> None:
        self.inbox.send(AbortReq(rid=rid, message="test"))

    def stop(self) -> Stop:
        """Advance to the next stop of the loop."""
        self.clock.advance(1000)
        stop = next(self._loop)
        self._collect()
        return stop

    def turn(self) -> Stop:
        """Advance until the next RECEIVED; returns the stop before it."""
        last = self.stop()
        while last not in (Stop.PROCESSED, Stop.IDLE):
            last = self.stop()
        return last

    def run(self, most: int = 20_000) -> int:
        """Advance until the scheduler is idle; returns the number of stops, fails after `most`."""
        for count in range(most):
            if self.stop() is Stop.IDLE and self.state.is_fully_idle and not self.inbox.messages:
                return count
        raise AssertionError(f"not idle after {most} stops: {list(self.state.live)}")

    def check(self) -> None:
        """The thorough audit of memory against the live requests."""
        holders = [req for req in self.state.live.values() if req.kv.row or req.kv.node is not None]
        self.state.cache.check(holders)

    def _collect(self) -> None:
        for message in self.to_detokenizer.drain():
            if isinstance(message, BatchTokenIDOutput):
                self._take(message)
        for message in self.to_tokenizer.drain():
            if isinstance(message, AbortReq):
                answer = self.answers[message.rid]
                answer.finals += 1
                answer.reason = message.finished_reason.type
                answer.status = message.finished_reason.status_code

    def _take(self, out: BatchTokenIDOutput) -> None:
        for i, rid in enumerate(out.rids):
            answer = self.answers[rid]
            assert not answer.finals, f"{rid} got output after its end"
            answer.messages += 1
            answer.output_ids += out.output_ids[i]
            answer.decode_ids += out.decode_ids[i]
            answer.cached_tokens = out.cached_tokens[i]
            if out.output_token_logprobs:
                answer.logprobs += out.output_token_logprobs[i]
            if out.finished_reasons[i] is not None:
                answer.finals += 1
                answer.reason = out.finished_reasons[i].type
                answer.status = out.finished_reasons[i].status_code
            assert out.completion_tokens[i] == len(answer.output_ids)
