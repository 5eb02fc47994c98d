"""KV out of a pool and into one, in a form that does not know of slots and pages.

The wire form of n tokens is [layers, K and V, KV heads, n, head_dim], little-endian as in memory. Slots that are
neighbours are copied as one where that is many, else page by page where they are whole pages in order, else slot by
slot. On a CPU the bytes go straight between the pool and the buffer; on a GPU through pinned memory, beside the
forwards that come later.
Mirrors the copies behind SGLang's transfer engines, which let the network card read the pool itself.
Imports: cache (types), model.kv_pool, worker.kv_copy, worker.protocol, worker.stream, torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sgviz.cache.req_kv import Slots
from sgviz.errors import SgvizError
from sgviz.model.kv_pool import MHATokenToKVPool
from sgviz.worker.kv_copy import StreamCopy, timed
from sgviz.worker.protocol import KVLayout
from sgviz.worker.stream import CpuStream

Bits = npt.NDArray[np.void]  # numbers of which nothing is known but their width
Runs = list[tuple[int, int, int]]
LEAST_RUN = 8  # slots; shorter ones are copied one by one


def layout_of(pool: MHATokenToKVPool, model: str = "mha") -> KVLayout:
    """Two pools of one tag hold numbers of one meaning, whatever their sizes.

    Args:
        model: tells its layers from others whose KV has the same shape (DecoderConfig.mark).
    """
    dtype = str(pool.dtype).removeprefix("torch.")
    tag = f"{model}:{len(pool.layers)}x2x{pool.num_kv_heads}x{pool.head_dim}:{dtype}"
    return KVLayout(tag=tag, wire_bytes=pool.bytes_per_token, nominal_bytes=pool.bytes_per_token)


class KVMoves:
    """`read_kv` and `write_kv` of a worker with a MHATokenToKVPool.

    Args:
        pool: asked for at each copy, on the stream.
        stream: where the forwards are launched.
        enqueue: of a GPU, puts work between its forwards; None: the stream itself computes.
    """

    def __init__(
        self,
        pool: Callable[[], MHATokenToKVPool],
        stream: CpuStream,
        enqueue: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        self._pool = pool
        self._stream = stream
        self._enqueue = enqueue
        self._host: CpuStream | None = CpuStream("sgviz-kv") if enqueue is not None else None

    def read_kv(self, slots: Slots, out: memoryview) -> StreamCopy:
        """Copy the KV of `slots` into `out`, behind the launched forwards."""
        slots = slots.copy()
        if self._host is None:
            return StreamCopy(self._stream.submit(lambda: timed(lambda: self._read(slots, out))))
        host, began = self._host, self._stream.submit(lambda: self._begin_read(slots))
        return StreamCopy(host.submit(lambda: timed(lambda: _to_buffer(began.result(), out))))

    def write_kv(self, slots: Slots, data: memoryview) -> StreamCopy:
        """Copy `data` into `slots`, before the forwards launched later."""
        slots = slots.copy()
        if self._host is None:
            return StreamCopy(self._stream.submit(lambda: timed(lambda: self._write(slots, data))))
        host, began = self._host, self._stream.submit(lambda: self._begin_write(slots, data))
        return StreamCopy(host.submit(lambda: timed(lambda: began.result().synchronize())))

    def close(self) -> None:
        if self._host is not None:
            self._host.close()

    # Everything below runs on a stream.

    def _read(self, slots: Slots, out: memoryview) -> None:
        pool = self._pool()
        if not len(_checked(pool, slots, out)):
            return
        runs = _long_runs(slots, pool.page_size)
        if runs is None:
            rows, index = _rows_of(pool, slots, len(pool.layers))
            # `clip`: else numpy gathers into a copy of the buffer first; the slots are checked
            source = _bits(pool, rows)
            np.take(source, index, out=np.frombuffer(out, dtype=source.dtype), mode="clip")
        else:
            for kv, part in _run_pairs(pool, runs, out, len(slots)):
                part[:] = kv

    def _write(self, slots: Slots, data: memoryview) -> None:
        pool = self._pool()
        if not len(_checked(pool, slots, data)):
            return
        runs = _long_runs(slots, pool.page_size)
        if runs is None:
            rows, index = _rows_of(pool, slots, len(pool.layers))
            target = _bits(pool, rows)
            target[index] = np.frombuffer(data, dtype=target.dtype)
        else:
            for kv, part in _run_pairs(pool, runs, data, len(slots)):
                kv[:] = part

    @torch.inference_mode()
    def _begin_read(self, slots: Slots) -> tuple[Tensor, torch.cuda.Event]:
        pool, copied = self._pool(), torch.cuda.Event()
        rows, found = _rows_of(pool, slots)
        index = torch.from_numpy(found)
        width = pool.layers[0].numel() // rows
        host = torch.empty((len(pool.layers), len(index), width), dtype=pool.dtype, pin_memory=True)

        def gather() -> None:
            where = index.to(pool.device)
            for layer, part in zip(pool.layers, host):
                part.copy_(layer.view(rows, -1).index_select(0, where), non_blocking=True)
            copied.record()

        assert self._enqueue is not None
        self._enqueue(gather)
        return host, copied

    @torch.inference_mode()
    def _begin_write(self, slots: Slots, data: memoryview) -> torch.cuda.Event:
        pool, done = self._pool(), torch.cuda.Event()
        rows, found = _rows_of(pool, slots)
        index = torch.from_numpy(found)
        width = pool.layers[0].numel() // rows
        host = torch.empty((len(pool.layers), len(index), width), dtype=pool.dtype, pin_memory=True)
        host.view(torch.uint8).view(-1).numpy()[:] = np.frombuffer(
            _checked(pool, slots, data), dtype=np.uint8
        )

        def scatter() -> None:
            where = index.to(pool.device)
            for layer, part in zip(pool.layers, host):
                layer.view(rows, -1).index_copy_(0, where, part.to(pool.device, non_blocking=True))
            done.record()

        assert self._enqueue is not None
        self._enqueue(scatter)
        return done


def _to_buffer(read: tuple[Tensor, torch.cuda.Event], out: memoryview) -> None:
    host, copied = read
    copied.synchronize()
    np.frombuffer(out, dtype=np.uint8)[:] = host.view(torch.uint8).view(-1).numpy()


def _rows_of(pool: MHATokenToKVPool, slots: Slots, layers: int = 1) -> tuple[int, Slots]:
    """As many layers seen as so many rows, and which of them the slots are, for all heads of K and V in turn.

    A row is a page of one head where the slots are whole pages in order, else one slot of one head.
    """
    heads, page = layers * 2 * pool.num_kv_heads, pool.page_size
    units, count = slots, pool.num_slots
    if page > 1 and _whole_pages(slots, page):
        units, count = slots[::page] // page, pool.num_pages
    index = np.arange(heads)[:, None] * count + units
    return heads * count, index.reshape(-1)


def _whole_pages(slots: Slots, page: int) -> bool:
    if len(slots) % page:
        return False
    pages = slots.reshape(-1, page)
    return bool((pages[:, 0] % page == 0).all() and (pages == pages[:, :1] + np.arange(page)).all())


def _long_runs(slots: Slots, page: int) -> Runs | None:
    """The slots as runs of neighbours: first slot, its place in `slots`, how many.

    None where they are so short that to gather rows is faster: a copy of a run costs a call.
    """
    starts = np.flatnonzero(np.diff(slots, prepend=slots[0] - 2) != 1)
    least = 2 * page if page > 1 and _whole_pages(slots, page) else LEAST_RUN
    if len(starts) * least > len(slots):
        return None
    counts = np.diff(starts, append=len(slots))
    return list(zip(slots[starts].tolist(), starts.tolist(), counts.tolist()))


def _checked(pool: MHATokenToKVPool, slots: Slots, buffer: memoryview) -> memoryview:
    wanted = len(slots) * pool.bytes_per_token
    if buffer.nbytes != wanted:
        raise SgvizError(f"{len(slots)} tokens of KV have {wanted} bytes, the buffer has {buffer.nbytes}")
    if len(slots) and not 0 <= int(slots.min()) <= int(slots.max()) < pool.num_slots:
        raise SgvizError(f"slots {slots.min()} to {slots.max()} are not all in a pool of {pool.num_slots}")
    return buffer


def _run_pairs(
    pool: MHATokenToKVPool, runs: Runs, wire: memoryview, tokens: int
) -> Iterator[tuple[Bits, Bits]]:
    """Each run in the pool and in the wire form, both [heads of K and V of all layers, slots of the run]."""
    heads = len(pool.layers) * 2 * pool.num_kv_heads
    kv = _bits(pool, heads * pool.num_slots).reshape(heads, -1)
    parts = np.frombuffer(wire, dtype=kv.dtype).reshape(heads, tokens)
    for slot, at, count in runs:
        yield kv[:, slot : slot + count], parts[:, at : at + count]


def _bits(pool: MHATokenToKVPool, rows: int) -> Bits:
    """The pool's memory as so many rows."""
    flat: Bits = pool.block.view(torch.uint8).numpy().reshape(-1).view(f"V{pool.block.nbytes // rows}")
    return flat
