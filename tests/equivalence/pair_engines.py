"""A prefill and a decode engine in one process, driven as a router drives two servers, and a look at both books."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

from sgviz.engine import Engine
from sgviz.recording import PairedRecording, Recording

Output = dict[str, Any]
LOOPS = ("normal", "overlap")
PAGES = ((1, 1), (16, 16), (1, 16), (16, 1))
CHUNKED, WHOLE = 32, -1
TIMEOUT_S = 900.0  # the settings' limits end a call before


class EnginePair:
    """Both engines. Each answer gets a room and a rid of its own, the same on both sides.

    Attributes:
        given: the last prefill outputs. rooms: those of the last call.
    """

    def __init__(self, prefill: Engine, decode: Engine) -> None:
        self.prefill, self.decode = prefill, decode
        self.given: list[Output] = []
        self.rooms: list[int] = []
        self._rooms = itertools.count(1000)
        self._pool = ThreadPoolExecutor(2)

    @property
    def port(self) -> int:
        return self.prefill.settings.disaggregation.disaggregation_bootstrap_port

    def meeting(self, answers: int | None, prefix: str = "r") -> dict[str, Any]:
        """What the router would add to a call with so many answers (None: a lone one)."""
        self.rooms = list(itertools.islice(self._rooms, answers or 1))
        return {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.port,
            "bootstrap_room": self.rooms[0] if answers is None else self.rooms,
        }

    def both(self, **call: Any) -> tuple[Any, Any]:
        """The outputs of both sides for the same call. Raises what the decode side's raised, else the other's."""
        futures: list[Future[Any]] = [
            self._pool.submit(engine.generate, **call) for engine in (self.prefill, self.decode)
        ]
        decoded = futures[1].result(TIMEOUT_S)
        return futures[0].result(TIMEOUT_S), decoded

    def generate(self, asked: Sequence[list[int]], params: Any, n: int = 1, **options: Any) -> list[Output]:
        """The decode side's outputs of a batch."""
        meeting = self.meeting(len(asked) * n)
        rids = [f"r{self.rooms[i * n]}" for i in range(len(asked))]
        self.given, outputs = self.both(
            input_ids=list(asked), sampling_params=params, rid=rids, **meeting, **options
        )
        return list(outputs)

    def one(self, ids: list[int], params: dict[str, Any], **options: Any) -> Output:
        """The decode side's output of a lone prompt."""
        meeting = self.meeting(None)
        given, output = self.both(
            input_ids=ids, sampling_params=params, rid=f"r{self.rooms[0]}", **meeting, **options
        )
        self.given = [given]
        return dict(output)

    def recordings(self) -> tuple[Recording, Recording]:
        return self.prefill.recording(), self.decode.recording()

    def check_books(self) -> PairedRecording:
        """Both audits balance, both folds are the engines' own states, and what was sent is what came."""
        for rec in self.recordings():
            assert rec.audit().balanced, str(rec.audit())
            assert rec.check() == []
        paired = PairedRecording(*self.recordings())
        assert paired.audit().balanced, str(paired.audit())
        return paired

    def check_idle(self) -> None:
        """Nothing is held on either side but what the prefix caches keep."""
        for engine in (self.prefill, self.decode):
            state = engine.internal_state()
            assert state["num_live_reqs"] == 0
            for rank in state.get("ranks", [state]):
                assert rank["free_rows"] == rank["max_running_requests"], rank

    def close(self) -> None:
        self._pool.shutdown()


@contextmanager
def engine_pair(
    model: str,
    *,
    prefill: dict[str, Any] | None = None,
    decode: dict[str, Any] | None = None,
    **common: Any,
) -> Iterator[EnginePair]:
    """Both engines with settings of their own and `common` ones; their books are looked at in the end."""
    common = {"torch_threads": 1, "max_total_tokens": 8192, **common}
    with ExitStack() as stack:
        first = Engine(
            model, disaggregation_mode="prefill", disaggregation_bootstrap_port=0, **common | (prefill or {})
        )
        stack.enter_context(first)
        second = stack.enter_context(Engine(model, disaggregation_mode="decode", **common | (decode or {})))
        pair = EnginePair(first, second)
        stack.callback(pair.close)
        yield pair


Arrangement = tuple[tuple[int, int], int, str, str]  # pages, chunk, loops


def name_of(arrangement: Arrangement) -> str:
    (ours, theirs), chunk, first, second = arrangement
    return f"page{ours}+{theirs},chunk{chunk},{first}+{second}"


ALL: list[Arrangement] = list(itertools.product(PAGES, (CHUNKED, WHOLE), LOOPS, LOOPS))
# every two values of two settings come together in one of these
PAIRWISE: list[Arrangement] = [
    ((1, 1), CHUNKED, "normal", "normal"), ((1, 1), WHOLE, "overlap", "overlap"),
    ((16, 16), CHUNKED, "overlap", "overlap"), ((16, 16), WHOLE, "normal", "normal"),
    ((1, 16), CHUNKED, "normal", "overlap"), ((1, 16), WHOLE, "overlap", "normal"),
    ((16, 1), CHUNKED, "overlap", "normal"), ((16, 1), WHOLE, "normal", "overlap"),
]  # fmt: skip


def arranged(model: str, arrangement: Arrangement, **common: Any) -> Any:
    (ours, theirs), chunk, first, second = arrangement
    return engine_pair(
        model,
        prefill={"page_size": ours, "event_loop": first, "chunked_prefill_size": chunk},
        decode={"page_size": theirs, "event_loop": second},
        disaggregation_checksum=True,
        **common,
    )
