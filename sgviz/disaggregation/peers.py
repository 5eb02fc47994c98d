"""What the prefill side knows of the decode ranks that take its KV. Imports: disaggregation (staging, wire), errors."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from sgviz.disaggregation.staging import Buffer, Staging
from sgviz.disaggregation.wire import Carrier
from sgviz.errors import SgvizError

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Peer:
    """A decode rank. `sent`: buffers that it has, by key and piece."""

    carrier: Carrier
    since_ns: int
    staging: Staging | None = None
    sent: dict[tuple[str, int], Buffer] = field(default_factory=dict)

    def take(self, size: int, *, or_tcp: bool) -> Buffer | None:
        """A free buffer of `size` bytes (the same in every call); None: all are under way.

        Where shared memory is full its KV goes over tcp from then on, if it may. Raises SgvizError if it may not.
        """
        if self.staging is None:
            try:
                self.staging = Staging(self.carrier, size)
            except SgvizError as error:
                if not or_tcp:
                    raise
                log.warning("KV goes over TCP to a decode server of this host: %s", error.message)
                self.carrier = "tcp"
                self.staging = Staging(self.carrier, size)
        return self.staging.take()

    def reclaim(self, key: str) -> None:
        """Nothing that was sent under `key` is read any more, not even what has not come yet."""
        for name in [each for each in self.sent if each[0] == key]:
            buffer = self.sent.pop(name)
            if self.staging is not None:
                self.staging.give_back(buffer)
