"""A pair under all that can go wrong at once: cut and slow cables, aborts, time limits, pauses, names used again.

What runs late runs late by a seed: copies and forwards wait in a `LateStream`. Only the network is real.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
from cable import Cable
from late_stream import LateStream
from rig import Answer
from socket_pair import SECOND, Net, SideRig, SocketPair

from sgviz.config import Settings
from sgviz.disaggregation.staging import BUFFERS
from sgviz.messages.flow import ContinueGenerationReqInput, PauseGenerationReqInput

LIMITS = {"disaggregation_bootstrap_timeout": 20.0, "disaggregation_waiting_timeout": 30.0}
MOST_OPEN = 14
Ask = tuple[tuple[int, ...], tuple[tuple[str, Any], ...]]  # prompt, parameters


def drawn_settings(rng: random.Random, *, vocab: int) -> dict[str, Any]:
    """Of a pair: pages, pools, loops, chunks, what the decode side does when its memory is full."""
    ours, theirs = rng.choice([(1, 1), (16, 16), (1, 16), (16, 1)])
    chunk = rng.choice([-1, 16, 32, 48])
    return {
        "tokens": rng.choice([256, 512]), "decode_tokens": rng.choice([192, 192, 256, 512]),
        "prefill_page": ours, "decode_page": theirs, "overlap": rng.random() < 0.7, "vocab_size": vocab,
        "prefill_settings": {"chunked_prefill_size": chunk, "max_running_requests": rng.choice([4, 12])},
        "decode_settings": {
            "disaggregation_decode_enable_radix_cache": rng.random() < 0.6,
            "disaggregation_decode_retraction": rng.choice(["keep", "recompute"]),
            "num_reserved_decode_tokens": rng.choice([1, 4, 64]), "max_running_requests": rng.choice([4, 12]),
        },
    }  # fmt: skip


class Stress(SocketPair):
    """`play`, then `come_to_rest`; `well` are the answers that ended as they should.

    Attributes:
        asked: what each name stands for now. counts: how often each thing was done, and how answers ended.
        well, cut_short: what was asked and answered. stray: copies of KV in pages of nobody's transfer.
    """

    def __init__(self, net: Net, rng: random.Random, **settings: Any) -> None:
        super().__init__(net, **settings)
        self.rng = rng
        self.counts: Counter[str] = Counter()
        self.asked: dict[str, Ask] = {}
        self.well: list[tuple[Ask, list[int]]] = []
        self.cut_short: list[tuple[Ask, list[int]]] = []
        self.cables: list[Cable] = []
        self.stray: list[object] = []
        self._open: list[str] = []
        self._failed: list[str] = []
        self._vocab = settings["vocab_size"]
        self._heads = [[rng.randrange(3, self._vocab) for _ in range(n)] for n in (16, 32, 48)]
        links = self.of_decode._links
        to, cables = links.to, {}

        def through_cables(asked: Any, route: Any, tag: str) -> Any:
            for port in (route.rank_port, route.heart_port):
                if port not in cables:
                    cables[port] = Cable(port)
                    self.cables.append(cables[port])
            ports = {"rank_port": cables[route.rank_port].port, "heart_port": cables[route.heart_port].port}
            return to(asked, msgspec.structs.replace(route, **ports), tag)

        links.to = through_cables  # type: ignore[method-assign]
        self._watch_pages()

    # ------------------------------------------------------------ whose pages

    def _watch_pages(self) -> None:
        """A copy of the managers touches only what the requests hold that it is for, at the moment when it runs."""
        for side, name in ((self.prefill, "read_kv"), (self.decode, "write_kv")):
            worker = side.worker
            setattr(worker, name, self._watched(side, getattr(worker, name)))

    def _watched(self, side: SideRig, move: Callable[..., Any]) -> Callable[..., Any]:
        def watched(slots: Any, memory: Any) -> Any:
            kept = slots.copy()
            if isinstance(side.worker._stream, LateStream):
                side.worker._stream.submit(lambda: self._must_be_held(side, kept))
            return move(slots, memory)

        return watched

    def _must_be_held(self, side: SideRig, slots: Any) -> None:
        cache = side.state.cache
        busy = [r for r in side.state.live.values() if r.transfer is not None and r.transfer.busy]
        busy += [each for each in side.state.disagg.draining if each.transfer.busy]
        held = [cache.row_slots(each) for each in busy if each.kv.req_pool_idx]
        if not (held and np.isin(slots, np.concatenate(held)).all()):
            self.stray.append((side, slots))

    # ------------------------------------------------------------ what is done

    def new_request(self) -> None:
        if len(self._open) < MOST_OPEN:
            self._send(f"q{len(self.asked)}", self._drawn(), 0)

    def _drawn(self) -> Ask:
        rng = self.rng
        head = rng.choice([[], *self._heads])
        ids = [*head, *(rng.randrange(3, self._vocab) for _ in range(rng.choice([1, 5, 17, 33, 49])))]
        params: dict[str, Any] = {"max_new_tokens": rng.choice([1, 2, 8, 30, 60, 60]), "ignore_eos": True}
        if rng.random() < 0.5:
            params |= {"temperature": rng.choice([0.7, 1.0]), "sampling_seed": rng.randrange(1000)}
        if rng.random() < 0.2:
            params |= {"frequency_penalty": 0.7, "repetition_penalty": 1.2}
        return tuple(ids), tuple(params.items())

    def _send(self, rid: str, ask: Ask, room: int) -> None:
        ids, params = ask
        self.asked[rid] = ask
        order = self.rng.choice([("both",), ("prefill", "decode"), ("decode", "prefill")])
        room = room or 1 + self.rng.getrandbits(40)
        for side in self.sides:
            side.answers[rid] = Answer()
        for to in order:
            if to != "both" and self.rng.random() < 0.3:
                self.steps(self.rng.randrange(4))
            self.submit(ids, rid=rid, to=to, room=room, **dict(params))
        self._open.append(rid)

    def ask_again(self) -> None:
        """The same or another prompt under the name and perhaps in the room of one that failed, or in its room alone:
        then the prefill side may not have noticed its end."""
        if not self._failed:
            return
        rid = self.rng.choice(self._failed)
        ask = self.rng.choice([self.asked[rid], self._drawn()])
        self.counts["again"] += 1
        if all(side.answers[rid].finals for side in self.sides):
            self._failed.remove(rid)
            self._send(rid, ask, self.rng.choice([0, self.room(rid)]))
        elif len(self._open) < MOST_OPEN:
            self._send(f"q{len(self.asked)}", ask, self.room(rid))

    def end_one(self) -> None:
        if self._open:
            self.counts["aborts"] += 1
            self.rng.choice(self.sides).abort(self.rng.choice(self._open))

    def hold(self) -> None:
        if self.cables:
            self.counts["held"] += 1
            self.rng.choice(self.cables).hold()

    def release(self) -> None:
        for cable in self.cables:
            cable.release()

    def cut(self) -> None:
        if self.cables:
            self.counts["cuts"] += 1
            which = self.rng.choice([self.cables, [self.rng.choice(self.cables)]])
            for cable in which:
                cable.cut()

    def pause(self) -> None:
        side = self.rng.choice(self.sides)
        self.counts["pauses"] += 1
        side.inbox.send(PauseGenerationReqInput(id="p", mode=self.rng.choice(["retract", "in_place"])))
        for _ in range(self.rng.randrange(1, 12)):
            self.step()
        side.inbox.send(ContinueGenerationReqInput(id="c"))

    def let_time_go(self, seconds: int, sides: str) -> None:
        """On one side only, or both: who is not turned is as good as dead for so long."""
        self.counts["time"] += 1
        for _ in range(seconds):
            self.net.clock.advance(SECOND)
            for _ in range(4):
                self._turn(sides)
            if sides == "pd" and not any(cable.held for cable in self.cables):
                deadline = time.monotonic() + 0.3
                while not self._in_touch() and time.monotonic() < deadline:
                    self._turn(sides)

    # ------------------------------------------------------------ the play

    def step(self) -> None:
        rng = self.rng
        side = rng.choice(self.sides)
        stream = side.worker._stream
        if isinstance(stream, LateStream) and rng.random() < 0.6:
            stream.step(rng.randrange(4))
        side.stop()
        if rng.random() < 0.1:
            side.check()
        assert not self.stray, self.stray
        self._collect()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def _collect(self) -> None:
        for rid in list(self._open):
            answer = self.decode.answers[rid]
            if not answer.finals:
                continue
            self._open.remove(rid)
            self.counts[f"{answer.reason} {answer.status or ''}"] += 1
            if answer.reason in ("length", "stop"):
                self.well.append((self.asked[rid], answer.output_ids))
            else:
                self.cut_short.append((self.asked[rid], answer.output_ids))
                self._failed.append(rid)

    def play(self, steps: int) -> None:
        does: list[tuple[float, Callable[[], object]]] = [
            (0.35, self.new_request), (0.03, self.end_one), (0.01, self.hold), (0.05, self.release), (0.006, self.cut),
            (0.06, self.ask_again), (0.006, self.pause), (0.01, lambda: self.let_time_go(1, "pd")),
            (0.002, lambda: self.let_time_go(14, self.rng.choice(["p", "d", "pd"]))),
            (0.0015, lambda: self.let_time_go(35, "pd")),
        ]  # fmt: skip
        for _ in range(steps):
            for chance, do in does:
                if self.rng.random() < chance:
                    do()
            self.steps(self.rng.randrange(1, 14))
            if self.rng.random() < 0.3:
                time.sleep(0.001)

    def _work_on(self) -> None:
        """Turn as long as somebody gets on."""
        still, ended = 0, -1
        while still < 60 and not self.idle:
            self._turn("pd")
            now = sum(len(answer.output_ids) + answer.finals for answer in self.decode.answers.values())
            still, ended = (still + 1, ended) if now == ended else (0, now)

    def come_to_rest(self) -> None:
        """Whole cables, and time enough for every limit: then nobody holds anything, and every buffer is back, once."""
        self.release()
        deadline = time.monotonic() + 120
        while not self.idle:
            self._work_on()
            self.let_time_go(1, "pd")
            assert time.monotonic() < deadline, self.account()
        self.run()
        self._collect()
        assert not self._open and not self.stray
        self.check_empty()
        assert not self.of_prefill._peers.hold_buffers
        for peer in self.of_prefill._peers._met.values():
            if peer.staging is not None:
                assert (
                    len({id(buffer) for buffer in peer.staging._free}) == len(peer.staging._free) == BUFFERS
                )
        self.check_recordings()


@contextmanager
def stressed(
    seed: int, *, vocab: int = 97, make_worker: Callable[[int, int], Any] | None = None
) -> Iterator[Stress]:
    """A pair of drawn settings. `make_worker`: of a pool's size and its page; None: mock workers that check."""
    rng = random.Random(seed)
    backend = rng.choice(["shm", "tcp"])
    net = Net(
        Settings.build(
            disaggregation_transfer_backend=backend, disaggregation_checksum=rng.random() < 0.5, **LIMITS
        )
    )
    pair = None
    try:
        pair = Stress(net, rng, make_worker=make_worker, **drawn_settings(rng, vocab=vocab))
        if make_worker is None:
            for side in pair.sides:
                side.worker._stream = LateStream(rng)
        yield pair
    finally:
        if pair is not None:
            pair.release()
            for side in pair.sides:
                if make_worker is None:
                    side.worker._stream.close()
        net.close()
        if pair is not None:
            for cable in pair.cables:
                cable.close()
