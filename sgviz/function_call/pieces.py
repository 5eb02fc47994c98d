"""What a model's text is taken apart into: content, and calls that begin and then get their arguments.

Mirrors SGLang's StreamingParseResult and ToolCallItem; here the pieces keep their order.
Imports: nothing of sgviz.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class Content(msgspec.Struct, frozen=True):
    """Text for the reader."""

    text: str


class CallStart(msgspec.Struct, frozen=True):
    """The `index`-th call of an answer begins; its function is known."""

    index: int
    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """More of the arguments of the call that began last: JSON as the model wrote it."""

    index: int
    text: str


Piece = Content | CallStart | CallArguments


class Call(msgspec.Struct, frozen=True):
    """One whole call; `parameters` is a JSON text. The fields are those of SGLang's ToolCallItem."""

    tool_index: int
    name: str
    parameters: str


def gather(pieces: Iterable[Piece]) -> tuple[str, list[Call]]:
    """Content and calls of a whole answer."""
    texts: list[str] = []
    names: list[str] = []
    arguments: list[list[str]] = []
    for piece in pieces:
        match piece:
            case Content(text):
                texts.append(text)
            case CallStart(_, name):
                names.append(name)
                arguments.append([])
            case CallArguments(_, text):
                arguments[-1].append(text)
    calls = [Call(i, name, "".join(parts)) for i, (name, parts) in enumerate(zip(names, arguments))]
    return "".join(texts), calls


def merged(pieces: Iterable[Piece]) -> list[Piece]:
    """The same with neighbours of one kind put together."""
    out: list[Piece] = []
    parts: list[str] = []

    def close() -> None:
        if len(parts) > 1:
            out[-1] = msgspec.structs.replace(out[-1], text="".join(parts))

    for piece in pieces:
        if out and isinstance(piece, Content | CallArguments) and type(out[-1]) is type(piece):
            parts.append(piece.text)
            continue
        close()
        out.append(piece)
        parts = [] if isinstance(piece, CallStart) else [piece.text]
    close()
    return out
