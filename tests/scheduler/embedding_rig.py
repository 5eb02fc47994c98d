"""A Rig that takes requests for vectors too."""

from __future__ import annotations

from collections.abc import Iterable

from rig import Answer, Rig

from sgviz.events import TimeStats
from sgviz.messages import BatchEmbeddingOutput, SamplingParams, TokenizedEmbeddingReqInput


class EmbeddingRig(Rig):
    """`embed` beside `submit`; the vectors by rid, and how many of the answers had to be all of a message."""

    def __init__(self, **options: object) -> None:
        self.vectors: dict[str, bytes] = {}
        super().__init__(**options)  # type: ignore[arg-type]

    def embed(
        self,
        ids: Iterable[int],
        *,
        rid: str | None = None,
        dimensions: int | None = None,
        extra_key: str | None = None,
    ) -> str:
        """Put a request for a vector into the inbox."""
        rid = rid or f"v{next(self._numbers)}"
        self.answers.setdefault(rid, Answer())
        self.inbox.send(
            TokenizedEmbeddingReqInput(
                rid=rid,
                input_ids=list(ids),
                sampling_params=SamplingParams(max_new_tokens=0).normalize(),
                stream=False,
                time_stats=TimeStats(created=1),
                dimensions=dimensions,
                extra_key=extra_key,
            )
        )
        return rid

    def _collect(self) -> None:
        waiting = self.to_detokenizer.messages
        self.to_detokenizer.messages = [
            each for each in waiting if not isinstance(each, BatchEmbeddingOutput)
        ]
        for message in waiting:
            if isinstance(message, BatchEmbeddingOutput):
                self._take_vectors(message)
        super()._collect()

    def _take_vectors(self, out: BatchEmbeddingOutput) -> None:
        for i, rid in enumerate(out.rids):
            answer = self.answers[rid]
            assert not answer.finals and out.finished_reasons[i] is not None and not out.output_ids[i]
            answer.finals += 1
            answer.finish, answer.cached_tokens = out.finished_reasons[i], out.cached_tokens[i]
            if out.embeddings[i]:
                self.vectors[rid] = out.embeddings[i]
