"""Logit processors: code of the server's owner that edits the logits of the requests that name it.

Mirrors SGLang's CustomLogitProcessor; different from it: the class is named in the server's settings and loaded at
start, so no request brings code, and one that raises ends its own requests and nobody else's.
Imports: config, errors, worker.protocol, torch (for what a processor is given).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from sgviz.config.named_processors import named_processors
from sgviz.worker.protocol import ProcessorFailure

if TYPE_CHECKING:  # whoever only loads processors needs no torch
    from torch import Tensor

    from sgviz.worker.sampling_batch import Processed

log = logging.getLogger(__name__)


class LogitProcessor(Protocol):
    """Called in the worker at every step of the requests that name it, before their tokens are chosen.

    It must look at nothing but its arguments: the requests of a batch change from step to step, and a request that was
    retracted is computed again, as are all rows, one by one, where one of them made it raise. On a GPU an index that
    is out of range breaks the device for everybody, so it must check what it takes from `params`.
    """

    def __call__(self, logits: Tensor, params: list[dict[str, Any]]) -> Tensor | None:
        """Edit the logits of some requests.

        Args:
            logits: [rows, vocab] float32, a row a request, behind penalties, grammar and logit_bias; on the
                worker's device. May be edited in place.
            params: [rows] the requests' custom_params, {} where none were given.

        Returns:
            The new logits, of the same shape and dtype, without a NaN and with an id left that is not barred (by minus
            infinity); None: those given, edited in place.

        Raises:
            ValueError: `params` is not what it takes; the request is answered 400 with this text. Whatever else it
                raises counts as its own fault: 500.
        """
        ...


class LogitProcessors:
    """Those of one server, by name."""

    def __init__(self, by_name: Mapping[str, LogitProcessor]) -> None:
        self._by_name = dict(by_name)

    def apply(self, logits: Tensor, processed: Sequence[Processed]) -> dict[int, ProcessorFailure]:
        """Let each edit the rows of its members in `logits` [B, vocab].

        Returns:
            By member why its processor failed; the logits of such a member stay as they were.
        """
        failures: dict[int, ProcessorFailure] = {}
        for one in processed:
            self._apply_one(logits, one.name, one.members, one.params, failures)
        return failures

    def _apply_one(
        self,
        logits: Tensor,
        name: str,
        members: list[int],
        params: list[dict[str, Any]],
        failures: dict[int, ProcessorFailure],
    ) -> None:
        try:
            before = logits[members]
            after = self._edited(name, before.clone(), params)
            self._check(before, after)
            logits[members] = after
        except (Exception, SystemExit) as error:
            if len(members) > 1:  # find out whose it is: the others may go on
                for member, param in zip(members, params, strict=True):
                    self._apply_one(logits, name, [member], [param], failures)
                return
            if isinstance(error, ValueError):
                failures[members[0]] = ProcessorFailure(str(error), is_refusal=True)
                return
            failures[members[0]] = ProcessorFailure(f"{type(error).__name__}: {error}")
            log.warning("the logit processor %r failed", name, exc_info=error)

    def _edited(self, name: str, rows: Tensor, params: list[dict[str, Any]]) -> Tensor:
        """`rows` is a copy of the processor's own."""
        processor = self._by_name.get(name)
        if processor is None:
            raise LookupError(f"there is no logit processor {name!r}; there are {', '.join(self._by_name)}")
        out = processor(rows, params)
        if out is None:
            return rows
        if out.shape != rows.shape:
            raise TypeError(f"it returned logits of shape {list(out.shape)} for {list(rows.shape)}")
        if out.dtype != rows.dtype:
            raise TypeError(f"it returned logits of dtype {_name(out.dtype)} for {_name(rows.dtype)}")
        return out.to(rows.device)

    @staticmethod
    def _check(before: Tensor, after: Tensor) -> None:
        """Raise ArithmeticError for a NaN that the processor brought in; one of the model's is the model's fault."""
        if bool((after.isnan().any(-1) & ~before.isnan().any(-1)).any()):
            raise ArithmeticError("the logits that it gave hold a NaN")


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def load_logit_processors(setting: str | None) -> LogitProcessors:
    """Load and make what the setting custom_logit_processors names.

    Raises:
        ConfigError: an entry is no class, or what it makes cannot be called.
    """
    made: dict[str, LogitProcessor] = {}
    for name, user in named_processors(setting).items():
        one = user.make()
        if not callable(one):
            raise user.fault("has no method __call__(logits, params)")
        made[name] = one
    return LogitProcessors(made)
