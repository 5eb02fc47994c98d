"""What the settings of several hosts must be, and the address at which they meet.

Mirrors how SGLang's ServerArgs checks `nnodes`, `node_rank` and `dist_init_addr`. Simplified: data parallel ranks only,
no tensor parallel group over hosts. Imports: config (groups), errors.
"""

from __future__ import annotations

from sgviz.config.parallel_groups import DisaggregationConfig, ParallelConfig
from sgviz.errors import ConfigError

LAST_PORT = 65535
SHARED_PORTS = 4  # after the first one: inboxes of TokenizerManager and detokenizer, events, loads


def meeting_point(parallel: ParallelConfig) -> tuple[str, int]:
    """Host and port of `dist_init_addr`, an IPv6 host without its brackets.

    Raises:
        ConfigError: it is not given, or is no `host:port` with room for the ports after it.
    """
    address = parallel.dist_init_addr
    if address is None:
        raise ConfigError(
            f"setting nnodes = {parallel.nnodes} needs dist_init_addr, the host:port of node 0 as all nodes reach it",
            param="dist_init_addr",
        )
    host, colon, digits = address.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if (
        not colon
        or not bare
        or not digits.isascii()
        or not digits.isdigit()
        or (":" in bare and bare == host)
    ):
        raise ConfigError(
            f"setting dist_init_addr = {address!r}: it must be host:port, an IPv6 address in brackets",
            param="dist_init_addr",
        )
    last = LAST_PORT - ports_after(parallel)
    if not 1 <= int(digits) <= last:
        raise ConfigError(
            f"setting dist_init_addr = {address!r}: its port must be between 1 and {last}, as "
            f"{ports_after(parallel)} ports after it are used too",
            param="dist_init_addr",
        )
    return bare, int(digits)


def ports_after(parallel: ParallelConfig) -> int:
    """How many ports after that of `dist_init_addr` node 0 opens: one for each rank of another node, and the shared."""
    return SHARED_PORTS + parallel.dp_size - parallel.dp_size // parallel.nnodes


def check_nodes(parallel: ParallelConfig, disaggregation: DisaggregationConfig) -> None:
    """Raise ConfigError for nodes that do not fit together."""
    nodes, ranks = parallel.nnodes, parallel.dp_size
    if parallel.node_rank >= nodes:
        raise ConfigError(
            f"setting node_rank = {parallel.node_rank}: it must be less than nnodes, which is {nodes}",
            param="node_rank",
        )
    if parallel.dist_init_addr is not None:
        meeting_point(parallel)
    if nodes == 1:
        return
    if ranks % nodes:
        raise ConfigError(
            f"setting dp_size = {ranks}: with nnodes = {nodes} it must be a multiple of {nodes}, so that each node "
            "has as many ranks",
            param="dp_size",
        )
    meeting_point(parallel)
    if disaggregation.disaggregation_mode != "null":
        raise ConfigError(
            f"disaggregation_mode {disaggregation.disaggregation_mode} and nnodes = {nodes} do not go together: start "
            "a server on each host, and name them all to sgviz router",
            param="nnodes",
        )
