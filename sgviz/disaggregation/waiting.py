"""What a scheduler does while it waits for its device: the KV goes on travelling.

In SGLang the transfer engine has threads of its own for that. Imports: disaggregation (limits, protocol).
"""

from __future__ import annotations

from collections.abc import Callable

import zmq

from sgviz.disaggregation.limits import LOOK_MS
from sgviz.disaggregation.protocol import KVManager


def pump_until(manager: KVManager, done: Callable[[], bool]) -> None:
    """Pump when something comes, until `done` or no room is open any more; not at all where nothing can ring."""
    while manager.busy and (wakes := manager.wakes()) and not done():
        manager.pump()
        poller = zmq.Poller()
        for each in wakes:
            poller.register(each, zmq.POLLIN)
        poller.poll(LOOK_MS)
