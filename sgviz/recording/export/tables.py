"""Parquet and CSV: one file a table. Columns of tuples become lists in Parquet and JSON text in CSV.

Imports: errors, recording, pandas; pyarrow for Parquet.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from sgviz.errors import SgvizError
from sgviz.recording.recording import Recording

TABLES = ("events", "requests", "iterations", "batches", "kv", "kv_owners", "decisions", "tokens", "waits")


def write(rec: Recording, path: Path | str, to: str) -> list[str]:
    """Write every table into the folder `path`, which is made if it is not there."""
    folder = Path(path)
    suffix = "parquet" if to == "parquet" else "csv"
    if to == "parquet":
        _need_pyarrow()  # before anything is made on disk
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in TABLES:
            target = folder / f"{name}.{suffix}"
            table: pd.DataFrame = getattr(rec, name)
            _write_parquet(table, target) if to == "parquet" else _write_csv(table, target)
            written.append(str(target))
    except OSError as error:
        raise SgvizError(f"cannot write the tables into {str(folder)!r}: {error}") from error
    return written


def _tuple_columns(table: pd.DataFrame) -> Iterable[str]:
    for name in table.columns:
        if table[name].dtype == object and table[name].map(lambda value: isinstance(value, tuple)).any():
            yield name


def _write_csv(table: pd.DataFrame, target: Path) -> None:
    for name in _tuple_columns(table):
        table[name] = table[name].map(json.dumps)
    table.to_csv(target, index=False)


def _need_pyarrow() -> None:
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise SgvizError(
            'parquet needs pyarrow: pip install -e ".[export]" in the project\'s folder'
        ) from error


def _write_parquet(table: pd.DataFrame, target: Path) -> None:
    for name in _tuple_columns(table):
        table[name] = table[name].map(_as_list)
    table.to_parquet(target, index=False, engine="pyarrow")


def _as_list(value: object) -> object:
    """Holders `(rid, amount)` become records, other tuples lists."""
    if not isinstance(value, tuple):
        return value
    if value and all(isinstance(item, tuple) for item in value):
        return [{"rid": rid, "amount": amount} for rid, amount in value]
    return list(value)
