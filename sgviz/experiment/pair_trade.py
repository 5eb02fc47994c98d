"""Trade: runs of one workload on differently joined schedulers side by side, ranks of one engine beside a pair.

Latencies are those of a client in this process: from the arrival to the first token at the tokenizer manager, between
two tokens there, and to the end; of a pair, at the decode side. SGLang leaves this to bench_serving, run twice.
Imports: recording, viz (for `figure`), pandas.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pandas as pd

from sgviz.errors import BadRequest, NotFound, suggest
from sgviz.recording import PairedRecording, Recording
from sgviz.recording.pair_tables import token_gaps

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Floats = npt.NDArray[np.float64]
Run = Recording | PairedRecording
PERCENTILES = {"ttft": (50, 90, 99), "itl": (50, 90, 99, 99.9), "e2e": (50, 90, 99)}
NAMES = {"ttft": "first token", "itl": "between two tokens", "e2e": "whole answer"}


@dataclass(frozen=True, slots=True)
class Latencies:
    """Of the requests that ended well, in ms: [requests] `ttft` and `e2e`, [gaps] `itl`; `duration_s` from the
    first arrival to the last end, `tokens` that came out in it."""

    ttft: Floats
    itl: Floats
    e2e: Floats
    duration_s: float
    tokens: int

    def of(self, measure: str) -> Floats:
        found: Floats = getattr(self, measure)
        return found


class Trade:
    """The runs by name, in the order given.

    Raises:
        BadRequest: there is no run.
    """

    def __init__(self, runs: Mapping[str, Run]) -> None:
        if not runs:
            raise BadRequest("a trade needs at least one run")
        self.runs = dict(runs)
        self.latencies = {name: latencies_of(run) for name, run in self.runs.items()}

    @property
    def table(self) -> pd.DataFrame:
        """A row a run: `completed`, `output_throughput` (tokens/s), and pN_ttft_ms, pN_itl_ms, pN_e2e_ms for N of
        PERCENTILES."""
        rows = {}
        for name, own in self.latencies.items():
            row: dict[str, float] = {
                "completed": len(own.e2e),
                "output_throughput": own.tokens / own.duration_s,
            }
            for measure in PERCENTILES:
                for p in PERCENTILES[measure]:
                    row[f"p{p}_{measure}_ms"] = _percentile(own.of(measure), p)
            rows[name] = row
        return pd.DataFrame(rows).T.rename_axis("run").astype({"completed": int})

    @property
    def devices(self) -> pd.DataFrame:
        """A row a device of each run, by `(run, device)`: what it was given and how much of it was used.

        `prompt_tokens` computed there, `output_tokens` made there, `busy_share` of the time from the first arrival to
        the last end, `kv_peak` and `kv_tokens`: most tokens held at once, and room for them.
        """
        rows = {
            (name, device): _device(rec, self.latencies[name].duration_s)
            for name, run in self.runs.items()
            for device, rec in _parts(run)
        }
        return (
            pd.DataFrame(rows)
            .T.rename_axis(["run", "device"])
            .astype(dict.fromkeys(("prompt_tokens", "output_tokens", "kv_peak", "kv_tokens"), int))
        )

    def ratio(self, column: str, name: str) -> float:
        """`column` of `table` of the run divided by that of the first. Raises NotFound for other names."""
        table = self.table
        for given, known in ((column, table.columns), (name, table.index)):
            if given not in known:
                raise NotFound(f"no {given!r}{suggest(given, known)}; there are {', '.join(known)}")
        return float(table.loc[name, column] / table.loc[table.index[0], column])

    def verdict(self) -> str:
        """What the other runs give and take beside the first, as sentences."""
        table, first = self.table, next(iter(self.runs))
        return "\n".join(
            f"{NAMES[measure]}, p{p}: {name} {table.loc[name, column]:,.1f} ms, {first} "
            f"{table.loc[first, column]:,.1f} ms: {_words(self.ratio(column, name))}"
            for name in list(self.runs)[1:]
            for measure in PERCENTILES
            for p in PERCENTILES[measure]
            if (column := f"p{p}_{measure}_ms")
        )

    def figure(self, *, look: str = "light") -> Figure:
        """How many waited longer than so long: for the first token, and between two."""
        from sgviz.viz.trade_figure import trade_figure

        series = {
            NAMES[measure]: {name: own.of(measure) for name, own in self.latencies.items()}
            for measure in ("ttft", "itl")
        }
        return trade_figure(series, source=self.source_line(), look=look)

    def source_line(self) -> str:
        """Where the numbers come from."""
        recs = [rec for run in self.runs.values() for _, rec in _sides(run)]
        clocks = ", ".join(dict.fromkeys(rec.header.clock for rec in recs))
        devices = ", ".join(dict.fromkeys(rec.header.device for rec in recs))
        made = (
            f"device SIMULATED ({devices})"
            if any(rec.header.simulated for rec in recs)
            else f"device {devices}"
        )
        lost = sum(rec.dropped for rec in recs)
        return "  ·  ".join(["events, one run each", f"clock: {clocks}", f"{lost:,} events dropped", made])

    def __repr__(self) -> str:
        return f"<Trade {' against '.join(self.runs)}>"


def latencies_of(run: Run) -> Latencies:
    """The latencies of one run."""
    table, gaps = _requests(run)
    done = table[table.finish_reason.isin(("stop", "length"))]
    ends = done.arrival_ms + done.e2e_ms
    return Latencies(
        ttft=done.ttft_ms.dropna().to_numpy(dtype=np.float64),
        itl=gaps,
        e2e=done.e2e_ms.dropna().to_numpy(dtype=np.float64),
        duration_s=float(ends.max() - done.arrival_ms.min()) / 1000 if len(done) else float("nan"),
        tokens=int(done.completion_tokens.sum()),
    )


def _requests(run: Run) -> tuple[pd.DataFrame, Floats]:
    """Arrival, first token, end and tokens of each request, and the gaps of all."""
    if isinstance(run, PairedRecording):
        gaps = [*token_gaps(run).values()]
        found = np.concatenate(gaps) if gaps else np.empty(0)
        return run.requests.rename(columns={"total_ms": "e2e_ms"}), found.astype(np.float64)
    from sgviz.viz.latency_figure import inter_token_ms

    return run.requests, inter_token_ms(run)


def _sides(run: Run) -> Iterator[tuple[str, Recording]]:
    if isinstance(run, PairedRecording):
        yield from (("prefill", run.prefill), ("decode", run.decode))
    else:
        yield "", run


def _parts(run: Run) -> Iterator[tuple[str, Recording]]:
    """Each device and the recording of its scheduler."""
    for side, rec in _sides(run):
        for rank in rec.ranks:
            words = [side, f"rank {rank}" if len(rec.ranks) > 1 else ""]
            yield " ".join(filter(None, words)) or "device", rec.rank(rank)


def _device(rec: Recording, seconds: float) -> dict[str, float]:
    turns = rec.iterations
    ran = turns[turns.device_ms.notna()]
    prefills = ran[ran["mode"].isin(("extend", "mixed"))]
    return {
        "prompt_tokens": float(prefills.new_tokens.sum()),
        "output_tokens": float(rec.tokens.bid.isin(ran.bid).sum()),
        "busy_share": float(ran.device_ms.sum()) / 1000 / seconds if seconds else float("nan"),
        "kv_peak": float(turns.kv_used.max()) if len(turns) else 0.0,
        "kv_tokens": float((turns.kv_used + turns.kv_free).max()) if len(turns) else 0.0,
    }


def _percentile(values: Floats, p: float) -> float:
    return float(np.percentile(values, p)) if len(values) else float("nan")


def _words(ratio: float) -> str:
    """1.25 -> `1.25 times as long`; 0.5 -> `0.50 times as long`."""
    return "the same" if 0.995 < ratio < 1.005 else f"{ratio:.2f} times as long"
