"""A workload without an end, drawn one request at a time, whose shape may change between two of them.

For loads that a person steers while they run. What is drawn depends on the seed and the shapes alone, never on
the time. SGLang has no counterpart. Imports: errors, msgspec.
"""

from __future__ import annotations

import random
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from sgviz.errors import BadRequest, suggest
from sgviz.workload.value import Request, Segment, Workload

SHARED = "shared"


class LoadShape(msgspec.Struct, frozen=True, kw_only=True):
    """What the next request looks like, and when it comes.

    Attributes:
        rate: arrivals a second, independent of each other (Poisson); None: `concurrency` requests at a time, the next
            as soon as one ends. concurrency: only used then.
        prompt_tokens, output_tokens: exactly so many a request. shared_share: part of each prompt (0 to 1), from its
            beginning on, that all requests have in common. seed: of arrivals and prompts.
    """

    rate: Annotated[float, Meta(gt=0.0, le=1000.0)] | None = 4.0
    concurrency: Annotated[int, Meta(ge=1, le=1024)] = 8
    prompt_tokens: Annotated[int, Meta(ge=1)] = 64
    output_tokens: Annotated[int, Meta(ge=1)] = 32
    shared_share: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.5
    seed: int = 0

    def changed(self, **changes: object) -> LoadShape:
        """The same with changes.

        Raises:
            BadRequest: a name is none of the attributes, or a value is not allowed.
        """
        for name in changes:
            if name not in self.__struct_fields__:
                raise BadRequest(
                    f"a load has no {name!r}{suggest(name, self.__struct_fields__)}; "
                    f"it has {', '.join(self.__struct_fields__)}",
                    param=name,
                )
        values: dict[str, Any] = {**msgspec.structs.asdict(self), **changes}
        try:
            return msgspec.convert(values, LoadShape)
        except msgspec.ValidationError as error:
            raise BadRequest(f"a load cannot have {changes}: {error}") from None


class Endless:
    """Draws requests and the gaps between them."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._gaps = random.Random(f"{seed}/arrivals")
        self._ids = Workload(name="endless", seed=seed, requests=())
        self._number = 0

    def gap(self) -> float:
        """Time to the next arrival as a multiple of the mean: seconds are this over the rate, whatever it becomes."""
        return self._gaps.expovariate(1.0)

    def next(self, shape: LoadShape) -> Request:
        """The next request; `at_s` is 0, it is due when it is drawn."""
        number, self._number = self._number, self._number + 1
        common = round(shape.prompt_tokens * shape.shared_share)
        parts = (Segment(SHARED, common), Segment(f"prompt{number}", shape.prompt_tokens - common))
        return Request(
            rid=str(number),
            at_s=0.0,
            prompt=tuple(part for part in parts if part.tokens),
            output_tokens=shape.output_tokens,
        )

    def ids_of(self, request: Request, vocab_size: int) -> list[int]:
        """The prompt as ids below `vocab_size`, see `Workload.ids_of`."""
        return self._ids.ids_of(request, vocab_size)
