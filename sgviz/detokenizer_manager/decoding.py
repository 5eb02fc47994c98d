"""Decoding many windows with few calls: grouped by flags, and one by one where a group fails.

Imports: standard library only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class TextDecoder(Protocol):
    """The part of a tokenizer that the detokenizer needs."""

    @property
    def vocab_size(self) -> int: ...

    def decode_batch(
        self,
        list_of_ids: list[list[int]],
        /,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> list[str]:
        """One text by list of ids."""
        ...


@dataclass(frozen=True, slots=True)
class Window:
    """The two id lists of a request, decoded under its `flags` (skip special tokens, spaces between them)."""

    surr: list[int]
    read: list[int]
    flags: tuple[bool, bool]


Decoded = tuple[str, str] | Exception


def decode_windows(codec: TextDecoder, windows: Sequence[Window]) -> list[Decoded]:
    """The texts of `surr` and `read` by window, or what the codec raised for that window alone."""
    groups: defaultdict[tuple[bool, bool], list[int]] = defaultdict(list)
    for i, window in enumerate(windows):
        groups[window.flags].append(i)
    out: dict[int, Decoded] = {}
    for members in groups.values():
        out.update(zip(members, _decode_group(codec, [windows[i] for i in members])))
    return [out[i] for i in range(len(windows))]


def _decode_group(codec: TextDecoder, group: list[Window]) -> list[Decoded]:
    try:
        return _decode_together(codec, group)
    except Exception as error:
        if len(group) == 1:
            return [error]
        return [_decode_group(codec, [window])[0] for window in group]


def _decode_together(codec: TextDecoder, group: list[Window]) -> list[Decoded]:
    ids = [window.surr for window in group] + [window.read for window in group]
    texts = codec.decode_batch(ids, *group[0].flags)
    return list(zip(texts[: len(group)], texts[len(group) :], strict=True))
