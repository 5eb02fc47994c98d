"""The transfer engines: real pools of other page sizes, every byte verified, who chooses which, wake-ups, threads."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kv_pair import Pair, aux, read, write

from sgviz.channel import Receiver
from sgviz.config import Settings
from sgviz.disaggregation import DecodeManager, PrefillManager, prefill_route, shared_memory
from sgviz.disaggregation.bell import Bell
from sgviz.disaggregation.bootstrap_server import BootstrapServer
from sgviz.disaggregation.protocol import KVPoll
from sgviz.disaggregation.wire import Piece
from sgviz.errors import StartupError
from sgviz.events import Tracer, WallClock
from sgviz.messages import ToScheduler
from sgviz.model.kv_pool import MHATokenToKVPool
from sgviz.worker.kv_moves import KVMoves, layout_of
from sgviz.worker.mock_worker import MockWorker, mock_info
from sgviz.worker.stream import CpuStream, InlineStream

ENGINES = ["shm", "tcp"]
SLOTS = list(range(20, 45))


class PoolWorker:
    """A real pool without a model."""

    def __init__(self, page: int, tokens: int, seed: int) -> None:
        self.pool = MHATokenToKVPool(
            num_layers=2,
            size=tokens,
            page_size=page,
            num_kv_heads=2,
            head_dim=4,
            dtype=torch.float32,
            device="cpu",
        )
        self.pool.block.normal_(generator=torch.Generator().manual_seed(seed))
        self.kv_layout = layout_of(self.pool)
        moves = KVMoves(lambda: self.pool, cast(CpuStream, InlineStream()))
        self.read_kv, self.write_kv = moves.read_kv, moves.write_kv

    def prime(self, rows: list[int], tokens: list[int]) -> None:
        """No forwards here."""

    def pages(self, tokens: int, seed: int) -> list[int]:
        """Slots of scattered pages, the last of them not full where it does not divide."""
        page, count = self.pool.page_size, -(-tokens // self.pool.page_size)
        chosen = np.random.default_rng(seed).permutation(self.pool.num_pages - 1)[:count] + 1
        return cast(list[int], (chosen[:, None] * page + np.arange(page)).reshape(-1)[:tokens].tolist())


@pytest.fixture(params=ENGINES)
def backend(request: pytest.FixtureRequest) -> str:
    return cast(str, request.param)


def as_slots(slots: list[int]) -> np.ndarray:
    return np.array(slots, dtype=np.int64)


def whole(pair: Pair, room: int, source: list[int], target: list[int], prefix: int = 0, **more: int) -> None:
    sender, receiver = pair.met(room, target, prefix)
    cut = more.get("cut", len(source) // 2)
    if cut:
        sender.send(prefix, as_slots(source[:cut]))
    sender.send(prefix + cut, as_slots(source[cut:]), aux=aux(room))
    pair.pump(lambda: sender.poll() == receiver.poll() == KVPoll.SUCCESS)
    assert receiver.stats.bytes == sender.stats.bytes == len(source) * pair.source.kv_layout.nominal_bytes


@pytest.mark.parametrize("pages", [(1, 16), (16, 1), (16, 48), (8, 3)])
def test_pools_of_other_pages_and_sizes_that_do_not_divide(backend: str, pages: tuple[int, int]) -> None:
    source, target = PoolWorker(pages[0], 200, 1), PoolWorker(pages[1], 330, 2)
    pair = Pair(
        backend=backend, checksum=True, piece_tokens=10, source=cast(Any, source), target=cast(Any, target)
    )
    try:
        for room, tokens in enumerate((1, 16, 37, 101)):
            mine, theirs = source.pages(tokens, room), target.pages(tokens, room + 9)
            before = target.pool.block.clone()
            whole(pair, room, mine, theirs)
            others = [slot for slot in range(target.pool.num_slots) if slot not in theirs]
            assert torch.equal(target.pool.block[:, :, :, theirs], source.pool.block[:, :, :, mine])
            assert torch.equal(target.pool.block[:, :, :, others], before[:, :, :, others])
    finally:
        pair.close()


@pytest.fixture(scope="module")
def used_again() -> Iterator[Pair]:
    source, target = PoolWorker(16, 256, 1), PoolWorker(1, 300, 2)
    made = Pair(backend="shm", piece_tokens=7, source=cast(Any, source), target=cast(Any, target))
    yield made
    made.close()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tokens=st.integers(1, 120), prefix=st.integers(0, 60), cut=st.integers(0, 119), seed=st.integers(0, 10**6)
)
def test_only_what_the_decode_side_lacks_travels(
    used_again: Pair, tokens: int, prefix: int, cut: int, seed: int
) -> None:
    source, target = cast(PoolWorker, used_again.source), cast(PoolWorker, used_again.target)
    prefix, cut = min(prefix, tokens - 1), min(cut, tokens - min(prefix, tokens - 1) - 1)
    mine, theirs = source.pages(tokens, seed), target.pages(tokens, seed + 1)
    had = target.pool.block[:, :, :, theirs[:prefix]].clone()
    whole(used_again, seed, mine[prefix:], theirs[prefix:], prefix, cut=cut)
    assert torch.equal(target.pool.block[:, :, :, theirs[prefix:]], source.pool.block[:, :, :, mine[prefix:]])
    assert torch.equal(target.pool.block[:, :, :, theirs[:prefix]], had)


@pytest.mark.parametrize("place", [(0, 0), (0, 31), (3, 8), (6, 7)])
def test_a_flipped_byte_in_any_piece_is_found(
    backend: str, place: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the checksum was taken, where the piece stands between the pools; 7 pieces, of 32 bytes and a last of 8."""
    pair, (number, at) = Pair(backend=backend, checksum=True), place
    try:
        write(pair.source, SLOTS, list(range(100, 125)))
        send = pair.prefill._send

        def spoil(identity: bytes, message: object, data: memoryview | None = None) -> None:
            if isinstance(message, Piece) and message.number == number:
                pair.prefill._peers[identity].sent[message.key, number].memory[at] ^= 1
            send(identity, message, data)  # type: ignore[arg-type]

        sender, receiver = pair.met(3, SLOTS)
        monkeypatch.setattr(pair.prefill, "_send", spoil)
        sender.send(0, as_slots(SLOTS), aux=aux(3))
        pair.pump(lambda: receiver.poll() == sender.poll() == KVPoll.FAILED)
        start = number * 4
        assert f"KV of tokens {start} to {min(start + 4, 25)} came damaged" in receiver.failure
        assert read(pair.target, SLOTS)[start:] == [0] * (25 - start)  # nothing of it, nor of what follows
        pair.pump(lambda: not (pair.prefill.busy or pair.decode.busy))
    finally:
        pair.close()


@pytest.mark.parametrize("spoilt", [False, True])
def test_without_checksums_nobody_looks(backend: str, spoilt: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the mode is for: a byte that is flipped on the way arrives as it is."""
    pair = Pair(backend=backend)
    try:
        write(pair.source, SLOTS, list(range(100, 125)))
        send = pair.prefill._send

        def spoil(identity: bytes, message: object, data: memoryview | None = None) -> None:
            if isinstance(message, Piece) and message.number == 0:
                pair.prefill._peers[identity].sent[message.key, 0].memory[0] ^= 1
            send(identity, message, data)  # type: ignore[arg-type]

        if spoilt:
            monkeypatch.setattr(pair.prefill, "_send", spoil)
        whole(pair, 4, SLOTS, SLOTS)
        assert read(pair.target, SLOTS)[0] == 100 + spoilt
    finally:
        pair.close()


@pytest.mark.parametrize(
    "wanted,kernel,found", [("auto", "", "shm"), ("auto", "another", "tcp"), ("tcp", "", "tcp")]
)
def test_auto_takes_shared_memory_on_one_host_and_tcp_between_hosts(
    wanted: str, kernel: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(backend=wanted)
    try:
        if kernel:
            monkeypatch.setattr(shared_memory, "boot_id", lambda: kernel)
        write(pair.source, SLOTS, list(range(100, 125)))
        sender, receiver = pair.met(5, SLOTS)
        sender.send(0, as_slots(SLOTS), aux=aux(5))
        pair.pump(lambda: receiver.poll() == KVPoll.SUCCESS)
        assert receiver.stats.backend == found and read(pair.target, SLOTS) == list(range(100, 125))
    finally:
        pair.close()


def test_shared_memory_between_hosts_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(backend="shm")
    try:
        monkeypatch.setattr(shared_memory, "boot_id", lambda: "another")
        receiver = pair.receiver(6)
        pair.pump(lambda: receiver.poll() == KVPoll.FAILED)
        assert "shm needs one host and one /dev/shm" in receiver.failure
    finally:
        pair.close()


def managers(
    server: BootstrapServer, context: zmq.Context[Any], backend: str, *, threaded: bool = True
) -> tuple[PrefillManager, DecodeManager]:
    chosen = Settings.build(disaggregation_transfer_backend=backend)
    worker, trace = MockWorker(mock_info(), threaded=threaded), Tracer("scheduler", None)
    prefill = PrefillManager(
        chosen, worker, context, WallClock(), trace, bootstrap=(server.host, server.port), piece_tokens=4
    )
    return prefill, DecodeManager(chosen, worker, context, WallClock(), trace)


def test_every_step_of_a_transfer_ends_a_poll(backend: str) -> None:
    """Nobody sleeps and looks again: from the lookup to Success a poll on `wakes` alone returns in time."""
    server, context = BootstrapServer(), zmq.Context[Any]()
    prefill, decode = managers(server, context, backend)
    sender = prefill.create_sender("r", 7, len(SLOTS))
    receiver = decode.create_receiver("r", 7, server.host, server.port, len(SLOTS))

    assert prefill.wait_ms == decode.wait_ms == 20  # for time limits alone

    def until(state: KVPoll) -> None:
        while not sender.poll() == receiver.poll() == state:
            poller = zmq.Poller()
            for each in prefill.wakes() + decode.wakes():
                poller.register(each, zmq.POLLIN)
            assert poller.poll(20_000), f"{sender.poll()}, {receiver.poll()}: nothing wakes it"
            prefill.pump()
            decode.pump()
            if receiver.poll() is KVPoll.WAITING_FOR_INPUT:
                receiver.init(as_slots(SLOTS), 0)

    until(KVPoll.WAITING_FOR_INPUT)
    sender.send(0, as_slots([each + 60 for each in SLOTS]), aux=aux(7))
    until(KVPoll.SUCCESS)
    decode.close()
    prefill.close()
    server.close()
    context.term()


def test_a_bell_ends_the_wait_for_messages() -> None:
    context, bell = zmq.Context[Any](), Bell()
    inbox: Receiver[ToScheduler] = Receiver(context, "inproc://bell", ToScheduler, bind=True)
    inbox.wake_on(lambda: [bell.fd])
    assert not inbox.wait(0)
    ringer = threading.Timer(0.05, bell.ring)
    ringer.start()
    assert not inbox.wait(-1)  # for ever, but for the bell
    ringer.join()
    for _ in range(100_000):  # more than a pipe holds
        bell.ring()
    assert not inbox.wait(-1)
    inbox.close()
    context.term()
    bell.close()
    bell.ring()  # late: nothing


def open_files() -> set[str]:
    """What the process has open, by number and kind."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
        except FileNotFoundError:  # that of the listing itself
            continue
    return found


def in_memory() -> set[str]:
    """What this process has in /dev/shm."""
    return {path.name for path in shared_memory.FOLDER.glob(f"{shared_memory.PREFIX}{os.getpid()}-*")}


def settled(before: set[str], threads: set[threading.Thread]) -> bool:
    """A closed socket's file goes a moment later, with zmq's own thread."""
    for _ in range(500):
        if open_files() <= before and set(threading.enumerate()) <= threads:
            return True
        time.sleep(0.01)
    return False


def test_no_thread_and_no_file_is_left_after_close(backend: str) -> None:
    threads, files, names = set(threading.enumerate()), open_files(), in_memory()
    server = BootstrapServer()
    context = zmq.Context[Any]()
    prefill, decode = managers(server, context, backend, threaded=False)
    sender = prefill.create_sender("r", 8, len(SLOTS))
    receiver = decode.create_receiver("r", 8, server.host, server.port, len(SLOTS))
    assert [thread.name for thread in threading.enumerate()].count("sgviz-kv-heart") == 2
    for _ in range(4000):
        prefill.pump()
        decode.pump()
        if receiver.poll() is KVPoll.WAITING_FOR_INPUT:
            receiver.init(as_slots(SLOTS), 0)
        if sender.poll() is KVPoll.WAITING_FOR_INPUT:
            sender.send(0, as_slots(SLOTS), aux=aux(8))
        if sender.poll() == receiver.poll() == KVPoll.SUCCESS:
            break
        time.sleep(0.001)
    assert sender.poll() == receiver.poll() == KVPoll.SUCCESS
    for _ in range(2):  # the scheduler closes it, and who started the scheduler
        decode.close()
        prefill.close()
    server.close()
    context.term()
    assert settled(files, threads), (open_files() - files, set(threading.enumerate()) - threads)
    assert in_memory() == names


def test_a_start_that_fails_leaves_nothing(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_route, "RETRY_S", 0.0)
    threads, files, names = set(threading.enumerate()), open_files(), in_memory()
    worker, trace = MockWorker(mock_info(), threaded=False), Tracer("scheduler", None)
    context = zmq.Context[Any]()
    for host, bootstrap in (("203.0.113.7", None), (None, ("127.0.0.1", 1))):  # not ours; nobody listens
        chosen = Settings.build(disaggregation_transfer_backend=backend, disaggregation_bootstrap_host=host)
        with pytest.raises(StartupError):
            PrefillManager(chosen, worker, context, WallClock(), trace, bootstrap=bootstrap)
    context.term()
    assert settled(files, threads), (open_files() - files, set(threading.enumerate()) - threads)
    assert in_memory() == names
