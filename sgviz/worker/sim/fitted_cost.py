"""FittedCost: how long a forward takes, learnt from a recording of a real device.

Four coefficients by least squares over relative errors: a constant, and seconds per new token, per position of KV
read, and per pair of attention, fitted for prefill and decode apart where there are enough batches of both.
None of them becomes negative. It carries over to batches like those recorded, and to no others; `error` says how
well it fits those. Imports: errors, worker.sim, numpy.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from sgviz.errors import ConfigError, SgvizError
from sgviz.worker.sim.step_work import StepWork

if TYPE_CHECKING:
    import pandas as pd

Floats = npt.NDArray[np.float64]
NS_PER_MS = 1e6
LEAST_BATCHES = 8  # fewer points than this say nothing about four coefficients
NAMES = ("constant", "per_new_token", "per_context", "per_pair")


class Tables(Protocol):
    """The tables of a `sgviz.Recording` that are read here."""

    @property
    def iterations(self) -> pd.DataFrame: ...

    @property
    def batches(self) -> pd.DataFrame: ...


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """Nanoseconds as a sum; the fields are factors of 1, new tokens, context and pairs."""

    constant: float = 0.0
    per_new_token: float = 0.0
    per_context: float = 0.0
    per_pair: float = 0.0

    def at(self, work: StepWork) -> float:
        return (
            self.constant
            + self.per_new_token * work.new_tokens
            + self.per_context * work.context
            + self.per_pair * work.pairs
        )


class FittedCost(msgspec.Struct, frozen=True, kw_only=True):
    """A cost model that answers with what was seen.

    Attributes:
        decode, extend: the lines for batches that only decode and for all others.
        batches: how many were fitted. error: median of their relative errors. worst: the 95th percentile.
        source: where the recording came from.
    """

    decode: Line
    extend: Line
    batches: int
    error: float
    worst: float
    source: str = ""

    def step_ns(self, work: StepWork) -> int:
        line = self.decode if work.new_tokens == work.rows else self.extend
        return max(0, int(line.at(work)))

    @classmethod
    def from_recording(cls, recording: Tables, source: str = "") -> FittedCost:
        """Fit the batches of `recording` that ran on the device.

        Raises:
            SgvizError: fewer than eight batches have a device time.
        """
        works, times = _observed(recording)
        if len(works) < LEAST_BATCHES:
            raise SgvizError(
                f"{len(works)} batches of the recording have a device time; a fit takes {LEAST_BATCHES} at least"
            )
        decoding = np.array([work.new_tokens == work.rows for work in works])
        lines = [_fit_part(works, times, decoding == wanted) for wanted in (True, False)]
        fitted = cls(
            decode=lines[0], extend=lines[1], batches=len(works), error=0.0, worst=0.0, source=source
        )
        errors = np.abs(np.array([fitted.step_ns(work) for work in works]) / times - 1)
        return msgspec.structs.replace(
            fitted, error=float(np.median(errors)), worst=float(np.quantile(errors, 0.95))
        )

    def save(self, path: str | Path) -> None:
        """Write the coefficients as JSON."""
        Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(self)))

    @classmethod
    def load(cls, path: str | Path) -> FittedCost:
        """Read what `save` wrote. Raises ConfigError when it cannot be read."""
        try:
            return msgspec.json.decode(Path(path).read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(
                f"the fitted costs in {str(path)!r} cannot be read: {error}", param="sim_cost"
            ) from error


def _observed(recording: Tables) -> tuple[list[StepWork], Floats]:
    """The work and the device time (ns) of each batch that has one."""
    iterations, members = recording.iterations, recording.batches
    took = {int(bid): float(ms) for bid, ms in zip(iterations["bid"], iterations["device_ms"]) if ms > 0}
    found: dict[int, list[tuple[int, int]]] = {bid: [] for bid in took}
    for bid, prefix, extend in zip(members["bid"], members["prefix_len"], members["extend_len"]):
        if int(bid) in found:
            found[int(bid)].append((int(prefix), int(extend)))
    return [StepWork.of(found[bid]) for bid in took], np.array(list(took.values())) * NS_PER_MS


def _fit_part(works: list[StepWork], times: Floats, part: npt.NDArray[np.bool_]) -> Line:
    """The line of the batches in `part`; of all of them where the part is too small to say anything."""
    chosen = part if int(part.sum()) >= LEAST_BATCHES else np.ones_like(part)
    rows = np.array([(1.0, work.new_tokens, work.context, work.pairs) for work in works])[chosen]
    return Line(**dict(zip(NAMES, _not_negative(rows, times[chosen]))))


def _not_negative(rows: Floats, times: Floats) -> list[float]:
    """Least squares of relative errors; columns whose factor would be negative are left out, worst first."""
    weighted, ones = rows / times[:, None], np.ones(len(times))
    columns = list(range(rows.shape[1]))
    while True:
        scale = np.abs(weighted[:, columns]).max(axis=0)
        factors = np.linalg.lstsq(weighted[:, columns] / scale, ones, rcond=None)[0] / scale
        if (factors >= 0).all() or len(columns) == 1:
            break
        del columns[int((factors * scale).argmin())]
    out = [0.0] * rows.shape[1]
    for column, factor in zip(columns, factors):
        out[column] = max(0.0, float(factor))
    return out
