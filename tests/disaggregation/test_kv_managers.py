"""Both managers over real sockets: what is sent arrives, what has ended is not touched, who is silent is given up."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from kv_pair import SECOND, ListSink, Pair, aux, read, write

from sgviz.config import Settings
from sgviz.disaggregation import FAKE_BOOTSTRAP_HOST, PrefillManager, shared_memory
from sgviz.disaggregation.bootstrap_client import put_rank
from sgviz.disaggregation.protocol import KVPoll
from sgviz.errors import BadRequest, StartupError
from sgviz.events import Tracer, WallClock, schema
from sgviz.worker.mock_worker import MockWorker, mock_info

SOURCE, TARGET = list(range(20, 30)), list(range(60, 50, -1))
IDS = list(range(100, 110))


@pytest.fixture(params=["shm", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(backend=request.param)
    write(made.source, SOURCE, IDS)
    yield made
    made.close()
    assert not list(Path("/dev/shm").glob(f"sgviz-kv-{os.getpid()}-*"))


def send(sender: object, slots: list[int], start: int, **more: object) -> None:
    sender.send(start, np.array(slots, dtype=np.int64), **more)  # type: ignore[attr-defined]


def test_pieces_arrive_where_they_belong(pair: Pair) -> None:
    sender, receiver = pair.met(5, TARGET)
    send(sender, SOURCE[:3], 0, cached=True)
    send(sender, SOURCE[3:], 3, aux=aux(5))
    pair.pump(lambda: sender.poll() == receiver.poll() == KVPoll.SUCCESS)
    assert read(pair.target, TARGET) == IDS
    assert receiver.aux == aux(5) and receiver.stats.bytes == sender.stats.bytes == 80
    assert receiver.stats.backend == sender.stats.backend == pair.backend
    assert receiver.stats.pieces == 3  # 3, then 4 and 3
    assert not sender.busy and not receiver.busy and not pair.decode.busy
    sent = [e.body for e in pair.sink.events if isinstance(e.body, schema.KvSent)]
    came = [e.body for e in pair.sink.events if isinstance(e.body, schema.KvReceived)]
    assert [(b.start, b.tokens, b.last) for b in sent] == [(b.start, b.tokens, b.last) for b in came]
    assert [b.cached for b in sent] == [True, False, False]
    pair.pump(lambda: not pair.prefill.busy)


def test_more_pieces_than_buffers_and_a_prefix(pair: Pair) -> None:
    slots = list(range(100, 300))
    write(pair.source, slots, list(range(200)))
    sender, receiver = pair.met(6, slots[50:], 50)
    assert sender.decode_prefix_len == 50
    send(sender, slots[50:], 50, aux=aux(6))
    pair.pump(lambda: receiver.poll() == KVPoll.SUCCESS)
    assert read(pair.target, slots) == [-0] * 50 + list(range(50, 200))


def test_everything_was_there_already(pair: Pair) -> None:
    sender, receiver = pair.met(7, [], 10)
    send(sender, [], 10, aux=aux(7))
    pair.pump(lambda: sender.poll() == receiver.poll() == KVPoll.SUCCESS)


def test_destination_before_the_request(pair: Pair) -> None:
    receiver = pair.receiver(8)
    pair.pump(lambda: receiver.poll() == KVPoll.WAITING_FOR_INPUT)
    receiver.init(np.array(TARGET), 0)
    pair.settle()
    sender = pair.prefill.create_sender("r", 8, 10)
    assert sender.poll() == KVPoll.WAITING_FOR_INPUT


@pytest.mark.parametrize("when", ["unmet", "before", "waiting", "transferring"])
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_abort_reaches_the_other_side(pair: Pair, side: str, when: str) -> None:
    if when == "unmet":
        receiver = pair.receiver(9)
        pair.pump(lambda: receiver.poll() == KVPoll.WAITING_FOR_INPUT)
        sender = pair.prefill.create_sender("r", 9, 10)
    elif when == "before":
        sender = pair.prefill.create_sender("r", 9, 10)
        receiver = pair.receiver(9)
        if side == "prefill":
            sender.abort("no more")
        else:
            pair.pump(lambda: receiver.poll() == KVPoll.WAITING_FOR_INPUT)
    else:
        sender, receiver = pair.met(9, TARGET)
        if when == "transferring":
            send(sender, SOURCE[:4], 0)
            pair.pump(lambda: receiver.stats.pieces == 1)
    (sender if side == "prefill" else receiver).abort("no more")
    pair.pump(lambda: sender.poll() == receiver.poll() == KVPoll.FAILED)
    assert "no more" in sender.failure and "no more" in receiver.failure
    pair.pump(lambda: not (sender.busy or receiver.busy or pair.prefill.busy or pair.decode.busy))
    sender, receiver = pair.met(9, TARGET)  # the room is free again
    send(sender, SOURCE, 0, aux=aux(9))
    pair.pump(lambda: receiver.poll() == KVPoll.SUCCESS)


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_an_abort_before_the_prefill_rank_is_found_is_told_with_its_status(pair: Pair, first: str) -> None:
    """The one side does not know of the other yet; the other's request comes before or after."""
    receiver = pair.receiver(9)
    if first == "prefill":
        sender = pair.prefill.create_sender("r", 9, 10)
    receiver.abort("too long", 400)
    assert receiver.poll() == KVPoll.FAILED and pair.decode.busy
    pair.pump(lambda: not pair.decode.busy)
    if first == "decode":
        pair.settle()
        sender = pair.prefill.create_sender("r", 9, 10)
    pair.pump(lambda: sender.poll() == KVPoll.FAILED)
    assert sender.failure_status == 400 and "too long" in sender.failure
    pair.pump(lambda: not pair.prefill.busy)


def test_an_abort_is_not_told_for_ever(pair: Pair) -> None:
    receiver = pair.decode.create_receiver("r", 20, "127.0.0.1", 1, 3)
    receiver.abort("no more")
    assert pair.decode.busy

    def gave_up() -> bool:
        pair.clock.advance(SECOND)
        return not pair.decode.busy

    pair.pump(gave_up, "d")


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_the_other_side_answers_with_the_same_status(pair: Pair, side: str) -> None:
    sender, receiver = pair.met(9, TARGET)
    (sender if side == "prefill" else receiver).abort("the queue is full", 503)
    pair.pump(lambda: sender.poll() == receiver.poll() == KVPoll.FAILED)
    assert sender.failure_status == receiver.failure_status == 503


def test_a_buffer_of_a_lost_piece_is_used_again(pair: Pair) -> None:
    """Whoever ends a room says that nothing of it is read any more."""
    for room in range(1, 12):  # more than there are buffers
        lose_all_pieces(pair, room)
        pair.pump(lambda: not (pair.prefill.busy or pair.decode.busy))
        assert read(pair.target, TARGET) == [0] * 10


def lose_all_pieces(pair: Pair, room: int) -> None:
    sender, _ = pair.met(room, TARGET)
    out = pair.prefill._send
    pair.prefill._send = lambda *given: None  # type: ignore[method-assign]
    send(sender, SOURCE, 0, aux=aux(room))
    pair.pump(lambda: not sender.busy)
    pair.prefill._send = out  # type: ignore[method-assign]
    sender.abort("no more")


def test_a_late_piece_touches_no_page(pair: Pair) -> None:
    sender, receiver = pair.met(10, TARGET)
    send(sender, SOURCE, 0, aux=aux(10))
    pair.prefill.pump()  # the pieces are on their way
    receiver.abort("left")
    assert not receiver.busy
    pair.settle()
    assert read(pair.target, TARGET) == [0] * 10 and sender.poll() == KVPoll.FAILED
    assert not pair.prefill.busy  # its buffers are back


def test_what_is_late_is_not_taken_for_the_rooms_next_request(pair: Pair) -> None:
    held: list[tuple[object, ...]] = []
    out = pair.prefill._send
    sender, receiver = pair.met(10, TARGET)
    pair.prefill._send = lambda *given: held.append(given)  # type: ignore[method-assign]
    send(sender, SOURCE[::-1], 0, aux=aux(10))
    pair.pump(lambda: len(held) == 3)
    pair.prefill._send = out  # type: ignore[method-assign]
    receiver.abort("left")
    pair.pump(lambda: sender.poll() == KVPoll.FAILED)
    sender, receiver = pair.met(10, TARGET)
    for message in held:
        out(*message)  # type: ignore[arg-type]
    pair.settle()
    assert read(pair.target, TARGET) == [0] * 10 and receiver.poll() == KVPoll.WAITING_FOR_INPUT
    send(sender, SOURCE, 0, aux=aux(10))
    pair.pump(lambda: sender.poll() == receiver.poll() == KVPoll.SUCCESS)
    assert read(pair.target, TARGET) == IDS


def test_busy_while_the_pool_is_written() -> None:
    from sgviz.worker.mock_worker import MockWorker, mock_info

    pair = Pair(target=MockWorker(mock_info(), manual=True))
    try:
        sender, receiver = pair.met(11, TARGET)
        send(sender, SOURCE[:4], 0)
        pair.pump(lambda: receiver.busy)
        receiver.abort("left")
        pair.settle()
        assert receiver.busy
        # its buffer is read until then, so the other side must not use it again
        assert pair.prefill.busy and sender.poll() != KVPoll.FAILED
        pair.target.complete()
        pair.pump(lambda: not receiver.busy)
        pair.pump(lambda: sender.poll() == KVPoll.FAILED and not pair.prefill.busy)
    finally:
        pair.target.complete(99)
        pair.close()


def test_a_doubled_room_is_refused_for_the_second_only(pair: Pair) -> None:
    sender, receiver = pair.met(12, TARGET)
    with pytest.raises(BadRequest, match="taken by request r"):
        pair.prefill.create_sender("other", 12, 3)
    with pytest.raises(BadRequest, match="taken by request r"):
        pair.receiver(12)
    send(sender, SOURCE, 0, aux=aux(12))
    pair.pump(lambda: receiver.poll() == KVPoll.SUCCESS)


def test_aux_of_another_room_is_corruption(pair: Pair) -> None:
    sender, receiver = pair.met(13, TARGET)
    send(sender, SOURCE, 0, aux=aux(99))
    pair.pump(lambda: receiver.poll() == sender.poll() == KVPoll.FAILED)
    assert "room 99" in receiver.failure


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_a_flipped_byte_is_found(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(backend=backend, checksum=True)
    try:
        sender, receiver = pair.met(14, TARGET)
        inner = pair.decode._memory

        def flipped(*args: object) -> memoryview:
            memory = bytearray(inner(*args))  # type: ignore[arg-type]
            memory[3] ^= 1
            return memoryview(memory)

        monkeypatch.setattr(pair.decode, "_memory", flipped)
        send(sender, SOURCE, 0, aux=aux(14))
        pair.pump(lambda: receiver.poll() == sender.poll() == KVPoll.FAILED)
        assert "checksum" in receiver.failure and read(pair.target, TARGET) == [0] * 10
        monkeypatch.undo()
        sender, receiver = pair.met(14, TARGET)
        send(sender, SOURCE, 0, aux=aux(14))
        pair.pump(lambda: receiver.poll() == KVPoll.SUCCESS)
    finally:
        pair.close()


@pytest.mark.parametrize("alive", ["p", "d"])
def test_a_silent_side_fails_the_rooms_of_the_other(pair: Pair, alive: str) -> None:
    sender, receiver = pair.met(15, TARGET)
    pair.settle()  # a sign of life that is still on its way would count as a later one
    mine = sender if alive == "p" else receiver
    for _ in range(12):
        pair.clock.advance(SECOND)
        pair.pump(lambda: True, alive)
    assert mine.poll() != KVPoll.FAILED
    pair.clock.advance(3 * SECOND)
    pair.pump(lambda: mine.poll() == KVPoll.FAILED, alive)
    assert "silent" in mine.failure


def test_signs_of_life_keep_a_room_until_its_time_is_up(pair: Pair) -> None:
    sender, receiver = pair.met(16, TARGET)
    for _ in range(88):
        pair.clock.advance(SECOND)
        pair.settle() if _ % 5 == 0 else pair.pump(lambda: True)
    assert receiver.poll() == sender.poll() == KVPoll.WAITING_FOR_INPUT
    pair.clock.advance(3 * SECOND)
    pair.pump(lambda: receiver.poll() == sender.poll() == KVPoll.FAILED)
    assert "90 s" in receiver.failure


def test_a_prefill_server_that_comes_back_works_again(pair: Pair) -> None:
    _, lost = pair.met(17, TARGET)
    pair.prefill.close()
    pair.prefill = pair.new_prefill()
    sender, receiver = pair.met(18, TARGET)
    send(sender, SOURCE, 0, aux=aux(18))
    pair.pump(lambda: receiver.poll() == KVPoll.SUCCESS)
    assert read(pair.target, TARGET) == IDS
    assert lost.poll() == KVPoll.FAILED and "shutting down" in lost.failure


def test_a_room_without_destination_times_out(pair: Pair) -> None:
    sender = pair.prefill.create_sender("r", 19, 3)
    pair.clock.advance(61 * SECOND)
    pair.prefill.pump()
    assert sender.poll() == KVPoll.FAILED and "60 s" in sender.failure


def test_an_unreachable_server_fails_with_its_address(pair: Pair) -> None:
    receiver = pair.decode.create_receiver("r", 20, "127.0.0.1", 1, 3)

    def gave_up() -> bool:
        pair.clock.advance(SECOND)
        return receiver.poll() == KVPoll.FAILED

    pair.pump(gave_up, "d")
    assert "127.0.0.1:1" in receiver.failure


def test_fake_rooms_succeed_at_once(pair: Pair) -> None:
    sender = pair.prefill.create_sender("r", 21, 3, host=FAKE_BOOTSTRAP_HOST)
    receiver = pair.decode.create_receiver("r", 21, FAKE_BOOTSTRAP_HOST, 1, 3)
    assert sender.poll() == receiver.poll() == KVPoll.WAITING_FOR_INPUT
    receiver.init(np.array([1]), 0)
    send(sender, [1], 0, aux=aux(21))
    assert sender.poll() == receiver.poll() == KVPoll.SUCCESS


def test_another_kind_of_kv_is_refused_by_name(pair: Pair) -> None:
    from sgviz.worker.protocol import KVLayout

    pair.decode._layout = KVLayout(tag="mha:other", wire_bytes=4, nominal_bytes=4)
    receiver = pair.receiver(22)
    pair.pump(lambda: receiver.poll() == KVPoll.FAILED)
    assert "mock:int64" in receiver.failure and "mha:other" in receiver.failure


@pytest.mark.parametrize(
    "wrong", [{"rank_ip": "no host"}, {"rank_ip": ".."}, {"rank_port": -1}, {"heart_port": -1}], ids=str
)
def test_an_address_that_is_none_fails_one_request(pair: Pair, wrong: dict[str, Any]) -> None:
    good = pair.prefill.route
    put_rank(pair.server.host, pair.server.port, msgspec.structs.replace(good, **wrong))
    receiver = pair.receiver(23)
    pair.pump(lambda: receiver.poll() == KVPoll.FAILED)
    assert "no address of a prefill server" in receiver.failure and not pair.decode.busy
    put_rank(pair.server.host, pair.server.port, good)
    _, receiver = pair.met(24, TARGET)
    assert receiver.poll() == KVPoll.WAITING_FOR_INPUT


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_where_shared_memory_is_full_kv_goes_over_tcp(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pair = Pair(backend="auto")
    write(pair.source, SOURCE, IDS)
    monkeypatch.setattr(os, "posix_fallocate", full)
    sender, receiver = pair.met(25, TARGET)
    send(sender, SOURCE, 0, aux=aux(25))
    pair.pump(lambda: sender.poll() == receiver.poll() == KVPoll.SUCCESS)
    assert read(pair.target, TARGET) == IDS and "goes over TCP" in caplog.text
    assert sender.stats.backend == receiver.stats.backend == "tcp"
    pair.close()
    assert not list(Path("/dev/shm").glob(f"sgviz-kv-{os.getpid()}-*"))


def test_full_shared_memory_that_must_be_used_fails_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(backend="shm")
    monkeypatch.setattr(os, "posix_fallocate", full)
    sender, receiver = pair.met(26, TARGET)
    send(sender, SOURCE, 0, aux=aux(26))
    pair.pump(lambda: sender.poll() == receiver.poll() == KVPoll.FAILED)
    assert "/dev/shm has no" in sender.failure and "/dev/shm has no" in receiver.failure
    monkeypatch.undo()
    write(pair.source, SOURCE, IDS)
    sender, receiver = pair.met(27, TARGET)
    send(sender, SOURCE, 0, aux=aux(27))
    pair.pump(lambda: receiver.poll() == KVPoll.SUCCESS)
    assert read(pair.target, TARGET) == IDS
    pair.close()


@pytest.mark.parametrize("backend", ["auto", "shm"])
def test_shared_memory_that_takes_no_file(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is used where it can be; who wants nothing else is told at the start, and no socket stays open."""
    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path / "missing")
    if backend == "auto":
        pair = Pair(backend=backend)
        assert pair.prefill.route.carriers == ["tcp"] and not pair.prefill.route.token_name
        pair.close()
        return
    settings, context = Settings.build(disaggregation_transfer_backend=backend), zmq.Context()
    worker = MockWorker(mock_info(), threaded=False)
    with pytest.raises(StartupError, match=r"transfer_backend shm: .* takes no file"):
        PrefillManager(
            settings, worker, context, WallClock(), Tracer("s", ListSink(), WallClock()), threaded=False
        )
    context.term()  # returns: nothing of it is open
