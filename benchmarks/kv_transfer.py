"""How fast KV goes from one pool to another through shared memory, beside a plain copy of the same bytes.

Two processes, each with a pool of the default model's shape and the managers that the schedulers use; from the first
send to Success on the sender's side, which comes after the receiver's. The slots are scattered pages, the worst case.
Plain copies and transfers take turns. `python benchmarks/kv_transfer.py [--tokens 1024] [--rounds 21] [--checksum]`
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import numpy as np
import torch
import zmq

from sgviz.config import Settings
from sgviz.disaggregation import DecodeManager, PrefillManager
from sgviz.disaggregation.bootstrap_server import BootstrapServer
from sgviz.disaggregation.protocol import KVAux, KVPoll
from sgviz.events import Tracer, WallClock
from sgviz.model.fetch import resolve_model
from sgviz.model.kv_pool import MHATokenToKVPool
from sgviz.model.model_config import model_facts
from sgviz.worker.kv_moves import KVMoves, layout_of
from sgviz.worker.stream import CpuStream

TARGETS = {16: 0.25, 1: 0.1}
WARM_UP = 3  # rounds in which memory is touched for the first time
ENDS = (KVPoll.SUCCESS, KVPoll.FAILED)


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured. `backend`: shm or tcp."""

    tokens: int
    page: int
    rounds: int
    checksum: bool
    backend: str

    def settings(self) -> Settings:
        return Settings.build(
            page_size=self.page,
            disaggregation_transfer_backend=self.backend,
            disaggregation_checksum=self.checksum,
        )


@dataclass(slots=True)
class Times:
    """Seconds of each round: plain copies, transfers, and the CPU time that was spent on them."""

    plain: list[float] = field(default_factory=list)
    plain_cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    sender_cpu: list[float] = field(default_factory=list)
    receiver_cpu: list[float] = field(default_factory=list)


class PoolWorker:
    """The pool of a worker and the copies around it."""

    def __init__(self, case: Case) -> None:
        facts = model_facts(resolve_model(case.settings().model.model_path))
        self.pool = MHATokenToKVPool(
            num_layers=facts.num_layers, size=4 * case.tokens, page_size=case.page, num_kv_heads=facts.num_kv_heads,
            head_dim=facts.head_dim, dtype=torch.float32, device="cpu",
        )  # fmt: skip
        self.kv_layout = layout_of(self.pool)
        self._stream = CpuStream()
        moves = KVMoves(lambda: self.pool, self._stream)
        self.read_kv, self.write_kv = moves.read_kv, moves.write_kv

    def prime(self, rows: list[int], tokens: list[int]) -> None:
        """No forwards here."""

    def slots(self, case: Case, seed: int) -> np.ndarray:
        """Slots of scattered whole pages."""
        page, count = case.page, -(-case.tokens // case.page)
        pages = np.random.default_rng(seed).permutation(self.pool.num_pages - 1)[:count] + 1
        return (pages[:, None] * page + np.arange(page)).reshape(-1)[: case.tokens].astype(np.int64)

    def sum_at(self, slots: np.ndarray) -> float:
        return sum(float(layer[:, :, slots].double().sum()) for layer in self.pool.layers)

    def close(self) -> None:
        self._stream.close()


def drive(manager: PrefillManager | DecodeManager, poll: Callable[[], KVPoll], *ends: KVPoll) -> None:
    """Turns as of an idle scheduler, which waits for what the manager says while a room is open."""
    while poll() not in ends:
        poller = zmq.Poller()
        for each in manager.wakes():
            poller.register(each, zmq.POLLIN)
        poller.poll(manager.wait_ms)
        manager.pump()


def decode_side(pipe: Connection, case: Case, host: str, port: int) -> None:
    """The other process: takes what comes."""
    torch.set_num_threads(1)
    context, worker = zmq.Context(), PoolWorker(case)
    manager = DecodeManager(case.settings(), worker, context, WallClock(), Tracer("scheduler", None))
    slots = worker.slots(case, 2)
    for room in range(case.rounds + WARM_UP):
        pipe.recv()
        receiver = manager.create_receiver(f"r{room}", room, host, port, case.tokens)
        drive(manager, receiver.poll, KVPoll.WAITING_FOR_INPUT, *ENDS)
        receiver.init(slots, 0)
        began = time.process_time()
        drive(manager, receiver.poll, *ENDS)
        spent = time.process_time() - began
        pipe.send((receiver.failure, worker.sum_at(slots), spent))
    manager.close()
    worker.close()
    context.term()


class PlainCopy:
    """A copy of as many bytes, from and to memory that was used before."""

    def __init__(self, size: int) -> None:
        self._source, self._target = np.ones(size, dtype=np.uint8), np.zeros(size, dtype=np.uint8)

    def seconds(self) -> tuple[float, float]:
        """Of one copy, on the wall and of CPU time."""
        began, start = time.thread_time(), time.perf_counter()
        np.copyto(self._target, self._source)
        return time.perf_counter() - start, time.thread_time() - began


def transfer(
    manager: PrefillManager, worker: PoolWorker, case: Case, room: int, pipe: Connection
) -> tuple[float, ...]:
    """One room from the first send on: seconds, the sender's CPU seconds, the receiver's."""
    slots = worker.slots(case, 1)
    sender = manager.create_sender(f"r{room}", room, case.tokens)
    pipe.send(room)
    drive(manager, sender.poll, KVPoll.WAITING_FOR_INPUT, *ENDS)
    began, start = time.process_time(), time.perf_counter()
    sender.send(0, slots, aux=KVAux(room=room, first_token=1))
    drive(manager, sender.poll, *ENDS)
    took, spent = time.perf_counter() - start, time.process_time() - began
    failure, found, theirs = pipe.recv()
    if failure or found != worker.sum_at(slots):
        raise SystemExit(f"the transfer failed: {sender.failure} {failure}")
    return took, spent, theirs


def measure(case: Case) -> Times:
    context, server, worker = zmq.Context(), BootstrapServer(), PoolWorker(case)
    for layer in worker.pool.layers:
        layer.normal_()
    address = (server.host, server.port)
    manager = PrefillManager(
        case.settings(), worker, context, WallClock(), Tracer("scheduler", None), bootstrap=address
    )
    spawn = multiprocessing.get_context("spawn")
    mine, theirs = spawn.Pipe()
    other = spawn.Process(target=decode_side, args=(theirs, case, *address))
    other.start()
    times, plain = Times(), PlainCopy(case.tokens * worker.kv_layout.wire_bytes)
    for room in range(case.rounds + WARM_UP):
        copied, copied_cpu = plain.seconds()
        took, sent, received = transfer(manager, worker, case, room, mine)
        if room >= WARM_UP:
            times.plain.append(copied)
            times.plain_cpu.append(copied_cpu)
            times.wall.append(took)
            times.sender_cpu.append(sent)
            times.receiver_cpu.append(received)
    other.join()
    manager.close()
    server.close()
    worker.close()
    context.term()
    return times


def report(case: Case, times: Times) -> None:
    """Ratios are plain copy over transfer.

    Those of CPU times hold on a busy machine too: to the busier side, which is what is left where each side has a core,
    and to both together.
    """
    plain, wall = statistics.median(times.plain), statistics.median(times.wall)
    ratio = statistics.median(a / b for a, b in zip(times.plain, times.wall))
    copy, sent, came = (
        statistics.median(each) for each in (times.plain_cpu, times.sender_cpu, times.receiver_cpu)
    )
    best = min(times.plain), min(times.wall)
    checked = ", checksum" if case.checksum else ""
    print(
        f"page size {case.page}, {case.backend}{checked}: {case.tokens} tokens, {case.rounds} rounds\n"
        f"  wall: transfer {ms(wall)} (best {ms(best[1])}), plain copy {ms(plain)} (best {ms(best[0])}); ratio of "
        f"medians {plain / wall:.2f}, median of ratios {ratio:.2f}, of bests {best[0] / best[1]:.2f}; at least "
        f"{TARGETS[case.page]} wanted\n"
        f"  CPU: sender {ms(sent)}, receiver {ms(came)}, plain copy {ms(copy)}; ratio to the busier side "
        f"{copy / max(sent, came):.2f}, to both {copy / (sent + came):.2f}"
    )


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--checksum", action="store_true")
    parser.add_argument("--backend", choices=["shm", "tcp"], default="shm")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for page in TARGETS:
        case = Case(options.tokens, page, options.rounds, options.checksum, options.backend)
        report(case, measure(case))


if __name__ == "__main__":
    main()
