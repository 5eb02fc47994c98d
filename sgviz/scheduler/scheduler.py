"""The Scheduler: its components joined, and the five verbs that the loops are written in.

Mirrors SGLang's Scheduler as of 0.5.x. Time, chance, sockets and the worker are injected. Imports: batch,
cache, grammar, worker protocol, channel, messages, events; never torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from sgviz.batch.schedule_batch import ScheduleBatch
from sgviz.cache.kv_cache import KVCache
from sgviz.config import Settings
from sgviz.disaggregation.protocol import KVManager
from sgviz.events import Tracer, schema
from sgviz.events.tracer import QUIET_MS
from sgviz.grammar import GrammarCompiler
from sgviz.scheduler.control import Control, MakeProfile
from sgviz.scheduler.decode import DecodePlanner
from sgviz.scheduler.disagg.dispatch import connect, dispatch_event_loop, keeps_prefixes, make_side
from sgviz.scheduler.finish import Decode
from sgviz.scheduler.gate import DebugHost
from sgviz.scheduler.gate.gate import Gate
from sgviz.scheduler.intake import Inbox, Intake, Outbox
from sgviz.scheduler.launched import Launched
from sgviz.scheduler.load import LoadMeter
from sgviz.scheduler.load_publisher import LoadPublisher, Put
from sgviz.scheduler.new_token_ratio import NewTokenRatio
from sgviz.scheduler.output_streamer import OutputStreamer
from sgviz.scheduler.overlap_rules import OverlapRules
from sgviz.scheduler.pause import Pauser
from sgviz.scheduler.planner import Planner
from sgviz.scheduler.policy import SchedulePolicy, make_policy
from sgviz.scheduler.requests import RequestEnder
from sgviz.scheduler.results import ResultProcessor
from sgviz.scheduler.self_check import SelfCheck
from sgviz.scheduler.state import Limits, SchedulerState
from sgviz.scheduler.stops import Stop
from sgviz.worker.protocol import Worker

IDLE_WAIT_MS = 1000
WEIGHTS_WAIT_MS = 10  # how late it may be seen that weights are loaded
GRAMMAR_WAIT_MS = 1  # how late it may be seen that a grammar is compiled, when there is nothing else to do


class Scheduler:
    """One scheduler over one worker.

    Args:
        settings: what may run together; memory sizes come from `worker.info`.
        inbox: messages from the TokenizerManager. to_tokenizer, to_detokenizer: where replies and output go.
        decode: token ids to text, for stop strings.
        grammars: compiles what requests bring; None: such requests are refused.
        policy: an object that replaces the named policy of the settings.
        rules: when the overlap loop may not run ahead; None: as the settings say.
        debug: what a debugger's gate needs; None: nobody can attach.
        make_profile: what makes a profile of this process; None: nobody can ask for one.
        kv_manager: on a prefill or decode server, what moves the KV; it is closed with the loop.
        put_load: takes the load snapshots of data parallel rank `dp_rank`; None: nobody wants them.
    """

    def __init__(
        self,
        settings: Settings,
        worker: Worker,
        *,
        inbox: Inbox,
        to_tokenizer: Outbox,
        to_detokenizer: Outbox,
        decode: Decode,
        trace: Tracer,
        grammars: GrammarCompiler | None = None,
        policy: SchedulePolicy | None = None,
        rules: OverlapRules | None = None,
        debug: DebugHost | None = None,
        make_profile: MakeProfile | None = None,
        put_load: Put | None = None,
        dp_rank: int = 0,
        kv_manager: KVManager | None = None,
    ) -> None:
        self.state = state = _make_state(settings, worker, trace)
        self.worker = worker
        seed = settings.model.random_seed
        self._gate = Gate(state, inbox, to_tokenizer, to_detokenizer, debug, seed) if debug else None
        self._inbox = inbox = self._gate.inbox if self._gate else inbox
        overlap = not settings.schedule.disable_overlap_schedule
        self._loop = dispatch_event_loop(settings.disaggregation.disaggregation_mode, overlap=overlap)
        self._rules = rules or OverlapRules(settings.schedule)
        streamer = OutputStreamer(state, to_detokenizer, decode)
        ender = RequestEnder(state, streamer, to_tokenizer)
        sided = make_side(settings.disaggregation, kv_manager, state, worker, ender, streamer)
        self._side = sided.side
        chosen = policy or make_policy(settings.schedule.schedule_policy, seed)
        timeout = settings.grammar.grammar_timeout
        self.intake = Intake(
            state, inbox, ender, to_tokenizer, to_detokenizer, grammars, timeout, decode, sided.side
        )
        self.planner = Planner(state, chosen, DecodePlanner(state, ender, sided.keep), ender)
        if self._gate is not None:
            self._gate.bind(self.planner)
        self._pauser = Pauser(state, self.planner, ender, to_tokenizer)
        longest_sleep = min(settings.schedule.watchdog_timeout, settings.http.health_timeout) / 2
        self.control = Control(
            state, worker, self._use, self._pauser, to_tokenizer, longest_sleep, make_profile
        )
        self.intake.add_handlers(self.control.handlers())
        self._results = ResultProcessor(state, streamer, to_tokenizer, decode, sided.hand_over)
        connect(sided, self.planner, self._results, worker)
        interval = settings.parallel.load_snapshot_publish_interval
        meter = LoadMeter(state, worker.info)
        self._loads = LoadPublisher(state, meter, put_load, dp_rank, interval) if put_load else None
        self._self_check = SelfCheck(state)
        self._idle_told = False
        self._turn_ns = 0

    def event_loop(self) -> Iterator[Stop]:
        """The loop that the settings choose."""
        return self._loop(self)

    def run(self) -> None:
        """Drain the loop until a ShutdownReq; block in a poll whenever there is nothing to do."""
        try:
            self._drain()
        finally:
            self.control.close()
            if self._side is not None:
                self._side.close()

    def _drain(self) -> None:
        gate = self._gate
        for stop in self.event_loop():
            if gate is not None and gate.awake:
                gate.at(stop)
            if stop is Stop.IDLE:
                self._wait_for_message()
            elif stop is Stop.PROCESSED:
                self.state.trace.flush_if_due()

    def _wait_for_message(self) -> None:
        """Block; before a long wait the events must be out."""
        self.state.trace.flush_if_due()
        if self.state.grammar_queue:
            self._inbox.wait(GRAMMAR_WAIT_MS)
        elif self._side is not None and self._side.busy:
            self._inbox.wait(self._side.wait_ms)
        elif self.control.waits:
            self._inbox.wait(WEIGHTS_WAIT_MS)
        elif not self._inbox.wait(QUIET_MS):
            self.state.trace.flush()
            self._inbox.wait(IDLE_WAIT_MS)

    def begin_turn(self) -> bool:
        """Count the turn and take in messages; False when the scheduler is to stop."""
        self.state.trace.iteration += 1
        self._turn_ns = self.state.clock.now()
        self.intake.receive()
        self.control.look()
        if self._side is not None:
            self._side.look()
        return not self.intake.shutdown

    def progress(self) -> tuple[int, bool]:
        """For a watchdog on another thread: the turn's number, and whether somebody waits for it to end.

        Nobody waits for a turn in which a debugger has parked the loop, in a pause, when nothing runs any more,
        or while a profile is written.
        """
        state = self.state
        parked = self._gate is not None and self._gate.parked
        waited_for = not parked and not state.at_rest and not self.control.is_profiling
        return state.trace.iteration, waited_for and (bool(state.live) or state.pending_results > 0)

    def _use(self, worker: Worker) -> None:
        self.worker = worker

    def plan(self) -> ScheduleBatch | None:
        if self._pauser.holds():
            return None
        batch = self.planner.get_next_batch_to_run()
        self.state.last_batch = batch
        return batch

    def launch(self, batch: ScheduleBatch) -> Launched:
        """Hand the batch to the worker; returns at once."""
        state = self.state
        state.forward_ct += 1
        self._idle_told = False
        for req in batch.reqs:
            if req is not batch.chunked_req:
                req.inflight += 1
        freed = state.cache.req_to_token_pool.take_freed()
        if freed:  # behind what is under way, before the new owners' first forward
            self.worker.forget(freed)
        if self._side is not None:
            self._side.before_launch(batch)
        launch = self.worker.launch(batch, delay_sample=self._rules.must_delay_sample(batch))
        for req in batch.reqs:
            req.is_primed = False
        state.pending_results += 1
        if state.trace.on:
            body = schema.BatchLaunched(
                bid=batch.bid, forward_pass_id=launch.forward_pass_id, turn_ns=self._turn_ns
            )
            state.trace.emit(body)
        return Launched.of(batch, launch)

    def must_process_first(self, pending: Launched, batch: ScheduleBatch | None) -> bool:
        """Overlap is off for `batch`: the result under way comes first."""
        return self._rules.must_process_first(pending, batch)

    def process(self, launched: Launched) -> None:
        """Wait for the result of a launch and put it into the requests."""
        wait_ns = self.state.clock.now()
        if self._side is not None:
            self._side.while_running(launched.launch.done)
        result = launched.launch.result()
        self.state.pending_results -= 1
        self._results.process(launched, result, wait_ns)
        if self._loads is not None:
            self._loads.after_result(is_extend=launched.batch.forward_mode.is_extend)

    def on_idle(self) -> None:
        """Nothing to run: check the books, forget the pressure, say so once."""
        state = self.state
        self.intake.answer_probe_when_idle()
        if self._loads is not None:
            self._loads.publish()
        if self._idle_told or not state.is_fully_idle:
            return
        self._idle_told = True
        state.ratio.reset()
        self._self_check.at_idle()
        if state.trace.on:
            ledger = state.cache.ledger()
            state.trace.emit(
                schema.LoopIdle(
                    kv_free=ledger.free, kv_evictable=ledger.evictable, kv_protected=ledger.protected
                )
            )
            state.trace.tell_cost()


def _make_state(settings: Settings, worker: Worker, trace: Tracer) -> SchedulerState:
    info = worker.info
    limits = Limits.derive(settings.schedule, settings.serve, info, settings.cache.page_size)
    cache = KVCache(
        size=info.max_total_num_tokens,
        page_size=settings.cache.page_size,
        rows=limits.max_running_requests,
        max_context_len=min(info.context_len, info.max_total_num_tokens) + 1,
        trace=trace,
        disable_radix_cache=settings.cache.disable_radix_cache
        or info.is_encoder
        or not keeps_prefixes(settings.disaggregation),
    )
    ratio = NewTokenRatio.from_conservativeness(settings.schedule.schedule_conservativeness)
    running = ScheduleBatch(cache.req_to_token_pool)
    return SchedulerState(cache, limits, trace.clock, trace, ratio, running)
