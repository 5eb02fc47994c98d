"""Ranks on several hosts: which node runs which, at which ports they reach node 0, and what all nodes must agree in.

Mirrors how SGLang places data parallel ranks on nodes and takes ports from `dist_init_addr` on.
Imports: channel, config, errors.
"""

from __future__ import annotations

import socket
from hashlib import blake2b
from pathlib import Path

from sgviz.channel import HostAddresses
from sgviz.config import Settings
from sgviz.config.nodes import meeting_point, ports_after
from sgviz.config.parallel_groups import ParallelConfig
from sgviz.errors import StartupError

Value = str | int | float | bool | None
MODEL_FILES = ("config.json", "generation_config.json", "tokenizer.json")  # weights are too big to compare
GROUPS = ("model", "sim", "cache", "schedule", "grammar", "parallel")
BESIDE = ("disable_events", "reasoning_parser", "skip_server_warmup")  # of other groups; schedulers use them
# where files lie and how much a host has may differ
OWN = frozenset(
    ("model_path", "tokenizer_path", "chat_template", "served_model_name", "weight_version", "torch_threads")
    + ("max_total_tokens", "mem_fraction_static", "base_gpu_id", "gpu_id_step")
    + ("node_rank", "dist_init_addr", "node_timeout")
)


def tcp(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def numeric(host: str) -> str:
    """The IP address of `host`; sockets are bound to nothing else. Raises StartupError if it has none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise StartupError(f"dist_init_addr: host {host!r} cannot be found: {error}") from error
    return str(found[0][4][0])


def meeting_address(parallel: ParallelConfig) -> str:
    """Where the nodes meet."""
    host, port = meeting_point(parallel)
    return tcp(numeric(host), port)


def addresses_of(parallel: ParallelConfig) -> HostAddresses | None:
    """What node 0 opens for the ranks of other nodes: the ports after the first one. None where there are none.

    Raises:
        StartupError: one of them, or the first, is taken; told before a model is loaded for nothing.
    """
    if parallel.nnodes == 1:
        return None
    name, port = meeting_point(parallel)
    host, last = numeric(name), port + ports_after(parallel)
    for each in range(port, last + 1):
        try:
            _try_port(host, each)
        except OSError as error:
            raise StartupError(
                f"dist_init_addr {parallel.dist_init_addr}: node 0 cannot listen on {host}:{each} "
                f"({error.strerror}); it needs ports {port} to {last} of an address of its own"
            ) from None
    tokenizer, detokenizer, events, loads, *others = (
        tcp(host, port + n) for n in range(1, 1 + ports_after(parallel))
    )
    remote = range(len(parallel.ranks_of(0)), parallel.dp_size)
    return HostAddresses(
        tokenizer=tokenizer,
        detokenizer=detokenizer,
        events=events,
        loads=loads,
        ranks=dict(zip(remote, others, strict=True)),
    )


def _try_port(host: str, port: int) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1)


def agreement(settings: Settings, model_dir: Path) -> dict[str, Value]:
    """What must be the same on all nodes, by name; `model` is a digest of the model's small files."""
    flat = settings.flat()
    names = [name for group in GROUPS for name in getattr(settings, group).__struct_fields__]
    out = {name: flat[name] for name in (*names, *BESIDE) if name not in OWN}
    digest = blake2b(digest_size=8)
    for name in MODEL_FILES:
        path = model_dir / name
        digest.update(path.read_bytes() if path.is_file() else b"none")
    return {**out, "model": digest.hexdigest()}


def disagreement(here: dict[str, Value], there: dict[str, Value]) -> str:
    """What differs, as in `page_size 16 (node 0 has 1)`; empty if nothing does."""
    names = sorted(here.keys() | there.keys())
    found = [name for name in names if here.get(name) != there.get(name)]
    if found == ["model"]:
        return f"another model ({', '.join(MODEL_FILES)} are not those of node 0)"
    return ", ".join(
        f"{name} {there.get(name)} (node 0 has {here.get(name)})" for name in found if name != "model"
    )
