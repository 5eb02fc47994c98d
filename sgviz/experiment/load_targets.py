"""Whom a live load asks: an engine of this process, or a server by its URL.

Mirrors the request functions of SGLang's bench_serving, without their measuring: that is in the events.
Imports: engine, errors, httpx2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import httpx2
import msgspec

from sgviz.engine import Engine
from sgviz.errors import BadRequest, SgvizError, Unavailable, from_status

FACTS_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Facts:
    """The model's name, the number of its token ids, and the longest prompt with its answer."""

    model: str
    vocab_size: int
    context_len: int


class Target(Protocol):
    """Who answers. `ask` raises SgvizError with the reason, and gives up the request when it is cancelled."""

    facts: Facts

    async def ask(self, rid: str, ids: list[int], output_tokens: int) -> int:
        """Number of tokens that came back: greedy, exactly as many as asked for."""
        ...

    async def close(self) -> None: ...


def target_of(engine: Engine | str, api_key: str | None = None) -> Target:
    """The engine itself, or the server at that URL.

    Raises:
        BadRequest: that is no URL. Unavailable: nobody answers there. SgvizError: it does not say its vocabulary.
    """
    if isinstance(engine, str):
        return HttpTarget(engine, api_key)
    if not hasattr(engine, "async_generate"):
        raise BadRequest(f"load goes to an engine or to the URL of a server, not to {engine!r}")
    return EngineTarget(engine)


class EngineTarget:
    """An engine; may be asked from any loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        info = engine.pipeline.scheduler_info
        self.facts = Facts(info.model, info.vocab_size, info.context_len)

    async def ask(self, rid: str, ids: list[int], output_tokens: int) -> int:
        params = {"temperature": 0, "max_new_tokens": output_tokens, "ignore_eos": True}
        output = await self._engine.async_generate(None, params, input_ids=ids, rid=rid)
        return len(output["output_ids"])

    async def close(self) -> None:
        """The engine is its owner's."""


class HttpTarget:
    """A server that has SGLang's `/generate` and says its vocabulary in `/model_info`, as `sgviz serve` does."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._client: httpx2.AsyncClient | None = None
        self.facts = self._ask_facts()

    def _ask_facts(self) -> Facts:
        try:
            with httpx2.Client(headers=self._headers, timeout=FACTS_TIMEOUT_S, trust_env=False) as client:
                response = client.get(self.url + "/model_info")
        except (httpx2.InvalidURL, httpx2.UnsupportedProtocol) as error:
            raise BadRequest(
                f"{self.url!r} is no URL of a server, like http://127.0.0.1:30000: {error}"
            ) from error
        except httpx2.HTTPError as error:
            raise Unavailable(f"no server answers at {self.url}: {error}") from error
        if response.status_code != 200:
            raise _refused(response)
        try:
            told = response.json()
            return Facts(str(told["model_path"]), int(told["vocab_size"]), int(told["context_len"]))
        except (ValueError, KeyError, TypeError):
            raise SgvizError(f"{self.url}/model_info does not say vocab_size and context_len") from None

    async def ask(self, rid: str, ids: list[int], output_tokens: int) -> int:
        params = {"temperature": 0, "max_new_tokens": output_tokens, "ignore_eos": True}
        body = {"input_ids": ids, "rid": rid, "sampling_params": params}
        try:
            response = await self._opened().post(self.url + "/generate", json=body)
        except httpx2.HTTPError as error:
            raise Unavailable(f"{self.url} cannot be reached: {error or type(error).__name__}") from error
        if response.status_code != 200:
            raise _refused(response)
        try:
            return len(response.json()["output_ids"])
        except (ValueError, KeyError, TypeError):
            raise SgvizError(f"{self.url}/generate answered without output_ids") from None

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    def _opened(self) -> httpx2.AsyncClient:
        """Made in the loop that uses it. The load bounds what is under way, so the pool need not."""
        if self._client is None:
            limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
            self._client = httpx2.AsyncClient(
                headers=self._headers, timeout=None, limits=limits, trust_env=False
            )
        return self._client


def _refused(response: httpx2.Response) -> SgvizError:
    try:
        message = msgspec.json.decode(response.content)["error"]["message"]
    except (msgspec.DecodeError, KeyError, TypeError):
        message = f"the server answered {response.status_code}"
    return from_status(response.status_code, message)
