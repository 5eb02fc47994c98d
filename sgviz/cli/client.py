"""A small HTTP client for the OpenAI endpoint: what `demo` and `chat` talk through. Imports: errors, httpx2."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator
from typing import Any

import httpx2

from sgviz.errors import SgvizError, Unavailable, from_status

DATA = "data: "
DONE = "[DONE]"


def trusted() -> ssl.SSLContext:
    """What this system trusts; `SSL_CERT_FILE` names others, as for curl: that of a server of one's own."""
    return ssl.create_default_context()


class ChatClient:
    """Streams chat completions from a server at `url` (without /v1)."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx2.Client(
            base_url=url, headers=headers, timeout=None, trust_env=False, verify=trusted()
        )
        self.url = url

    def first_model(self) -> str:
        """The model the server serves. Unavailable if nobody answers."""
        try:
            response = self._client.get("/v1/models", timeout=10.0)
        except httpx2.TransportError as error:
            raise Unavailable(f"no server answers at {self.url}: {error}") from error
        _check(response.status_code, response.text)
        try:
            name: str = response.json()["data"][0]["id"]
        except (ValueError, KeyError, IndexError, TypeError):
            raise SgvizError(
                f"{self.url}/v1/models gave no list of models; is that an OpenAI server?"
            ) from None
        return name

    def stream(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The chunks of a streamed chat completion; raises what the server reports, Unavailable if it goes away."""
        try:
            yield from self._chunks(body)
        except httpx2.TransportError as error:
            raise Unavailable(f"the connection to {self.url} broke: {error}") from error

    def _chunks(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        with self._client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
            if response.status_code != 200:
                response.read()
                _check(response.status_code, response.text)
            for line in response.iter_lines():
                if not line.startswith(DATA) or line == DATA + DONE:
                    continue
                chunk: dict[str, Any] = json.loads(line[len(DATA) :])
                if "error" in chunk:
                    error = chunk["error"]
                    raise from_status(int(error.get("code") or 500), error["message"])
                yield chunk

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> ChatClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def text_of(chunk: dict[str, Any]) -> str:
    """The new text in a chunk; empty for role, finish and usage chunks."""
    choices = chunk["choices"]
    return (choices[0]["delta"].get("content") or "") if choices else ""


def shown(text: str) -> str:
    """Text for a terminal: a model may say control characters, and a terminal would obey them."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in text)


def _check(status: int, body: str) -> None:
    if status == 200:
        return
    try:
        error = json.loads(body)["error"]
        message, param = error["message"], error.get("param")
    except (ValueError, KeyError, TypeError):
        raise SgvizError(f"the server answered {status}: {body[:200]}") from None
    raise from_status(status, message, param=param)
