"""What node 0 and the other nodes of an engine say to each other, msgpack over a ROUTER and a DEALER.

A node joins, is welcomed or refused, compares clocks, tells when its schedulers are ready; then both sides send signs
of life. SGLang's nodes meet in torch's store. Imports: channel, data_parallel (nodes), launch.messages.
"""

from __future__ import annotations

import msgspec

from sgviz.channel import HostAddresses
from sgviz.data_parallel.nodes import Value
from sgviz.launch.messages import InitInfo

BEATS = 5  # signs of life within the time after which their sender is lost


class Join(msgspec.Struct, kw_only=True, frozen=True, tag=True):
    """From a node, again and again until it is answered. `agree`: the settings that must be those of node 0."""

    node_rank: int
    version: str
    agree: dict[str, Value]


class Welcome(msgspec.Struct, kw_only=True, frozen=True, tag=True):
    instance_id: str
    addresses: HostAddresses


class Refused(msgspec.Struct, kw_only=True, frozen=True, tag=True):
    """The node cannot join, or is no longer counted on."""

    why: str


class AskClock(msgspec.Struct, kw_only=True, frozen=True, tag=True):
    """What is node 0's monotonic clock? `sent_ns`: by the asker's, and comes back."""

    sent_ns: int


class TellClock(msgspec.Struct, kw_only=True, frozen=True, tag=True):
    sent_ns: int
    now_ns: int


class NodeReady(msgspec.Struct, kw_only=True, frozen=True, tag=True):
    """All schedulers of the node are ready."""

    infos: list[InitInfo]


class ComponentDied(msgspec.Struct, kw_only=True, frozen=True, tag=True):
    """One of the node's schedulers did; the node goes on with the others."""

    component: str
    how: str


class Leaving(msgspec.Struct, kw_only=True, frozen=True, tag=True):
    """The node ends, with all its schedulers."""

    why: str


class Beat(msgspec.Struct, kw_only=True, frozen=True, tag=True):
    """A sign of life, either way."""


class Bye(msgspec.Struct, kw_only=True, frozen=True, tag=True):
    """Node 0 ends; `why`: None after an orderly stop."""

    why: str | None = None


ToNodeZero = Join | AskClock | NodeReady | ComponentDied | Leaving | Beat
ToNode = Welcome | Refused | TellClock | Beat | Bye
