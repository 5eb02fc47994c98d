"""`sgviz router`: one address in front of prefill and decode servers, until a signal. Imports: router."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import Sequence

from sgviz.cli.logs import configure_logging
from sgviz.cli.options import Parser, port_number
from sgviz.errors import ConfigError
from sgviz.router.options import POLICIES, RouterOptions, address, prefill_of
from sgviz.router.run import RunningRouter, running
from sgviz.serving.server import check_address, loop_factory

LEVELS = ("debug", "info", "warning", "error")


def main(argv: Sequence[str]) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        options = _options(args)
    except ConfigError as error:
        parser.error(error.message)
    configure_logging(args.log_level)
    check_address(options.host, options.port)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_run(options, args.json))
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="sgviz router",
        description="One address in front of prefill and decode servers (sgviz serve --disaggregation-mode ...): each "
        "request goes to one of either kind, and the decode server's answer to the client. Servers may come and go.",
    )
    parser.add_argument(
        "--prefill", action="append", nargs="+", required=True, metavar=("URL", "BOOTSTRAP_PORT"),
        help="a prefill server, and its bootstrap port (default: what the server says); may be given again",
    )  # fmt: skip
    parser.add_argument(
        "--decode", action="append", required=True, metavar="URL", help="a decode server; may be given again"
    )
    _add_serving(parser)
    _add_choosing(parser)
    parser.add_argument("--record", metavar="FILE", help="write the router's events to a .sgv file")
    parser.add_argument(
        "--json", action="store_true", help="say on one line of JSON when it is ready, and where"
    )
    parser.add_argument("--log-level", choices=LEVELS, default="info", help="default: %(default)s")
    return parser


def _add_serving(parser: Parser) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="address to serve at (default: %(default)s)")
    parser.add_argument(
        "--port",
        type=port_number,
        default=8000,
        metavar="N",
        help="0 takes a free one (default: %(default)s)",
    )
    parser.add_argument("--api-key", help="key for the router's own questions; clients' keys are passed on")
    parser.add_argument(
        "--max-body-mb",
        type=float,
        default=64.0,
        metavar="X",
        help="size of a body at most (default: %(default)s)",
    )
    parser.add_argument(
        "--request-timeout",
        type=float,
        metavar="S",
        help="seconds until a stream begins, or a whole answer is there (default: no limit)",
    )


def _add_choosing(parser: Parser) -> None:
    parser.add_argument(
        "--policy", choices=POLICIES, default="round_robin",
        help="who gets a request, on either side: in turn, at random, the one with the fewest requests of this router, "
        "or that of two at random (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--retries", type=int, default=2, metavar="N",
        help="other pairs that a request may try before its first token (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--health-interval", type=float, default=2.0, metavar="S",
        help="seconds between two looks at a server (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--health-timeout",
        type=float,
        default=5.0,
        metavar="S",
        help="seconds a look may take (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help="of the rooms, and of choices at random; for tests (default: a fresh one)",
    )


def _options(args: argparse.Namespace) -> RouterOptions:
    """Raises ConfigError."""
    return RouterOptions(
        prefill=tuple(prefill_of(words) for words in args.prefill),
        decode=tuple(address(url) for url in args.decode),
        host=args.host,
        port=args.port,
        policy=args.policy,
        retries=args.retries,
        request_timeout=args.request_timeout,
        health_interval=args.health_interval,
        health_timeout=args.health_timeout,
        max_body_mb=args.max_body_mb,
        record=args.record,
        seed=args.seed,
        api_key=args.api_key,
    )


async def _run(options: RouterOptions, as_json: bool) -> None:
    """Until SIGTERM, SIGHUP or Ctrl-C; answers under way have ten seconds then."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop.set)
    async with running(options) as router:
        _say_ready(router, as_json)
        await stop.wait()
        print("sgviz router: stopping", file=sys.stderr, flush=True)


def _say_ready(running: RunningRouter, as_json: bool) -> None:
    account = running.router.account()
    if as_json:
        print(json.dumps({"url": running.url, **account}), flush=True)
        return
    counts = [
        f"{sum(server['healthy'] for server in account[side])} of {len(account[side])} {side} servers"
        for side in ("prefill", "decode")
    ]
    print(f"sgviz router is ready: {running.url}/v1  {counts[0]} and {counts[1]} healthy", flush=True)
