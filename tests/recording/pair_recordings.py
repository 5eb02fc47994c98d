"""The recordings of a pair of schedulers on one virtual clock, with devices that take time."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scheduler" / "disagg"))

import pair_rig
import rig
from pair_rig import Pair
from timed_rig import TimedWorker

from sgviz.events import VirtualClock
from sgviz.recording import Header, PairedRecording, Recording


class TimedMoving(TimedWorker):
    """TimedWorker whose KV can travel."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def timed_pair(patch: pytest.MonkeyPatch, **settings: Any) -> Pair:
    """A pair of which both sides tell the same time."""
    clock, make = VirtualClock(), pair_rig.MockWorker
    patch.setattr(rig, "VirtualClock", lambda *given: clock)
    patch.setattr(pair_rig, "MockWorker", lambda *args, **named: TimedMoving(make(*args, **named), clock))
    return Pair(**settings)


def recordings(pair: Pair) -> tuple[Recording, Recording]:
    """Of the prefill and the decode side."""
    one, two = (
        Recording(side.ring.snapshot(), Header(configured=side.configured(), clock="virtual"), source=name)
        for name, side in (("p.sgv", pair.prefill), ("d.sgv", pair.decode))
    )
    return one, two


def paired(pair: Pair) -> PairedRecording:
    return PairedRecording(*recordings(pair))
