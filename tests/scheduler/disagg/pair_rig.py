"""A prefill and a decode scheduler on mock workers, with KV between them, driven turn by turn."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

from kv_wire import Wire
from rig import Answer, Rig

from sgviz.disaggregation.protocol import KVManager
from sgviz.events import TimeStats
from sgviz.messages import SamplingParams, TokenizedGenerateReqInput
from sgviz.scheduler.stops import Stop
from sgviz.worker.mock_worker import MockWorker, mock_info

HOST, PORT = "10.0.0.1", 8998


class SideRig(Rig):
    """One side; what its transfers still use counts as held."""

    is_decode = False

    def stop(self) -> Stop:
        """A server blocks at IDLE; with requests alive it must know that it is to look again soon."""
        stop, state = super().stop(), self.state
        waits = stop is Stop.IDLE and state.live and state.pause is None and not self.inbox.messages
        assert not waits or state.grammar_queue or self.scheduler._side.busy
        return stop

    def holders(self) -> list[object]:  # type: ignore[override]
        return [*super().holders(), *self.state.disagg.draining]


class Pair:
    """`submit` to both sides, `turn`, `run`; the client reads the decode side's answers."""

    def __init__(
        self,
        *,
        tokens: int = 512,
        decode_tokens: int | None = None,
        prefill_page: int = 1,
        decode_page: int = 1,
        delay: int = 0,
        overlap: bool = True,
        eos_every: int = 0,
        rule: object = None,
        prefill_settings: dict[str, object] | None = None,
        decode_settings: dict[str, object] | None = None,
        grammars: object = None,
        vocab_size: int = 97,
        managers: Callable[[MockWorker, MockWorker], tuple[KVManager, KVManager]] | None = None,
        peer: tuple[str, int] = (HOST, PORT),
        make_worker: Callable[[int, int], Any] | None = None,
    ) -> None:
        def worker(size: int, page: int) -> Any:
            if make_worker is not None:
                return make_worker(size, page)
            info = mock_info(vocab_size=vocab_size, context_len=256, max_total_num_tokens=size)
            return MockWorker(
                info, threaded=False, check=True, eos_every=eos_every, page_size=page, rule=rule
            )

        sizes = tokens, decode_tokens or tokens
        workers = worker(sizes[0], prefill_page), worker(sizes[1], decode_page)
        self.wire = Wire(*workers, delay)
        self._peer = peer
        of_prefill, of_decode = (self.wire, self.wire) if managers is None else managers(*workers)
        common = {"disable_overlap_schedule": not overlap, "grammars": grammars}

        def rig(
            side: str, page: int, settings: dict[str, object] | None
        ) -> Callable[[MockWorker, KVManager], SideRig]:
            return lambda worker, manager: SideRig(
                worker=worker, page_size=page, disaggregation_mode=side, kv_manager=manager,
                **common, **(settings or {}),
            )  # fmt: skip

        self.start_worker = {"prefill": lambda: worker(sizes[0], prefill_page),
                             "decode": lambda: worker(sizes[1], decode_page)}  # fmt: skip
        self.start_side = {"prefill": rig("prefill", prefill_page, prefill_settings),
                           "decode": rig("decode", decode_page, decode_settings)}  # fmt: skip
        self.prefill = self.start_side["prefill"](workers[0], of_prefill)
        self.decode = self.start_side["decode"](workers[1], of_decode)
        self.decode.is_decode = True
        self._rooms = itertools.count(1)
        self.messages: dict[str, TokenizedGenerateReqInput] = {}

    @property
    def sides(self) -> tuple[SideRig, SideRig]:
        return self.prefill, self.decode

    @property
    def answers(self) -> dict[str, Answer]:
        return self.decode.answers

    def submit(
        self,
        ids: Iterable[int],
        max_new_tokens: int | None = 8,
        *,
        rid: str | None = None,
        to: str = "both",
        room: int | None = 0,
        host: str | None = "",
        logprobs: tuple[int, int] | None = None,
        **params: object,
    ) -> str:
        """`to`: both, prefill or decode. `logprobs`: where they begin in the prompt, and how many alternatives."""
        number = next(self._rooms) if room == 0 else room
        rid = rid or f"r{len(self.messages)}"
        for name, side in (("prefill", self.prefill), ("decode", self.decode)):
            message = TokenizedGenerateReqInput(
                rid=rid,
                input_ids=list(ids),
                sampling_params=SamplingParams(
                    **{"max_new_tokens": max_new_tokens, "temperature": 0.0, **params}
                ).normalize(),
                stream=True,
                time_stats=TimeStats(created=1),
                bootstrap_host=self._peer[0] if host == "" else host,
                bootstrap_port=self._peer[1],
                bootstrap_room=number,
            )
            if logprobs is not None:
                message.return_logprob = True
                message.logprob_start_len, message.top_logprobs_num = logprobs
                message.token_ids_logprob = [5, 7]
            self.messages[rid] = message
            if to in ("both", name):
                side.answers.setdefault(rid, Answer())
                side.inbox.send(message)
        return rid

    def room(self, rid: str) -> int:
        number = self.messages[rid].bootstrap_room
        assert number is not None
        return number

    def turn(self) -> None:
        """Both sides one turn."""
        for side in self.sides:
            side.until(Stop.RECEIVED)
            side.check()

    def turns(self, count: int) -> None:
        for _ in range(count):
            self.turn()

    def run(self, most: int = 3000) -> None:
        for _ in range(most):
            self.turn()
            if all(side.state.is_fully_idle and not side.inbox.messages for side in self.sides):
                for side in self.sides:
                    side.run()
                return
        live = [list(side.state.live) for side in self.sides]
        raise AssertionError(f"not idle after {most} turns: {live}, {self.decode.state.disagg}")

    def check_empty(self) -> None:
        for side in self.sides:
            side.check_empty()
            queues = side.state.disagg
            assert not any(queues.counts().values()) and not queues.draining


def single(prompts: list[list[int]], max_new: int, **settings: object) -> list[list[int]]:
    """What one scheduler answers to the same prompts."""
    rig = Rig(**settings)  # type: ignore[arg-type]
    rids = [rig.submit(ids, max_new) for ids in prompts]
    rig.run()
    return [rig.answers[rid].output_ids for rid in rids]
