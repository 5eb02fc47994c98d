"""The servers behind a router: what is known of each, and the task that looks at them again and again.

A server that could not be reached, or is not what it was given as, gets no requests until a look says otherwise.
SGLang's mini_lb looks only when it is asked for its own health. Imports: serving (what a server tells of its
ranks), this folder.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

import httpx2

from sgviz.router.options import RouterOptions
from sgviz.serving.routing import ranks_out

log = logging.getLogger(__name__)
DEFAULT_BOOTSTRAP_PORT = 8998
SILENT_LOOKS = (
    3  # that one after the other got no answer in their time: the server hangs, or the way to it is cut
)
NO_WAY = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN, errno.ETIMEDOUT})
SideName = Literal["prefill", "decode"]
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Server:
    """One server.

    Attributes:
        why: it gets no requests because of this; "" if it is healthy.
        requests: under way here from this router.
        bootstrap_host, bootstrap_port: of a prefill server, where decode servers find its ranks.
        asked: it has said what it is since it was last lost.
        ranks, ranks_out: how many data parallel ranks it has, and which of them get no requests; 1 and none if all do.
        given, failed: requests it got from this router, and those of them to which its connection broke.
        silent: looks since its last sign of life that got no answer in time. hangs: there were SILENT_LOOKS of them.
        losses, last_why: how often it was lost, and why the last time.
    """

    url: str
    side: SideName
    bootstrap_host: str = ""
    bootstrap_port: int | None = None
    given_port: int | None = None
    why: str = "it was not looked at yet"
    requests: int = 0
    asked: bool = False
    ranks: int = 1
    ranks_out: frozenset[int] = frozenset()
    given: int = 0
    failed: int = 0
    silent: int = 0
    losses: int = 0
    last_why: str = ""
    hangs: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def healthy(self) -> bool:
        return not self.why

    def lose(self, why: str) -> None:
        """It gets no requests until a look finds it well."""
        if self.why != why:
            log.warning("the %s server %s gets no requests: %s", self.side, self.url, why)
        self.losses += self.healthy
        self.why = self.last_why = why
        self.asked = False

    def find(self) -> None:
        """A look found it well."""
        if not self.healthy:
            log.info("the %s server %s is there", self.side, self.url)
        self.why = ""

    def lives(self) -> None:
        """It gave a sign of life, well or not."""
        self.silent = 0
        self.hangs.clear()

    def keeps_silent(self) -> None:
        """A look got no answer in its time."""
        self.silent += 1
        if self.silent >= SILENT_LOOKS:
            self.hangs.set()

    async def while_it_lives(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which waits for this server; cancelled, and ended, once the server hangs.

        Raises:
            httpx2.ReadTimeout: it hangs.
        """
        task, hangs = asyncio.create_task(work), asyncio.create_task(self.hangs.wait())
        try:
            await asyncio.wait((task, hangs), return_when=asyncio.FIRST_COMPLETED)
        finally:
            hangs.cancel()
            left = not task.done()
            if left:
                task.cancel()
                await asyncio.wait((task,))
        if left:
            raise httpx2.ReadTimeout(f"no sign of life in {SILENT_LOOKS} looks")
        return task.result()

    def account(self) -> dict[str, Any]:
        """For people and programs."""
        shown: dict[str, Any] = {
            "url": self.url, "side": self.side, "healthy": self.healthy, "why": self.why, "requests": self.requests,
        }  # fmt: skip
        if self.side == "prefill":
            shown |= {"bootstrap_host": self.bootstrap_host, "bootstrap_port": self.bootstrap_port}
        return shown


class Watch:
    """Looks at all servers, each every `health_interval` seconds. Make it in the loop that it lives in."""

    def __init__(self, options: RouterOptions, client: httpx2.AsyncClient) -> None:
        self._options, self._client = options, client
        self.prefill = [
            Server(url, "prefill", urlsplit(url).hostname or "", port or DEFAULT_BOOTSTRAP_PORT, port)
            for url, port in options.prefill
        ]
        self.decode = [Server(url, "decode") for url in options.decode]
        self._tasks: list[asyncio.Task[None]] = []
        self._looks: dict[Server, asyncio.Task[None]] = {}  # the last beside the regular ones

    @property
    def servers(self) -> Sequence[Server]:
        return [*self.prefill, *self.decode]

    async def start(self) -> None:
        """Return after a first look at each."""
        await asyncio.gather(*[self._look(server) for server in self.servers])
        self._tasks = [asyncio.create_task(self._keep_looking(server)) for server in self.servers]

    async def stop(self) -> None:
        tasks = (*self._tasks, *self._looks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def suspect(self, server: Server, why: str) -> asyncio.Task[None]:
        """The connection of a request failed: nobody gets this server before a look finds it well.

        One look is enough for all requests that fail at once, and the first of them says why.
        """
        server.failed += 1
        if server.healthy:
            server.lose(why)
        return self.look(server)

    def look(self, server: Server) -> asyncio.Task[None]:
        """A look at it, now; the one under way if there is one."""
        look = self._looks.get(server)
        if look is None or look.done():
            look = self._looks[server] = asyncio.create_task(self._look(server))
        return look

    async def _keep_looking(self, server: Server) -> None:
        while True:
            await asyncio.sleep(self._options.health_interval)
            await self._look(server)

    async def _look(self, server: Server) -> None:
        """Never raises: whatever it is, the next look must come."""
        try:
            async with asyncio.timeout(self._options.health_timeout):
                why = await self._why_not(server)
        except (TimeoutError, httpx2.TimeoutException):
            server.keeps_silent()
            server.lose(f"it did not answer GET /ping within {self._options.health_timeout:g} s")
        except Exception as error:
            if _no_way(error):
                server.keeps_silent()
            server.lose(f"it cannot be reached ({type(error).__name__})")
        else:
            server.lives()
            if why:
                server.lose(why)
            else:
                server.find()

    async def _why_not(self, server: Server) -> str:
        """Why it can take no requests, or ""."""
        response = await self._client.get(f"{server.url}/ping")
        if response.status_code != 200:
            return f"GET /ping answers {response.status_code}"
        server.ranks, server.ranks_out = ranks_out(response.headers)
        return "" if server.asked else await self._ask(server)

    async def _ask(self, server: Server) -> str:
        """Ask a server what it is; why it cannot do, or ""."""
        key = self._options.api_key
        headers = {"authorization": f"Bearer {key}"} if key else {}
        response = await self._client.get(f"{server.url}/server_info", headers=headers)
        if response.status_code in (401, 403):
            server.asked = True  # it is believed to be what it was given as
            return ""
        try:
            info = response.json()
            mode = info["disaggregation_mode"]
        except (ValueError, KeyError, TypeError):
            return f"GET /server_info answers {response.status_code} and no disaggregation_mode"
        if mode != server.side:
            return f"it is no {server.side} server: its disaggregation_mode is {mode}"
        if server.side == "prefill":
            server.bootstrap_port = server.given_port or info.get("disaggregation_bootstrap_port")
            server.bootstrap_host = info.get("disaggregation_bootstrap_host") or server.bootstrap_host
        server.asked = True
        return ""


def _no_way(error: BaseException | None) -> bool:
    """The way is cut. A refusal is an answer: a server that has closed its port may still end its streams."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in NO_WAY:
            return True
        error = error.__cause__ or error.__context__
    return False
