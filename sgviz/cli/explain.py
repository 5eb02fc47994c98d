"""`sgviz explain RUN RID`: where one request's time went, in words or as a picture. Imports: recording, viz."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator, Sequence

from sgviz.cli.recorded import add_pair, opened, opened_pair, parser
from sgviz.errors import BadRequest
from sgviz.recording import Recording
from sgviz.recording.explanation import Explanation, plain_ms

MOST = 20
NS_PER_MS = 1e6


def main(argv: Sequence[str]) -> int:
    made = parser("explain", "Say where the time of a request went, and what it waited for.")
    made.add_argument("run", metavar="RUN", nargs="?", help="a recording (.sgv)")
    made.add_argument(
        "rid",
        metavar="RID",
        nargs="?",
        help="the request, or the beginning or end of its name; without it, the slowest are listed",
    )
    made.add_argument("--figure", metavar="FILE", help="also draw it (.png, .svg or .pdf)")
    made.add_argument(
        "--at",
        type=float,
        metavar="MS",
        help="instead: why each waiting request did not run then, in ms since the first request arrived, as in figures",
    )
    add_pair(made)
    args = made.parse_intermixed_args(argv)  # RUN --figure FILE RID too
    if args.prefill or args.decode or args.router:
        return _explain_pair(args)
    if args.run is None:
        made.error("give a recording (.sgv), or both of a pair by --prefill and --decode")
    rec = opened(args.run)
    if args.at is not None:
        print("\n".join(_waiting(rec, args.at)))
        return 0
    if args.rid is None and len(rec.rids) == 1:
        args.rid = rec.rids[0]
    if args.rid is None:
        _list(rec)
        print(rec.cost_words)
        return 0
    print(rec.explain(args.rid).text(shutil.get_terminal_size((110, 24)).columns))
    print(f"\n{rec.cost_words}")
    if args.figure:
        from sgviz.viz.explain_figure import explain_figure
        from sgviz.viz.save import save_figure

        print(save_figure(explain_figure(rec, args.rid), args.figure))
    return 0


def _explain_pair(args: argparse.Namespace) -> int:
    """A request over both servers; without a name the slowest ones."""
    if args.at is not None:
        raise BadRequest("--at looks at one recording; name it instead of --prefill and --decode")
    if args.rid is not None:
        raise BadRequest(
            f"a pair is named by --prefill and --decode, and {args.run!r} is one recording too many"
        )
    pair, rid = opened_pair(args.prefill, args.decode, args.router), args.run
    if rid is None and len(pair.rids) > 1:
        slowest = pair.requests.sort_values("total_ms", ascending=False).rid.head(MOST)
        print("\n".join(_line(pair.explain(each)) for each in slowest))
        return 0
    print(pair.explain(rid or pair.rids[0]).text(shutil.get_terminal_size((110, 24)).columns))
    print(f"\n{pair.clock.words}")
    if args.figure:
        from sgviz.viz.pair_journey_figure import pair_journey_figure
        from sgviz.viz.save import save_figure

        print(save_figure(pair_journey_figure(pair, rid or pair.rids[0]), args.figure))
    return 0


def _waiting(rec: Recording, at_ms: float) -> Iterator[str]:
    """A line a request that waits `at_ms` after the first arrival: since when, the cause, and its words below.

    Raises:
        BadRequest: the recording has no such moment.
    """
    arrivals = rec.requests.arrival_ms.dropna()
    first = float(arrivals.min()) if len(arrivals) else 0.0
    begin, end = -first, (rec.t_end - rec.t0) / NS_PER_MS - first
    if not begin <= at_ms <= end:
        raise BadRequest(
            f"the recording goes from {begin:,.3f} to {end:,.3f} ms; of {at_ms:,.3f} ms it knows nothing"
        )
    table = rec.why_not_running(at_ms + first)
    if table.empty:
        yield "nobody waited then"
    for row in table.itertuples():
        waited = (
            f"waits for {plain_ms(round(row.waited_ms * 1e6))}" if row.waited_ms == row.waited_ms else "waits"
        )
        yield f"{row.position + 1:>4}. {row.rid} {waited}: {row.cause}"
        yield f"      {row.detail}"


def _list(rec: Recording) -> None:
    """The slowest requests with what most of their time went into."""
    slowest = rec.waits.sort_values("total_ms", ascending=False).rid.head(MOST)
    for rid in slowest:
        print(_line(rec.explain(rid)))


def _line(explanation: Explanation) -> str:
    causes = list(explanation.by_cause().items())[:3]
    words = ", ".join(f"{cause} {plain_ms(ns)}" for cause, ns in causes)
    return f"{explanation.rid}  {explanation.total_ns / 1e6:,.3f} ms: {words}"
