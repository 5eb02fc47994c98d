"""DataParallelController: between the TokenizerManager and the schedulers; it chooses a rank and forwards.

Mirrors SGLang's class of that name. Answers bypass it. What differs: it blocks in a poll when there is nothing to do,
the main process starts the schedulers, and it tells the TokenizerManager who got a request, so that a lost rank's
requests can end. Imports: channel, messages, errors, events.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Protocol

import msgspec

from sgviz.data_parallel.budget import DPBudget, LoadSource
from sgviz.data_parallel.policies import DispatchPolicy, RankLoad, RoundRobin
from sgviz.errors import BadRequest, SgvizError, Unavailable
from sgviz.events import schema
from sgviz.events.tracer import QUIET_MS, Tracer
from sgviz.messages import (
    AbortReq,
    ActiveRanksOutput,
    ConfigureTraceReq,
    FinishReason,
    RoutedReq,
    ShutdownReq,
    ToController,
    TokenizedGenerateReqInput,
)
from sgviz.messages.parallel import addressees, home_rank
from sgviz.messages.rids import HEALTH_CHECK_PREFIX

log = logging.getLogger(__name__)

FOREVER_MS = -1  # an idle controller is woken by a message and by nothing else
EXPLICIT, SESSION = "explicit", "session"
WHOSE = MappingProxyType({EXPLICIT: "named by the request", SESSION: "which has its session"})


class Inbox(Protocol):
    """Where messages come from; `sgviz.channel.Receiver` is one."""

    def drain(self, limit: int = ...) -> list[ToController]: ...

    def wait(self, timeout_ms: int) -> bool: ...


class Outbox(Protocol):
    """Where they go; `sgviz.channel.Sender` is one. Raises Unavailable if nobody is there."""

    def send(self, message: msgspec.Struct) -> None: ...


class DataParallelController:
    """Forwards until a ShutdownReq.

    Args:
        ranks: to each scheduler. to_tokenizer: for RoutedReq and refusals. to_detokenizer: for the end of lost ranks.
        policy: chooses. loads: what the ranks tell of themselves.
        one_process: the ranks are threads of one process.

    Attributes:
        turn, busy: for a watchdog on another thread: the number of the drain, and whether it is under way.
        ended: a ShutdownReq came and was passed on.
    """

    def __init__(
        self,
        *,
        inbox: Inbox,
        ranks: Sequence[Outbox],
        to_tokenizer: Outbox,
        to_detokenizer: Outbox,
        policy: DispatchPolicy,
        loads: LoadSource,
        trace: Tracer,
        one_process: bool,
    ) -> None:
        self._inbox = inbox
        self._ranks = ranks
        self._to_tokenizer = to_tokenizer
        self._to_detokenizer = to_detokenizer
        self._policy = policy
        self._uses_load = bool(getattr(policy, "uses_load", True))
        self._probes = RoundRobin()
        self._loads = loads
        self._budget = DPBudget(len(ranks))
        self._trace = trace
        self._one_process = one_process
        self._active = [True] * len(ranks)
        self._aside: dict[int, str] = {}  # of the active ranks those that get no requests, and why
        self._chosen: list[tuple[int, TokenizedGenerateReqInput]] = []  # not yet sent
        self.ended = False
        self.turn, self.busy = 0, False

    @property
    def live(self) -> list[int]:
        """The ranks that live."""
        return [rank for rank, active in enumerate(self._active) if active]

    def run(self) -> None:
        """Forward what comes; block in a poll when nothing does."""
        while not self.ended:
            messages = self._inbox.drain()
            if messages:
                self.turn, self.busy = self.turn + 1, True
                self.take(messages)
                self.busy = False
                continue
            self._trace.flush_if_due()
            if not self._inbox.wait(QUIET_MS):  # a short gap between two messages is not worth a flush
                self._trace.flush()
                self._inbox.wait(FOREVER_MS)

    def take(self, messages: Sequence[ToController]) -> None:
        """Handle messages in their order."""
        received_ns = self._trace.clock.now()
        for message in messages:
            if isinstance(message, TokenizedGenerateReqInput):
                self._route(message, received_ns)
            else:
                self._send_chosen()  # an abort must not overtake what it ends
                self._control(message)
        self._send_chosen()

    # ------------------------------------------------------------ requests

    def _route(self, message: TokenizedGenerateReqInput, received_ns: int) -> None:
        if message.rid.startswith(HEALTH_CHECK_PREFIX):
            alive = [RankLoad(rank, active) for rank, active in enumerate(self._active)]
            self._send(self._probes.choose(message, alive), message)
            return
        try:
            rank, policy, candidates = self._choose(message, received_ns)
        except SgvizError as error:
            self._refuse(message.rid, error)
            return
        if self._trace.on:  # before the send, or the scheduler's first event of the rid might be older
            self._trace.emit(
                schema.DpChose(
                    rid=message.rid,
                    rank=rank,
                    policy=policy,
                    candidates=tuple([(c.rank, c.active, c.requests, c.tokens) for c in candidates]),
                    prompt_tokens=len(message.input_ids),
                    received_ns=received_ns,
                )
            )
        if self._uses_load:
            self._budget.sent(rank, len(message.input_ids))
        self._chosen.append((rank, message))

    def _choose(self, message: TokenizedGenerateReqInput, now: int) -> tuple[int, str, Sequence[RankLoad]]:
        """The rank, what chose it, and what was believed of all when it did. Raises SgvizError."""
        candidates = self._believed(now) if self._uses_load else self._unseen()
        if message.session_params is not None and self.live:
            rank, policy = self._home(message), SESSION
        elif message.routed_dp_rank is not None:
            rank, policy = message.routed_dp_rank, EXPLICIT
        else:
            rank, policy = self._by_policy(message, candidates), self._policy.name
        self._check_in_use(rank, WHOSE.get(policy, f"chosen by {policy}"))
        return rank, policy, candidates

    def _home(self, turn: TokenizedGenerateReqInput) -> int:
        """Where its session is. Raises BadRequest if it names another rank."""
        assert turn.session_params is not None
        session, asked = turn.session_params.id, turn.routed_dp_rank
        rank = home_rank(session, self.live)
        if asked not in (None, rank):
            raise BadRequest(
                f"routed_dp_rank is {asked}, but turns of session {session!r} go to data parallel rank {rank}; "
                "leave routed_dp_rank out",
                param="routed_dp_rank",
            )
        return rank

    def _check_in_use(self, rank: int, whose: str) -> None:
        """Raise SgvizError unless `rank` is one that requests may go to."""
        if not 0 <= rank < len(self._ranks):
            last = len(self._ranks) - 1
            raise SgvizError(f"data parallel rank {rank}, {whose}, is none: they are 0 to {last}")
        if not self._active[rank]:
            raise Unavailable(f"data parallel rank {rank}, {whose}, was lost; others live")
        if rank in self._aside:
            why = f"its weights are not those of the others ({self._aside[rank]})"
            raise Unavailable(f"data parallel rank {rank}, {whose}, is set aside: {why}")

    def _by_policy(self, message: TokenizedGenerateReqInput, candidates: Sequence[RankLoad]) -> int:
        try:
            rank = self._policy.choose(message, candidates)
        except SgvizError:
            raise
        except Exception as error:  # of a user's own policy: it costs this request, not the engine
            log.exception("load_balance_method %s failed", self._policy.name)
            what = f"{type(error).__name__}: {error}"
            raise SgvizError(f"the load_balance_method {self._policy.name!r} raised {what}") from None
        if type(rank) is not int:
            raise SgvizError(
                f"the load_balance_method {self._policy.name!r} gave {rank!r:.60}, no number of a rank"
            )
        return rank

    @property
    def _in_use(self) -> list[bool]:
        """By rank: whether requests may go there."""
        return [active and rank not in self._aside for rank, active in enumerate(self._active)]

    def _unseen(self) -> list[RankLoad]:
        return [RankLoad(rank, active) for rank, active in enumerate(self._in_use)]

    def _believed(self, now: int) -> list[RankLoad]:
        budget = self._budget
        budget.refresh(self._loads, now)
        return [
            RankLoad(rank, active, budget.requests[rank], budget.tokens[rank])
            for rank, active in enumerate(self._in_use)
        ]

    def _send_chosen(self) -> None:
        """Tell the TokenizerManager who gets what, then give it to them."""
        chosen, self._chosen = self._chosen, []
        if not chosen:
            return
        routed = RoutedReq(
            rids=[message.rid for _, message in chosen],
            created=[message.time_stats.created for _, message in chosen],
            dp_ranks=[rank for rank, _ in chosen],
        )
        self._to_tokenizer.send(routed)
        for rank, message in chosen:
            self._send(rank, message)

    def _refuse(self, rid: str, error: SgvizError) -> None:
        if self._trace.on:
            self._trace.emit(schema.RequestAborted(rid=rid, where="intake", why=error.message))
        reason = FinishReason(
            type="abort",
            message=error.message,
            status_code=error.status,
            err_type=error.type,
            param=error.param,
        )
        self._to_tokenizer.send(AbortReq(rid=rid, finished_reason=reason))

    # ------------------------------------------------------------ control

    def _control(self, message: msgspec.Struct) -> None:
        if isinstance(message, ActiveRanksOutput):
            self._change(message)
            return
        if isinstance(message, ConfigureTraceReq):
            self._trace.on = message.on
        elif isinstance(message, ShutdownReq):
            self.ended = True
            for _ in range(len(self._ranks) - len(self.live)):
                self._to_detokenizer.send(message)  # it waits for one of each rank
        for rank in addressees(message, self.live, self._one_process):
            self._send(rank, message)

    def _change(self, message: ActiveRanksOutput) -> None:
        for rank, active in enumerate(message.status):
            if active != self._active[rank] and self._trace.on:
                self._trace.emit(
                    schema.DpRankChanged(rank=rank, active=active, why=message.why, requests=message.requests)
                )
        self._active, self._aside = list(message.status), message.aside
        self._to_detokenizer.send(message)
        self._trace.flush()

    def _send(self, rank: int, message: msgspec.Struct) -> None:
        with suppress(
            Unavailable
        ):  # it died; the TokenizerManager knows what it had, and is about to hear it
            self._ranks[rank].send(message)
