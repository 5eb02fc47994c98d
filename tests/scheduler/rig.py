"""A scheduler with real cache and mock worker, driven turn by turn without sockets or threads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from sgviz.batch.req import Req
from sgviz.batch.schedule_batch import ScheduleBatch
from sgviz.config import Settings
from sgviz.disaggregation.protocol import KVManager
from sgviz.events import RingSink, TimeStats, Tracer, VirtualClock
from sgviz.events.schema import EngineConfigured
from sgviz.grammar import GrammarCompiler
from sgviz.launch.components import make_profile
from sgviz.messages import (
    AbortReq,
    BatchTokenIDOutput,
    FinishReason,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    GetInternalStateReqOutput,
    HealthCheckOutput,
    SamplingParams,
    TokenizedGenerateReqInput,
)
from sgviz.messages.session import SessionParams
from sgviz.recording.audit import Auditor
from sgviz.scheduler.finish import Decode
from sgviz.scheduler.load_publisher import Put
from sgviz.scheduler.scheduler import Scheduler
from sgviz.scheduler.stops import Stop
from sgviz.worker.mock_worker import MockWorker, TokenRule, mock_info
from sgviz.worker.protocol import Worker

B = TypeVar("B")


def letters(ids: list[int], skip_special_tokens: bool = True) -> str:
    """A letter for each token; none is special."""
    return "".join(chr(97 + i % 26) for i in ids)


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
    """What a client of the scheduler saw of one request.

    `deltas`: tokens of each message. `at`: the turn of each message. `cut`: an AbortReq ended it.
    """

    output_ids: list[int] = field(default_factory=list)
    decode_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    deltas: list[int] = field(default_factory=list)
    at: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    finals: int = 0
    cached_tokens: int = 0
    retractions: int = 0
    cut: bool = False

    @property
    def reason(self) -> str | None:
        return self.finish.type if self.finish else None

    @property
    def status(self) -> int | None:
        return self.finish.status_code if self.finish else None


class Rig:
    """`submit`, `turn`, `run`, and the answers so far."""

    def __init__(
        self,
        *,
        tokens: int = 512,
        context_len: int = 256,
        vocab_size: int = 97,
        eos_every: int = 0,
        rule: TokenRule | None = None,
        worker: Worker | None = None,
        policy: object | None = None,
        grammars: GrammarCompiler | None = None,
        decode: Decode = letters,
        events: bool = True,
        kv_manager: KVManager | None = None,
        put_load: Put | None = None,
        **settings: object,
    ) -> None:
        self.ring = RingSink()
        self.clock = VirtualClock(1)
        self.inbox, self.to_tokenizer, self.to_detokenizer = Box(), Box(), Box()
        info = mock_info(vocab_size=vocab_size, context_len=context_len, max_total_num_tokens=tokens)
        page_size = int(settings.get("page_size", 1))
        self.worker = worker or MockWorker(
            info, eos_every=eos_every, threaded=False, check=True, rule=rule, page_size=page_size
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
            grammars=grammars,
            make_profile=make_profile,
            kv_manager=kv_manager,
            put_load=put_load,
            dp_rank=3,
        )
        self.state = self.scheduler.state
        self.answers: dict[str, Answer] = {}
        self.replies: list[msgspec.Struct] = []
        self.signs: list[HealthCheckOutput] = []  # that the loop came round
        self._loop = self.scheduler.event_loop()
        self._numbers = itertools.count()
        self._auditor, self._audited, self._silenced = Auditor(self.configured()), 0, not events

    def submit(
        self,
        ids: Iterable[int],
        max_new_tokens: int | None = 8,
        *,
        rid: str | None = None,
        stream: bool = True,
        extra_key: str | None = None,
        logprob: bool = False,
        require_reasoning: bool | None = False,
        priority: int | None = None,
        session: SessionParams | None = None,
        **params: object,
    ) -> str:
        """Put a request into the inbox; it is taken in at the next turn."""
        rid = rid or f"r{next(self._numbers)}"
        sampling = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, **params).normalize()
        self.answers.setdefault(rid, Answer())
        self.inbox.send(
            TokenizedGenerateReqInput(
                rid=rid,
                input_ids=list(ids),
                sampling_params=sampling,
                stream=stream,
                time_stats=TimeStats(created=1),
                extra_key=extra_key,
                return_logprob=logprob,
                priority=priority,
                session_params=session,
                require_reasoning=require_reasoning,
            )
        )
        return rid

    def abort(self, rid: str = "", *, abort_all: bool = False) -> None:
        self.inbox.send(AbortReq(rid=rid, abort_all=abort_all, message="test"))

    def flush(self) -> FlushCacheReqOutput:
        """Ask for a flush and take the next turn; returns the reply."""
        self.inbox.send(FlushCacheReqInput(id="f"))
        self.until(Stop.RECEIVED)
        reply = self.replies.pop()
        assert isinstance(reply, FlushCacheReqOutput) and reply.id == "f"
        return reply

    def stop(self) -> Stop:
        """Advance to the next stop of the loop."""
        self.clock.advance(1000)
        self._silenced |= not self.state.trace.on
        stop = next(self._loop)
        self._collect()
        return stop

    def until(self, wanted: Stop, most: int = 1000) -> None:
        """Advance to the next stop of that name."""
        for _ in range(most):
            if self.stop() is wanted:
                return
        raise AssertionError(f"no stop {wanted} in {most}")

    def until_true(self, condition: Callable[[], bool], most: int = 5000) -> None:
        """Advance until the condition holds at a stop."""
        for _ in range(most):
            if condition():
                return
            self.stop()
        raise AssertionError(f"not reached in {most} stops")

    def plan(self) -> ScheduleBatch | None:
        """Take in the messages, plan, and stop there; returns the batch."""
        self.until(Stop.PLANNED)
        return self.state.last_batch

    def run(self, most: int = 20_000) -> int:
        """Advance until the scheduler is idle; returns the number of stops, fails after `most`."""
        for count in range(most):
            if self.stop() is Stop.IDLE and self.state.is_fully_idle and not self.inbox.messages:
                self.audit()
                return count
        raise AssertionError(f"not idle after {most} stops: {list(self.state.live)}")

    def holders(self) -> list[Req]:
        """The live requests that hold memory."""
        return [req for req in self.state.live.values() if req.kv.req_pool_idx or req.kv.node is not None]

    def check(self) -> None:
        """The thorough audit of memory against the live requests."""
        self.state.cache.check(self.holders())

    def configured(self) -> EngineConfigured:
        """The sizes, which a reader of the events needs."""
        cache, limits = self.state.cache, self.state.limits
        return EngineConfigured(
            settings={}, model="mock", max_total_num_tokens=cache.total, page_size=cache.page_size,
            max_running_requests=limits.max_running_requests, context_len=self.worker.info.context_len,
            rows=cache.req_to_token_pool.size,
        )  # fmt: skip

    def audit(self) -> None:
        """The books from the events alone balance too; events that were switched off leave a hole in them."""
        if self._silenced:
            return
        first, events = self.ring.since(self._audited)
        self._auditor.add(events)
        self._audited = first + len(events)
        report = self._auditor.report()
        assert report.balanced, str(report)

    def check_empty(self) -> None:
        """Nothing is held, nobody waits, and every request ended exactly once."""
        self.check()
        self.audit()
        state, ledger = self.state, self.state.cache.ledger()
        assert not state.live and not state.waiting_queue and state.chunked_req is None
        assert ledger.protected == ledger.private == 0, str(ledger)
        assert state.cache.req_to_token_pool.available_size() == state.cache.req_to_token_pool.size
        assert {rid: answer.finals for rid, answer in self.answers.items() if answer.finals != 1} == {}

    def bodies(self, kind: type[B]) -> list[B]:
        """The bodies of all events of that type so far."""
        return [event.body for event in self.ring.snapshot() if isinstance(event.body, kind)]

    def _collect(self) -> None:
        for message in self.to_detokenizer.drain():
            if isinstance(message, BatchTokenIDOutput):
                self._take(message)
            elif isinstance(message, GetInternalStateReqOutput):
                self.replies.append(message)  # it goes the long way, so that the detokenizer can add its part
        for message in self.to_tokenizer.drain():
            if isinstance(message, AbortReq):
                answer = self.answers[message.rid]
                answer.finals += 1
                answer.finish, answer.cut = message.finished_reason, True
            elif isinstance(message, HealthCheckOutput) and not message.forward:
                self.signs.append(message)
            else:
                self.replies.append(message)

    def _take(self, out: BatchTokenIDOutput) -> None:
        for i, rid in enumerate(out.rids):
            answer = self.answers[rid]
            assert not answer.finals, f"{rid} got output after its end"
            answer.at.append(self.state.trace.iteration)
            answer.deltas.append(len(out.output_ids[i]))
            answer.output_ids += out.output_ids[i]
            answer.decode_ids += out.decode_ids[i]
            answer.cached_tokens = out.cached_tokens[i]
            answer.retractions = out.retraction_counts[i]
            if out.output_token_logprobs:
                answer.logprobs += out.output_token_logprobs[i]
            if out.finished_reasons[i] is not None:
                answer.finals += 1
                answer.finish = out.finished_reasons[i]
            assert out.completion_tokens[i] == len(answer.output_ids)
