"""Arrivals and lengths from a file: `arrived_at` (seconds), `num_prefill_tokens`, `num_decode_tokens`.

The format of the public production traces that simulators share. Such files hold no text: prompts are made to
the lengths and share nothing. Imports: errors.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from sgviz.errors import BadRequest, SgvizError
from sgviz.workload.arrivals import Vocab, rid_of
from sgviz.workload.numbers import check_above_zero, check_counts
from sgviz.workload.value import Request, Segment, Workload

COLUMNS = ("arrived_at", "num_prefill_tokens", "num_decode_tokens")
Row = tuple[float, int, int]


def trace(
    path: str | os.PathLike[str],
    *,
    limit: int | None = None,
    start: int = 0,
    time_scale: float = 1.0,
    max_prompt_tokens: int | None = None,
    max_output_tokens: int | None = None,
    concurrency: int | None = None,
    seed: int = 0,
    vocab: Vocab = None,
) -> Workload:
    """The requests of a trace file (CSV with a header; other columns are ignored).

    Args:
        limit: so many rows at most, after skipping `start`. time_scale: 2 makes all gaps twice as long.
        max_prompt_tokens, max_output_tokens: longer ones are cut to this, for a smaller model.

    Raises:
        SgvizError: the file cannot be read. BadRequest: a column is missing or a value is not allowed.
    """
    check_above_zero(time_scale=time_scale)
    check_counts(0, start=start)
    bounds = {"limit": limit, "max_prompt_tokens": max_prompt_tokens, "max_output_tokens": max_output_tokens}
    check_counts(**{name: value for name, value in bounds.items() if value is not None})
    rows = list(islice(_rows(Path(path)), start, None if limit is None else start + limit))
    if not rows:
        raise BadRequest(f"{str(path)!r} has no row {start}")
    rows.sort(key=lambda row: row[0])
    requests = tuple(
        Request(
            rid=rid_of(number, len(rows)),
            at_s=round((at - rows[0][0]) * time_scale, 6),
            prompt=(Segment(f"prompt{number}", _cut(prompt, max_prompt_tokens)),),
            output_tokens=_cut(output, max_output_tokens),
        )
        for number, (at, prompt, output) in enumerate(rows)
    )
    shown = {
        "path": os.path.basename(path), "limit": limit, "start": start or None, "time_scale": time_scale,
        "max_prompt_tokens": max_prompt_tokens, "max_output_tokens": max_output_tokens, "seed": seed,
    }  # fmt: skip
    return Workload(
        name="trace", seed=seed, requests=requests, concurrency=concurrency, vocab=vocab, parameters=shown
    )


def _cut(tokens: int, most: int | None) -> int:
    return tokens if most is None else min(tokens, most)


def _rows(path: Path) -> Iterator[Row]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise BadRequest(f"{str(path)!r} lacks the column {missing[0]}; it has {reader.fieldnames}")
            for line in reader:
                yield _row(line, path, reader.line_num)
    except UnicodeDecodeError as error:
        raise BadRequest(f"{str(path)!r} is no trace: it is no text ({error})") from None
    except OSError as error:
        raise SgvizError(f"cannot read the trace {str(path)!r}: {error.strerror}") from error


def _row(line: dict[str, str], path: Path, number: int) -> Row:
    """One line; a request without a prompt or an answer counts as one token of it, as nothing runs without."""
    try:
        at, prompt, output = float(line[COLUMNS[0]]), float(line[COLUMNS[1]]), float(line[COLUMNS[2]])
        if not 0 <= at < float("inf") or prompt < 0 or output < 0:
            raise ValueError("times and lengths are 0 or more")
        return at, max(1, int(prompt)), max(1, int(output))
    except (TypeError, ValueError) as error:
        raise BadRequest(f"{str(path)!r}, line {number}: {error}") from None
