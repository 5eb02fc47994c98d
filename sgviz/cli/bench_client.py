"""The clients of `sgviz bench`: requests over HTTP when they are due, each measured as a client feels it.

The clock of a request starts when it is sent; TTFT is the first chunk with text; the gap before a chunk is shared
by its tokens; counts come from the server's usage. Mirrors the request functions of SGLang's bench_serving.
Imports: workload, errors, httpx2, msgspec.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any

import httpx2
import msgspec

from sgviz.cli.bench_answers import Measured, Tokens
from sgviz.cli.bench_backends import Backend, Options, Prompt
from sgviz.cli.client import trusted
from sgviz.errors import SgvizError, Unavailable
from sgviz.workload import Request, Workload

DATA, DONE = b"data:", b"[DONE]"
ERROR_CHARS = 300


class Client:
    """Sends the requests of a workload to one server.

    Args:
        base_url: of the server, without /v1. options: how to ask. api_key: for its Authorization header.
    """

    def __init__(self, base_url: str, backend: Backend, options: Options, api_key: str | None = None) -> None:
        self._backend, self._options = backend, options
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        self.http = httpx2.AsyncClient(
            base_url=base_url, headers=headers, timeout=None, limits=limits, trust_env=False, verify=trusted()
        )

    def ask_with(self, options: Options) -> None:
        """From now on ask like this: the model's name is known only once the server has been asked."""
        self._options = options

    async def close(self) -> None:
        await self.http.aclose()

    async def get(self, path: str) -> dict[str, Any] | None:
        """The server's JSON, or None if it has no such page. Unavailable if nobody answers."""
        try:
            response = await self.http.get(path, timeout=30.0)
        except httpx2.TransportError as error:
            raise Unavailable(f"no server answers at {self.http.base_url}: {error}") from error
        try:
            found = response.json() if response.status_code == 200 else None
        except ValueError:
            found = None
        return found if isinstance(found, dict) else None

    async def run(
        self,
        workload: Workload,
        prompts: Mapping[str, Prompt],
        on_done: Callable[[], None] = lambda: None,
        prefix: str = "",
    ) -> list[Measured]:
        """All requests, when they are due and as many at a time as the workload allows; in its order."""
        gate = asyncio.Semaphore(workload.concurrency) if workload.concurrency else None
        begun = time.perf_counter()
        tasks = [
            asyncio.create_task(self._when_due(each, prompts[each.rid], begun, gate, on_done, prefix))
            for each in workload.requests
        ]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _when_due(
        self,
        request: Request,
        prompt: Prompt,
        begun: float,
        gate: asyncio.Semaphore | None,
        on_done: Callable[[], None],
        prefix: str,
    ) -> Measured:
        await asyncio.sleep(max(0.0, begun + request.at_s - time.perf_counter()))
        async with AsyncExitStack() as stack:
            if gate is not None:
                await stack.enter_async_context(gate)
            measured = await self.ask(
                prefix + request.rid, prompt, request.prompt_tokens, request.output_tokens
            )
        on_done()
        return measured

    async def ask(self, rid: str, prompt: Prompt, prompt_tokens: int, output_tokens: int) -> Measured:
        """One request; a failure is in its `error`, never raised."""
        out, tokens = Measured(rid, prompt_tokens, streamed=self._options.stream), Tokens()
        body = msgspec.json.encode(self._backend.body(rid, prompt, output_tokens, self._options))
        out.start = time.perf_counter()
        try:
            async with self.http.stream(
                "POST", self._backend.path, content=body, headers={"content-type": "application/json"}
            ) as response:
                if response.status_code != 200:
                    text = (await response.aread())[:ERROR_CHARS].decode("utf-8", errors="replace")
                    raise SgvizError(f"status {response.status_code}: {text}")
                await self._read(response, out, tokens)
        except (SgvizError, msgspec.DecodeError, httpx2.TransportError) as error:
            out.error = str(error) or type(error).__name__
        tokens.into(out)
        return out

    async def _read(self, response: httpx2.Response, out: Measured, tokens: Tokens) -> None:
        if not self._options.stream:
            data = await response.aread()
            out.latency = time.perf_counter() - out.start
            self._backend.take(data, out.latency, tokens)
            return
        ended = False
        async for event in _events(response.aiter_raw()):
            if event == DONE:
                ended = True
                continue
            now = time.perf_counter() - out.start
            before = len(tokens.text)
            self._backend.take(event, now, tokens)
            out.latency = now if len(tokens.text) > before else out.latency
        if not ended:
            raise SgvizError("the stream ended without [DONE]")


async def _events(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of each server-sent event, as soon as it is whole."""
    rest = b""
    async for piece in pieces:
        *whole, rest = (rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in whole:
            for line in event.split(b"\n"):
                if line.startswith(DATA):
                    yield line[len(DATA) :].strip()
