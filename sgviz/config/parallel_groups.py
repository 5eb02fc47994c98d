"""Settings of many schedulers: data parallel ranks, and the two sides of prefill/decode disaggregation.

Imports: config.field.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from sgviz.config.field import field_meta

LOAD_BALANCE_METHODS = ("auto", "round_robin", "follow_bootstrap_room", "total_requests", "total_tokens")
DisaggregationMode = Literal["null", "prefill", "decode"]
TransferBackend = Literal["auto", "shm", "tcp", "fake"]


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How many schedulers there are, and who gets a request."""

    dp_size: Annotated[
        int, field_meta("Schedulers (data parallel ranks), each with the whole model.", "SGLang", ge=1, le=64)
    ] = 1
    load_balance_method: Annotated[
        str,
        field_meta(
            "Who gets a request: round_robin (in turn), follow_bootstrap_room (room modulo ranks), total_requests or "
            "total_tokens (who has fewest), auto (follow_bootstrap_room on a prefill server, else round_robin), or "
            "your own as module:Class or file.py:Class.",
            "SGLang; classes are ours",
        ),
    ] = "auto"
    load_snapshot_publish_interval: Annotated[
        int,
        field_meta("Results after which a scheduler tells its load; after a prefill always.", "SGLang", ge=1),
    ] = 15
    base_gpu_id: Annotated[
        int, field_meta("The GPU of this host's first rank, as torch numbers them.", "SGLang", ge=0)
    ] = 0
    gpu_id_step: Annotated[
        int,
        field_meta(
            "From a rank's GPU to the next rank's; 0: all ranks of this host share one.",
            "SGLang; 0 is ours",
            ge=0,
        ),
    ] = 1
    nnodes: Annotated[
        int,
        field_meta(
            "Hosts over which the ranks are spread evenly; each host starts its own `sgviz serve`.",
            "SGLang",
            ge=1,
            le=64,
        ),
    ] = 1
    node_rank: Annotated[
        int,
        field_meta(
            "Which of these hosts this is. Node 0 serves; the others only run schedulers for it.",
            "SGLang",
            ge=0,
        ),
    ] = 0
    dist_init_addr: Annotated[
        str | None,
        field_meta(
            "host:port of node 0, as all nodes reach it. The ports after that one are used too: 4, and one for each "
            "rank of another node. Whoever reaches them can use the engine: a private network only.",
            "SGLang",
        ),
    ] = None
    node_timeout: Annotated[
        float,
        field_meta(
            "Seconds in which the nodes must have found each other.", "ours; SGLang: dist_timeout", gt=0.0
        ),
    ] = 300.0
    node_heartbeat_timeout: Annotated[
        float,
        field_meta(
            "Seconds without a sign of life after which a node is lost to node 0, and node 0 to a node.",
            "ours",
            ge=0.5,
        ),
    ] = 10.0

    def ranks_of(self, node: int) -> range:
        """The data parallel ranks that this node runs."""
        share = self.dp_size // self.nnodes
        return range(node * share, (node + 1) * share)

    def gpu_of(self, rank: int) -> int:
        """The number of the GPU that a rank of this node takes, where the device is a GPU."""
        return self.base_gpu_id + (rank - self.ranks_of(self.node_rank).start) * self.gpu_id_step


class DisaggregationConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Prefill on one server, decode on another."""

    disaggregation_mode: Annotated[
        DisaggregationMode,
        field_meta("prefill: prompts only; decode: what follows them; null: both.", "SGLang"),
    ] = "null"
    disaggregation_transfer_backend: Annotated[
        TransferBackend,
        field_meta(
            "How KV travels: shm on one host, tcp between hosts, fake: nothing travels (warm-up, tests); auto: shm "
            "where both sides see the same memory, else tcp.",
            "ours; SGLang: mooncake, nixl, ...",
        ),
    ] = "auto"
    disaggregation_bootstrap_port: Annotated[
        int,
        field_meta(
            "Port at which a prefill server tells decode servers where its ranks are; 0 takes a free one.",
            "SGLang",
            ge=0,
            le=65535,
        ),
    ] = 8998
    disaggregation_bootstrap_host: Annotated[
        str | None,
        field_meta(
            "Address of that port and of the KV channel, as decode servers reach it; default: the server's host.",
            "ours",
        ),
    ] = None
    disaggregation_bootstrap_timeout: Annotated[
        float,
        field_meta(
            "Seconds in which both sides of a request must have found each other.",
            "SGLang: SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT",
            gt=0.0,
        ),
    ] = 300.0
    disaggregation_waiting_timeout: Annotated[
        float,
        field_meta(
            "Seconds a decode server waits for the KV of a request that it has room for.",
            "SGLang: SGLANG_DISAGGREGATION_WAITING_TIMEOUT",
            gt=0.0,
        ),
    ] = 300.0
    disaggregation_heartbeat_interval: Annotated[
        float,
        field_meta(
            "Seconds between two signs of life; a side that misses as many as heartbeat_max_failures is lost.",
            "SGLang: SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL",
            gt=0.0,
        ),
    ] = 5.0
    disaggregation_heartbeat_max_failures: Annotated[
        int,
        field_meta(
            "Signs of life that may be missed.",
            "SGLang: SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE",
            ge=1,
        ),
    ] = 2
    disaggregation_checksum: Annotated[bool, field_meta("Verify every piece of KV that arrives.", "ours")] = (
        False
    )
    disaggregation_decode_enable_radix_cache: Annotated[
        bool, field_meta("A decode server keeps prefixes and has only the rest sent.", "SGLang")
    ] = False
    disaggregation_decode_retraction: Annotated[
        Literal["keep", "recompute"],
        field_meta(
            "A retracted request of a decode server: its KV is kept in host memory, or computed again.",
            "SGLang keeps it",
        ),
    ] = "keep"
    disaggregation_decode_kept_tokens: Annotated[
        Annotated[int, msgspec.Meta(ge=0)] | None,
        field_meta(
            "KV tokens of retracted requests that a decode server keeps in host memory at most; whoever finds no place "
            "there is computed again. Default: as many as its KV pool has.",
            "ours",
        ),
    ] = None
    num_reserved_decode_tokens: Annotated[
        int,
        field_meta(
            "KV tokens a decode server keeps free for each request that it runs or awaits.", "SGLang", ge=0
        ),
    ] = 512
    disaggregation_decode_polling_interval: Annotated[
        int, field_meta("Turns of a decode server between two looks at its transfers.", "SGLang", ge=1)
    ] = 1
