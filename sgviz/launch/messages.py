"""What parent and child say to each other before the sockets take over: msgpack with a length in front.

Imports: config, channel, messages (the embedding spec).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import IntEnum
from io import RawIOBase
from typing import BinaryIO

import msgspec

from sgviz.channel import PortArgs
from sgviz.config import Settings
from sgviz.errors import StartupError
from sgviz.messages.embedding import EmbeddingSpec

# at the default 5 ms every small torch operator of the worker's thread would wait for the interpreter lock
# behind the scheduler's thread
SWITCH_INTERVAL_S = 50e-6
_LENGTH = struct.Struct("<I")


class ExitCode(IntEnum):
    """How a child process ends by itself. (A process killed by a signal has a negative code.)"""

    ORDERLY = 0
    FAILED = 1
    PARENT_GONE = 3
    STUCK = 4


class BootMessage(msgspec.Struct, kw_only=True, frozen=True):
    """To a child: which component it is and all it needs.

    `clock_shift_ns`: on another host than node 0, what its clock lacks to be node 0's.
    """

    component: str
    settings: Settings
    ports: PortArgs
    tokenizer_dir: str
    worker: WorkerBoot | None = None
    clock_shift_ns: int = 0


class WorkerBoot(msgspec.Struct, kw_only=True, frozen=True):
    """What a tokenizer worker needs beside it.

    Attributes:
        listener_fd: a bound socket of the shared port, inherited. main_path: where the main process's app listens.
        scheduler: what that told of itself. model_dir: the model's folder.
    """

    number: int
    listener_fd: int
    main_path: str
    scheduler: InitInfo
    model_dir: str


class InitInfo(msgspec.Struct, kw_only=True, frozen=True):
    """From a component that is ready; the scheduler's also tells sizes (0 from the detokenizer).

    `unix_ns` and `monotonic_ns` were read together. Mirrors SGLang's `get_init_info`.
    """

    component: str
    pid: int
    unix_ns: int
    monotonic_ns: int
    model: str = ""
    device: str = ""
    dtype: str = ""
    vocab_size: int = 0
    context_len: int = 0
    eos_token_ids: tuple[int, ...] = ()
    max_total_num_tokens: int = 0
    max_req_len: int = 0
    max_req_input_len: int = 0
    max_running_requests: int = 0
    embedding: EmbeddingSpec | None = None
    is_generation: bool = True
    load_s: float = 0.0


class FailedStart(msgspec.Struct, kw_only=True, frozen=True, tag=True):
    """From a component that could not start."""

    component: str
    message: str
    traceback: str


class Ready(msgspec.Struct, kw_only=True, frozen=True, tag=True):
    info: InitInfo


class Died(msgspec.Struct, kw_only=True, frozen=True, tag=True):
    """The last words of a component that was ready once: why it ends. Its log says more."""

    why: str


def frame(message: msgspec.Struct) -> bytes:
    """The message with its length in front."""
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


def read_frame(stream: BinaryIO | RawIOBase) -> bytes:
    """One message's body; StartupError if the stream ends first."""
    head = _exactly(stream.read, _LENGTH.size)
    return _exactly(stream.read, _LENGTH.unpack(head)[0])


def _exactly(read: Callable[[int], bytes | None], count: int) -> bytes:
    out = b""
    while len(out) < count:
        piece = read(count - len(out))
        if not piece:
            raise StartupError("the pipe closed before the message was complete")
        out += piece
    return out
