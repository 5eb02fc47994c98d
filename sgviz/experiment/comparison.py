"""Comparison: several runs of one workload, as tables and pictures. Every number comes from the runs' events.

Imports: recording, workload, viz (for `figure`), pandas.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import pandas as pd

from sgviz.errors import NotFound, suggest
from sgviz.experiment.measures import Number, requests_of
from sgviz.recording import Recording
from sgviz.recording.balance import rank_loads
from sgviz.recording.overlap_account import OverlapAccount
from sgviz.workload import Workload

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = (
    "completed", "duration", "request_throughput", "output_throughput", "median_ttft_ms", "p99_ttft_ms",
    "median_itl_ms", "p99_itl_ms", "median_tpot_ms", "median_e2e_latency_ms", "p99_e2e_latency_ms", "iterations",
    "dropped_events",
)  # fmt: skip
RANKED = "imbalance"  # shown where a run had several data parallel ranks
UNITS = MappingProxyType({  # of the rows whose names do not end with theirs
    "completed": "requests", "duration": "s", "request_throughput": "requests/s", "output_throughput": "tokens/s",
    "iterations": "turns of the loop", RANKED: "prompt tokens of the busiest rank, of the mean",
    "dropped_events": "events", "hidden_share": "of 1", "device_idle_share": "of 1",
})  # fmt: skip
ACCOUNT_SHOWN = (
    "host_hidden_s", "host_exposed_s", "device_busy_s", "device_idle_s", "hidden_share", "device_idle_share",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Run:
    """One run: which settings (`name`), the how manyth time (`repeat`, from 0), what happened, and its numbers.

    `host`: how the host's work was counted; empty on the wall clock, where it simply took its time.
    """

    name: str
    repeat: int
    recording: Recording = field(repr=False)
    numbers: dict[str, Number] = field(repr=False)
    account: OverlapAccount = field(repr=False)
    host: str = ""

    @property
    def device(self) -> str:
        """As the settings name it; a simulated one with its model."""
        return self.recording.header.device

    @property
    def simulated(self) -> bool:
        """Its device was a cost model."""
        return self.recording.header.simulated


class Comparison:
    """What `compare` found.

    Attributes:
        runs: every single run, in the order in which they were made.
        names: the settings compared, in the order given.
    """

    def __init__(self, workload: Workload, runs: Sequence[Run]) -> None:
        self.workload = workload
        self.runs = tuple(runs)
        self.names = tuple(dict.fromkeys(run.name for run in runs))
        self._requests: pd.DataFrame | None = None

    # ------------------------------------------------------------ tables

    @property
    def table(self) -> pd.DataFrame:
        """A row a name: throughput (a second), latencies (ms), iterations; medians over the repeats."""
        return self._over_repeats(self.every_run, pd.DataFrame.median)

    @property
    def spread(self) -> pd.DataFrame:
        """As `table`: how far the repeats lie apart, (largest - smallest) / median. Below it all is noise."""
        rows = self.every_run
        middle = self._over_repeats(rows, pd.DataFrame.median)
        width = self._over_repeats(rows, pd.DataFrame.max) - self._over_repeats(rows, pd.DataFrame.min)
        return (width / middle.abs()).fillna(0.0)

    @property
    def every_run(self) -> pd.DataFrame:
        """As `table`, a row for each repeat: indexed by name and repeat."""
        return self._rows([run.numbers for run in self.runs])

    def ratios(self, measure: str = "output_throughput") -> pd.DataFrame:
        """`measure` of each name divided by that of the first, repeat by repeat: `median`, `low`, `high`.

        Neighbouring runs are divided, so a machine that drifts does so above and below the line. A row whose
        `low` and `high` lie on the two sides of 1 shows no difference that these repeats could tell from noise.

        Raises:
            NotFound: the table has no such column.
        """
        rows = self.every_run
        if measure not in rows:
            raise NotFound(f"no measure {measure!r}{suggest(measure, rows.columns)}")
        first = rows.loc[self.names[0], measure]
        parts = {name: rows.loc[name, measure] / first for name in self.names[1:]}
        found = {name: (part.median(), part.min(), part.max()) for name, part in parts.items()}
        return pd.DataFrame(found, index=["median", "low", "high"]).T.rename_axis("run")

    def verdict(self, measure: str = "output_throughput") -> str:
        """`ratios` as sentences, with what is noise called so."""
        return "\n".join(
            f"{measure} of {name} is {row['median']:.2f} times that of {self.names[0]} ({row['low']:.2f} to "
            f"{row['high']:.2f} over {self.repeats} pairs of runs): {_certainty(row, self.repeats)}"
            for name, row in self.ratios(measure).iterrows()
        )

    @property
    def overlap_account(self) -> pd.DataFrame:
        """A row a name: `host_hidden_s`, `host_exposed_s`, `device_idle_s`, `device_busy_s`, shares and more.

        Seconds inside the account's window, medians over the repeats; see `recording.overlap_account`. Of several
        ranks those of the one whose device was busiest.
        """
        rows = self._rows([run.account.row() for run in self.runs])
        return self._over_repeats(rows.drop(columns="until"), pd.DataFrame.median)

    @property
    def stages(self) -> pd.DataFrame:
        """The account by component and stage: `busy_s`, `hidden_s`, `exposed_s`, medians over the repeats."""
        rows = [
            (run.name, run.repeat, row.component, row.stage, row.busy_s, row.hidden_s, row.exposed_s)
            for run in self.runs
            for row in run.account.stages
        ]
        columns = ["run", "repeat", "component", "stage", "busy_s", "hidden_s", "exposed_s"]
        table = pd.DataFrame(rows, columns=columns)
        medians = table.groupby(["run", "component", "stage"], sort=False).median()
        return medians.drop(columns="repeat")

    @property
    def rank_loads(self) -> pd.DataFrame:
        """A row a name and data parallel rank: `requests`, `prompt_tokens`, `output_tokens`; medians over the repeats.

        `imbalance` of the other tables is the largest `prompt_tokens` of a run divided by their mean.
        """
        parts = {(run.name, run.repeat): rank_loads(run.recording).set_index("dp_rank") for run in self.runs}
        table = pd.concat(parts, names=["run", "repeat", "dp_rank"])
        return table.groupby(level=["run", "dp_rank"], sort=False).median()

    @property
    def requests(self) -> pd.DataFrame:
        """A row a request that all runs had, by rid; columns `(measure, run name)`, medians over the repeats.

        `ttft_ms`, `tpot_ms`, `max_itl_ms`, `e2e_ms`, `queue_ms`, `cached_tokens`, `retractions`; and
        `same_output`: whether every run of every name gave the same token ids.
        """
        if self._requests is None:
            self._requests = _pairs(self.runs, self.names)
        return self._requests.copy()

    # ------------------------------------------------------------ runs

    @property
    def recordings(self) -> dict[str, Recording]:
        """By name: the recording of the repeat whose throughput is the middle one."""
        return {name: self.middle(name).recording for name in self.names}

    @property
    def accounts(self) -> dict[str, OverlapAccount]:
        """By name: the whole account of that same repeat, with its spans."""
        return {name: self.middle(name).account for name in self.names}

    def middle(self, name: str) -> Run:
        """The repeat of `name` whose output throughput is the middle one (the lower of two).

        Raises:
            NotFound: there is no such name.
        """
        mine = [run for run in self.runs if run.name == name]
        if not mine:
            raise NotFound(f"no run {name!r}{suggest(name, self.names)}; there are {', '.join(self.names)}")
        mine.sort(key=lambda run: run.numbers["output_throughput"])
        return mine[(len(mine) - 1) // 2]

    @property
    def repeats(self) -> int:
        return max((run.repeat for run in self.runs), default=-1) + 1

    @property
    def simulated(self) -> bool:
        return any(run.simulated for run in self.runs)

    @property
    def ranked(self) -> bool:
        """Whether a run had several data parallel ranks."""
        return any(len(run.recording.ranks) > 1 for run in self.runs)

    # ------------------------------------------------------------ showing

    def figure(self, *, seconds: float | None = None, look: str = "light") -> Figure:
        """Lanes of device and host over the same seconds, the account as bars, percentiles with their spread.

        Below them, where a run had several ranks, what each of these got.

        Args:
            seconds: how much of the run the lanes show; None: about ten forwards. look: `light` or `dark`.
        """
        from sgviz.viz.comparison_figure import comparison_figure

        return comparison_figure(
            self.accounts, self.every_run, source=self.source_line(), seconds=seconds, look=look,
            rank_loads=self.rank_loads if self.ranked else None,
        )  # fmt: skip

    def source_line(self) -> str:
        """Where the numbers come from: stands below every table and figure."""
        clocks = dict.fromkeys(run.recording.header.clock for run in self.runs)
        hosts = [f"host {host}" for host in dict.fromkeys(run.host for run in self.runs) if host]
        lost = sum(int(run.numbers["dropped_events"]) for run in self.runs)
        devices = ", ".join(dict.fromkeys(run.device for run in self.runs))
        how = f"median of {self.repeats} interleaved runs each" if self.repeats > 1 else "one run each"
        made = f"device SIMULATED ({devices})" if self.simulated else f"device {devices}, measured"
        clock = ", ".join([*clocks, *hosts])
        return "  ·  ".join([f"events, {how}", f"clock: {clock}", f"{lost:,} events dropped", made])

    def summary(self) -> str:
        """The tables in short, as text."""
        table, account = self._shown()
        spread = self.spread["output_throughput"].max()
        same = self.requests["same_output"]
        equal = f"{int(same.sum())} of {len(same)} requests have the same output ids in every run"
        noise = (
            f"repeats differ by up to {spread:.1%} in output throughput" if self.repeats > 1 else "one repeat"
        )
        parts = [str(self.workload), table.to_string(float_format="{:,.2f}".format)]
        parts += [account.to_string(float_format="{:,.3f}".format), f"{equal}; {noise}"]
        parts += [self.verdict()] if len(self.names) > 1 else []
        parts.append(self.source_line())
        return "\n\n".join(parts)

    def __str__(self) -> str:
        return self.summary()

    def __repr__(self) -> str:
        return f"<Comparison {' vs '.join(self.names)}: {len(self.workload.requests)} requests, {self.repeats} repeats>"

    def _repr_html_(self) -> str:
        table, account = self._shown()
        html = table.to_html(float_format="{:,.2f}".format), account.to_html(float_format="{:,.3f}".format)
        return f"{html[0]}{html[1]}<p><small>{self.source_line()}</small></p>"

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write `NAME-REPEAT.sgv` for each run, `table.csv`, `requests.csv`, `overlap_account.csv`,
        `rank_loads.csv`, `workload.json`."""
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        for run in self.runs:
            run.recording.save(target / f"{run.name}-{run.repeat}.sgv")
        self.every_run.to_csv(target / "table.csv")
        self.requests.to_csv(target / "requests.csv")
        self.overlap_account.to_csv(target / "overlap_account.csv")
        self.rank_loads.to_csv(target / "rank_loads.csv")
        self.workload.save(target / "workload.json")

    # ------------------------------------------------------------ inside

    def _shown(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        """The two tables for a reader: a column a name, a row a measure with its unit."""
        shown = [*SHOWN, RANKED] if self.ranked else list(SHOWN)
        table, account = self.table[shown].T, self.overlap_account[list(ACCOUNT_SHOWN)].T
        return table.rename(index=_with_unit), account.rename(index=_with_unit)

    def _rows(
        self, numbers: Sequence[dict[str, Number]] | Sequence[dict[str, float | int | str]]
    ) -> pd.DataFrame:
        index = pd.MultiIndex.from_tuples(
            [(run.name, run.repeat) for run in self.runs], names=["run", "repeat"]
        )
        return pd.DataFrame(list(numbers), index=index)

    def _over_repeats(self, rows: pd.DataFrame, reduce: Callable[[pd.DataFrame], pd.Series]) -> pd.DataFrame:
        found = {name: reduce(rows.xs(name, level="run")) for name in self.names}
        return pd.DataFrame(found).T.rename_axis("run")


def _with_unit(name: str) -> str:
    return f"{name} ({UNITS[name]})" if name in UNITS else name


def _certainty(row: pd.Series, repeats: int) -> str:
    if repeats < 2:
        return "one pair proves nothing"
    if row["low"] < 1 < row["high"]:
        return "no difference beyond noise"
    return "every pair says so" if row["low"] != row["high"] or row["median"] != 1 else "no difference"


def _pairs(runs: Sequence[Run], names: Sequence[str]) -> pd.DataFrame:
    tables = [(run.name, requests_of(run.recording)) for run in runs]
    rids = tables[0][1].index
    for _, table in tables[1:]:
        rids = rids.intersection(table.index, sort=False)
    measures = ["ttft_ms", "tpot_ms", "max_itl_ms", "e2e_ms", "queue_ms", "cached_tokens", "retractions"]
    columns: dict[tuple[str, str], pd.Series] = {
        ("prompt_tokens", ""): tables[0][1].loc[rids, "prompt_tokens"],
        ("output_tokens", ""): tables[0][1].loc[rids, "output_tokens"],
    }
    for measure in measures:
        for name in names:
            mine = [table.loc[rids, measure].astype(float) for own, table in tables if own == name]
            columns[measure, name] = pd.concat(mine, axis=1).median(axis=1)
    outputs = pd.concat([table.loc[rids, "output_ids"] for _, table in tables], axis=1)
    columns["same_output", ""] = outputs.nunique(axis=1) == 1
    return pd.DataFrame(columns)
