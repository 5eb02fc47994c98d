"""A served engine whose model insists on a given text: small models cannot be relied on to call functions.

The mock device plays the ids of the text, and where a grammar does not let one come another that it does; everything
else, from the template to the socket, is what a user has.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from pitfall_tools import MODEL, Served, serving

from sgviz.config import Settings
from sgviz.worker import factory
from sgviz.worker.factory import mock_info_of
from sgviz.worker.mock_worker import MockWorker
from sgviz.worker.protocol import Worker

CHAT = "/v1/chat/completions"
ASK: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Weather in Paris?"}]}


class Forced:
    """A served engine whose model writes `text`, whatever it is asked."""

    def __init__(self, served: Served, script: list[int]) -> None:
        self.served, self._script = served, script

    def says(self, text: str) -> None:
        self._script[:] = self.served.engine.pipeline.tokenizer.encode(text, add_special_tokens=False)

    def post(self, **fields: Any) -> Any:
        answer = self.served.post(CHAT, {**ASK, **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()

    @property
    def create(self) -> Any:
        return self.served.client.chat.completions.create


@contextmanager
def forced_model(**settings: Any) -> Iterator[Forced]:
    """One with these settings; the model ends where its text does."""
    script: list[int] = []

    def make_worker(settings: Settings, rank: int = 0) -> Worker:
        info = mock_info_of(settings)
        return MockWorker(
            info, rule=lambda rid, index, _: script[index] if index < len(script) else info.eos_token_ids[0]
        )

    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:  # no longer than this engine is made
            patch.setattr(factory, "make_worker", make_worker)
            served = stack.enter_context(serving(device="mock", max_total_tokens=8192, **settings))
        yield Forced(served, script)
