"""A small but consistent pipeline for tests of the readers: it does what the event docstrings say.

Real page allocator, prefix tree with locks, splits and evictions, admission by memory, retraction, chunk-free
prefill and streamed answers, all on a virtual clock. Only tokens and durations are made up.
"""

from __future__ import annotations

import random

from synthetic_memory import Memory, Request, raw

from sgviz.events import VirtualClock
from sgviz.events.schema import (
    AdmitOk,
    AnyBody,
    BatchFinished,
    BatchLaunched,
    BatchPlanned,
    BatchProcessed,
    ChunkSent,
    EngineConfigured,
    Event,
    LoopIdle,
    OutputReceived,
    OutputStreamed,
    ProcessStarted,
    QueueEntered,
    RequestConverted,
    RequestDispatched,
    RequestFinished,
    RequestReceived,
    RequestRetracted,
    RequestTokenized,
    ResponseFinished,
    TextEmitted,
    TokensSampled,
)

START_NS = 5_000_000_000
COMPONENTS = ("http", "tokenizer_manager", "scheduler", "detokenizer")
MICROSECOND = 1_000


class SyntheticRun:
    """`events` of a run of `requests` requests over `total` tokens of KV memory."""

    def __init__(
        self,
        requests: int = 6,
        *,
        seed: int = 0,
        total: int = 400,
        page: int = 1,
        prompt: tuple[int, int] = (8, 40),
        output: tuple[int, int] = (3, 20),
        gap_us: int = 4_000,
        max_running: int = 8,
        decode_us: int = 9_000,
    ) -> None:
        self.random = random.Random(seed)
        self.page, self.max_running, self.decode_us = page, max_running, decode_us
        self.memory = Memory(total, page, lambda body: self.emit("scheduler", body, 1))
        self.clock = VirtualClock(START_NS)
        self.events: list[Event] = []
        self.seqs = dict.fromkeys(COMPONENTS, 0)
        self.iteration = self.bids = 0
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        shared = [self.random.randrange(3) for _ in range(prompt[0])]
        self.arrivals = [
            Request(
                rid=f"req-{number:03d}",
                ids=shared[: self.random.randrange(len(shared))]
                + [self.random.randrange(50) for _ in range(self.random.randint(*prompt))],
                max_new=self.random.randint(*output),
                stream=number % 3 != 2,
                arrive_ns=START_NS + number * gap_us * MICROSECOND + 1_000_000,
            )
            for number in range(requests)
        ]
        self.idle = False
        self._start()
        while self.arrivals or self.waiting or self.running:
            self._turn()
        self._idle()

    # ------------------------------------------------------------ emitting

    def emit(self, component: str, body: AnyBody, after_us: int = 20) -> None:
        self.clock.advance(after_us * MICROSECOND)
        self.seqs[component] += 1
        iteration = self.iteration if component == "scheduler" else 0
        self.events.append(Event(self.seqs[component], self.clock.now(), component, iteration, body))

    def _start(self) -> None:
        for pid, component in enumerate(COMPONENTS, start=100):
            now = self.clock.now()
            self.emit(
                component,
                ProcessStarted(
                    component=component, pid=pid, mode="processes", unix_ns=now + 10**18, monotonic_ns=now
                ),
            )
        self.emit(
            "scheduler",
            EngineConfigured(
                settings={"model": "synthetic"},
                model="synthetic",
                max_total_num_tokens=self.memory.total,
                page_size=self.page,
                max_running_requests=self.max_running,
                context_len=self.memory.total,
                rows=64,
            ),
        )

    # ------------------------------------------------------------ turns

    def _turn(self) -> None:
        if not self.waiting and not self.running:
            self._idle()
            self.clock.advance(max(0, self.arrivals[0].arrive_ns - self.clock.now()))
        self.iteration += 1
        while self.arrivals and self.arrivals[0].arrive_ns <= self.clock.now():
            self._arrive(self.arrivals.pop(0))
        admitted = self._admit()
        if admitted:
            self._run("extend", admitted)
            self.running += [request for request in admitted if request.slots]
        elif self.running:
            self._make_room()
            self._run("decode", list(self.running))
            self.running = [request for request in self.running if request.slots]

    def _idle(self) -> None:
        if not self.idle:
            body = LoopIdle(
                kv_free=self.memory.free,
                kv_evictable=self.memory.evictable,
                kv_protected=self.memory.protected,
            )
            self.emit("scheduler", body)
        self.idle = True

    def _arrive(self, request: Request) -> None:
        self.idle = False
        rid, prompt = request.rid, len(request.ids)
        self.emit(
            "http",
            RequestReceived(
                rid=rid,
                type="ChatCompletionRequest",
                path="/v1/chat/completions",
                stream=request.stream,
                model="synthetic",
                messages=1,
                chars=prompt * 4,
            ),
        )
        self.emit(
            "http",
            RequestConverted(
                rid=rid,
                prompt_kind="text",
                size=prompt * 4,
                max_new_tokens=request.max_new,
                temperature=0.0,
                top_p=1.0,
                top_k=1,
            ),
            300,
        )
        self.emit("tokenizer_manager", RequestTokenized(rid=rid, prompt_tokens=prompt), 400)
        self.emit("tokenizer_manager", RequestDispatched(rid=rid), 60)
        self.waiting.append(request)
        self._enqueue(request, again=False)

    def _enqueue(self, request: Request, *, again: bool) -> None:
        self.emit(
            "scheduler",
            QueueEntered(
                rid=request.rid,
                position=len(self.waiting) - 1,
                prompt_tokens=len(request.ids),
                max_new_tokens=request.max_new,
                stream=request.stream,
                again=again,
                input_ids=b"" if again else raw(request.ids),
            ),
            90,
        )

    def _admit(self) -> list[Request]:
        admitted: list[Request] = []
        pages = 0
        while self.waiting and len(self.running) + len(admitted) < self.max_running:
            request = self.waiting[0]
            slots, node = self.memory.match(request.fill[: len(request.fill) - 1])
            self.memory.lock(request.rid, node, +1)
            need = (len(request.fill) - len(slots)) // self.page + 2
            if (pages + need) * self.page > self.memory.free + self.memory.evictable:
                self.memory.lock(request.rid, node, -1)
                break
            pages += need
            request.node, request.slots, request.protected = node, list(slots), len(slots)
            if request.cached is None:
                request.cached = len(slots)
            self.emit(
                "scheduler",
                AdmitOk(
                    rid=request.rid,
                    extend=len(request.fill) - len(slots),
                    prefix=len(slots),
                    need=need * self.page,
                    have=self.memory.free + self.memory.evictable,
                    reserved=0,
                    chunked=False,
                    rem_total=0,
                    rem_input=-1,
                    rem_chunk=-1,
                ),
            )
            admitted.append(self.waiting.pop(0))
        if admitted:
            self.memory.evict(pages * self.page)
        return admitted

    def _make_room(self) -> None:
        while True:
            need = sum(self.page for request in self.running if len(request.slots) % self.page == 0)
            if need <= self.memory.free + self.memory.evictable or len(self.running) == 1:
                break
            victim = self.running.pop()
            body = RequestRetracted(
                rid=victim.rid,
                output_tokens=len(victim.out),
                need=need,
                have=self.memory.free + self.memory.evictable,
                ratio_before=0.5,
                ratio_after=0.7,
            )
            self.emit("scheduler", body)
            self.memory.release(victim, "retract")
            self.waiting.append(victim)
            self._enqueue(victim, again=True)
        self.memory.evict(need)

    def _run(self, mode: str, batch: list[Request]) -> None:
        self.bids += 1
        lens = [len(request.fill) - len(request.slots) if mode == "extend" else 1 for request in batch]
        prefix = tuple(len(request.slots) for request in batch)
        self.memory.take(batch, lens)
        rids = tuple(request.rid for request in batch)
        plan = BatchPlanned(
            bid=self.bids,
            mode=mode,
            rids=rids,
            extend_lens=tuple(lens),
            prefix_lens=prefix,
            running=len(self.running),
            waiting=len(self.waiting),
            kv_free=self.memory.free,
            kv_evictable=self.memory.evictable,
            kv_protected=self.memory.protected,
            new_token_ratio=0.5,
        )
        self.emit("scheduler", plan, 120)
        self.emit("scheduler", BatchLaunched(bid=self.bids, forward_pass_id=self.bids), 40)
        start = self.clock.now() + 5 * MICROSECOND
        device_us = self.decode_us + 150 * sum(lens)
        body = BatchFinished(
            bid=self.bids,
            start_ns=start,
            end_ns=start + device_us * MICROSECOND,
            can_run_cuda_graph=mode == "decode",
        )
        self.emit("scheduler", body, device_us + 10)
        self._process(mode, batch)

    def _process(self, mode: str, batch: list[Request]) -> None:
        tokens = tuple(self.random.randrange(50) for _ in batch)
        rids = tuple(request.rid for request in batch)
        for request, token in zip(batch, tokens):
            request.out.append(token)
        self.emit("scheduler", TokensSampled(bid=self.bids, rids=rids, token_ids=tokens), 30)
        done = [request for request in batch if len(request.out) >= request.max_new]
        for request in batch:
            if request in done:
                self.memory.release(request, "finish")
            elif mode == "extend":
                self.memory.insert(request, len(request.slots))
        finished = tuple(request.rid for request in done)
        self.emit("scheduler", BatchProcessed(bid=self.bids, finished=finished), 40)
        self._stream([request for request in batch if request.stream or request in done], done)

    def _stream(self, sent: list[Request], done: list[Request]) -> None:
        if not sent:
            return
        rids = tuple(request.rid for request in sent)
        counts = tuple(1 if request.stream else len(request.out) for request in sent)
        ends = tuple(request in done for request in sent)
        self.emit("scheduler", OutputStreamed(rids=rids, tokens=counts, finished=ends), 40)
        chars = tuple(4 * count for count in counts)
        self.emit(
            "detokenizer", TextEmitted(rids=rids, chars=chars, held=(0,) * len(rids), finished=ends), 150
        )
        self.emit("tokenizer_manager", OutputReceived(rids=rids, tokens=counts), 120)
        for request, end, size in zip(sent, ends, chars):
            self._answer(request, end, size)

    def _answer(self, request: Request, end: bool, size: int) -> None:
        if end:
            self.emit(
                "tokenizer_manager",
                RequestFinished(
                    rid=request.rid,
                    reason="length",
                    matched="",
                    prompt_tokens=len(request.ids),
                    completion_tokens=len(request.out),
                    cached_tokens=request.cached or 0,
                ),
                10,
            )
        if request.stream and request.chunks == 0:
            self._chunk(request, "role", 0)
        self._chunk(request, "delta" if request.stream else "body", size)
        if end:
            self.emit("http", ResponseFinished(rid=request.rid, status=200), 15)

    def _chunk(self, request: Request, part: str, chars: int) -> None:
        self.emit("http", ChunkSent(rid=request.rid, index=request.chunks, part=part, chars=chars), 10)
        request.chunks += 1
