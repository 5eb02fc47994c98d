"""Questions to servers that need no pair: asked of one, or of several at once.

Imports: errors, serving (headers), this folder.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import httpx2
from starlette.requests import Request

from sgviz.errors import SgvizError, Unavailable, from_status
from sgviz.router.calls import NOT_PASSED, Told, request_to
from sgviz.router.servers import Server
from sgviz.serving.pass_on import end_to_end

Answers = dict[Server, Told | SgvizError]


def target_of(request: Request) -> bytes:
    """Path and query as they came."""
    raw: bytes = request.scope["raw_path"]
    query: bytes = request.scope["query_string"]
    return raw + (b"?" + query if query else b"")


async def ask(client: httpx2.AsyncClient, server: Server, request: Request) -> Told:
    """The server's answer to the same request.

    Raises:
        Unavailable: there is none.
    """
    headers = end_to_end(request.headers.raw, NOT_PASSED)
    made = request_to(client, server, request.method, target_of(request), headers, await request.body())
    try:
        response = await server.while_it_lives(client.send(made))
    except httpx2.RequestError as error:
        why = f"the {server.side} server {server.url} does not answer ({type(error).__name__})"
        raise Unavailable(why) from None
    if request.method == "HEAD":
        return Told(response.status_code, end_to_end(response.headers.raw, frozenset({b"date"})), b"")
    # the client asked for no encoding; what came with one nevertheless is unpacked here
    kept = end_to_end(response.headers.raw, frozenset({b"date", b"content-length", b"content-encoding"}))
    length = (b"content-length", b"%d" % len(response.content))
    return Told(response.status_code, [*kept, length], response.content)


async def ask_each(
    client: httpx2.AsyncClient, servers: Iterable[Server], request: Request, timeout: float | None = None
) -> Answers:
    """What each says; a server that is lost is not asked.

    Args:
        timeout: seconds for each; None: as long as it lives.
    """

    async def one(server: Server) -> Told | SgvizError:
        if not server.healthy:
            return Unavailable(server.why)
        try:
            async with asyncio.timeout(timeout):
                return await ask(client, server, request)
        except TimeoutError:
            return from_status(504, f"no answer within {timeout:g} s")
        except SgvizError as error:
            return error

    asked = list(servers)
    return dict(zip(asked, await asyncio.gather(*map(one, asked))))


def shown(answer: Told | SgvizError) -> dict[str, Any]:
    """For people and programs: status, and the body as JSON if it is that."""
    if isinstance(answer, SgvizError):
        return {"status": answer.status, "body": answer.message}
    text = answer.body.decode("utf-8", "replace")
    try:
        return {"status": answer.status, "body": json.loads(text)}
    except ValueError:
        return {"status": answer.status, "body": text}


def worst(answers: Mapping[Server, Told | SgvizError]) -> int:
    """The highest status of those that were asked; of all if none was."""
    asked = [answer.status for server, answer in answers.items() if server.healthy]
    return max(asked or [answer.status for answer in answers.values()])


def info_of(answer: Told | SgvizError) -> dict[str, Any]:
    """The JSON object of a good answer; empty if there is none."""
    body = shown(answer)["body"] if answer.status == 200 else None
    return body if isinstance(body, dict) else {}


def agreed(infos: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The plain values (no lists, no objects) that all have alike."""
    first, others = (infos[0], infos[1:]) if infos else ({}, ())
    return {
        name: value
        for name, value in first.items()
        if not isinstance(value, list | dict)
        and all(name in other and other[name] == value for other in others)
    }
