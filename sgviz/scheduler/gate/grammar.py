"""The small language of breakpoints: text to a tree, with errors that point at the column. Nothing is ever executed.

    refused and reason == "kv"            retracted            batch.size > 8
    batch.planned and mode == "extend"    need > have
    not (tree.tokens < 100) or "r1" in rids

    expression := conjunction ("or" conjunction)*
    conjunction := negation ("and" negation)*
    negation := "not" negation | comparison
    comparison := operand (("==" | "!=" | "<" | "<=" | ">" | ">=" | "in") operand)?
    operand := "(" expression ")" | text | number | "true" | "false" | name ("." name)*

What names mean is settled in `vocabulary`. SGLang has no counterpart. Imports: errors, messages.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from sgviz.errors import BadRequest
from sgviz.messages.debug import MAX_TEXT

MAX_DEPTH = 40
COMPARISONS = ("==", "!=", "<=", ">=", "<", ">")
KEYWORDS = ("and", "or", "not", "in", "true", "false")
_ESCAPES = {"n": "\n", "t": "\t", "\\": "\\", '"': '"', "'": "'"}
_TOKEN = re.compile(
    r"""(?P<space>\s+)
    | (?P<text>"(?:[^"\\]|\\.)*" | '(?:[^'\\]|\\.)*')
    | (?P<number>-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)
    | (?P<name>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)
    | (?P<mark>==|!=|<=|>=|<|>|\(|\))""",
    re.VERBOSE | re.DOTALL | re.ASCII,
)

Value = str | int | float | bool


class Token(NamedTuple):
    """`kind`: text, number, name, word (a keyword), mark or end. `column` counts from 1."""

    kind: str
    text: str
    column: int


@dataclass(frozen=True, slots=True)
class Literal:
    value: Value
    column: int

    def __str__(self) -> str:
        if isinstance(self.value, bool):
            return "true" if self.value else "false"
        return quoted(self.value) if isinstance(self.value, str) else repr(self.value)


@dataclass(frozen=True, slots=True)
class Name:
    """A kind of event or a field; `vocabulary` knows which."""

    text: str
    column: int

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Compare:
    op: str
    left: Node
    right: Node
    column: int

    def __str__(self) -> str:
        return f"{_inner(self.left, Compare, Not, And, Or)} {self.op} {_inner(self.right, Compare, Not, And, Or)}"


@dataclass(frozen=True, slots=True)
class Not:
    item: Node

    def __str__(self) -> str:
        return f"not {_inner(self.item, And, Or)}"


@dataclass(frozen=True, slots=True)
class And:
    items: tuple[Node, ...]

    def __str__(self) -> str:
        return " and ".join(_inner(item, And, Or) for item in self.items)


@dataclass(frozen=True, slots=True)
class Or:
    items: tuple[Node, ...]

    def __str__(self) -> str:
        return " or ".join(_inner(item, Or) for item in self.items)


Node = Literal | Name | Compare | Not | And | Or


def _inner(node: Node, *bracketed: type) -> str:
    return f"({node})" if isinstance(node, bracketed) else str(node)


def quoted(text: str) -> str:
    """`text` as the language writes it."""
    for plain, escaped in (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"), ("\t", "\\t")):
        text = text.replace(plain, escaped)
    return f'"{text}"'


def fail(source: str, column: int, what: str) -> NoReturn:
    """Raise BadRequest that shows `source` with a mark under `column`."""
    line = re.sub(r"\s", " ", source)
    raise BadRequest(f"breakpoint, column {column}: {what}\n  {line}\n  {' ' * (column - 1)}^", param="text")


def parse(source: str) -> Node:
    """The tree of `source`.

    Raises:
        BadRequest: it is empty, too long, nested too deeply or not of the language; with the column.
    """
    if len(source) > MAX_TEXT:
        raise BadRequest(f"a breakpoint has at most {MAX_TEXT} characters, not {len(source)}", param="text")
    if not source.strip():
        raise BadRequest(
            'a breakpoint must not be empty; for example: refused and reason == "kv"', param="text"
        )
    return _Parser(source).whole()


def tokens(source: str) -> list[Token]:
    """`source` cut into tokens, an end token last."""
    found: list[Token] = []
    at = 0
    while at < len(source):
        match = _TOKEN.match(source, at)
        if match is None:
            fail(source, at + 1, _unknown_character(source[at]))
        kind, text = str(match.lastgroup), match.group()
        if kind == "name" and text in KEYWORDS:
            kind = "word"
        if kind != "space":
            found.append(Token(kind, text, at + 1))
        at = match.end()
    found.append(Token("end", "", len(source) + 1))
    return found


def _unknown_character(char: str) -> str:
    if char in "\"'":
        return "this text has no closing quote"
    if char == "=":
        return "to compare write =="
    return f"{char!r} is not of the language"


class _Parser:
    """Recursive descent over the tokens."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._tokens = tokens(source)
        self._at = 0
        self._depth = 0

    def whole(self) -> Node:
        node = self._expression()
        if self._now.kind != "end":
            self._fail(f"{self._now.text!r} is not expected here; use and, or, or a comparison")
        return node

    @property
    def _now(self) -> Token:
        return self._tokens[self._at]

    def _fail(self, what: str) -> NoReturn:
        fail(self._source, self._now.column, what)

    def _take(self, *texts: str) -> Token | None:
        """The next token if it is one of these keywords or marks."""
        now = self._now
        if now.kind not in ("word", "mark") or now.text not in texts:
            return None
        self._at += 1
        return now

    def _expression(self) -> Node:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self._fail(f"more than {MAX_DEPTH} brackets inside each other")
        items = self._list("or", lambda: _one(And, self._list("and", self._negation)))
        self._depth -= 1
        return _one(Or, items)

    def _list(self, word: str, item: Callable[[], Node]) -> list[Node]:
        items = [item()]
        while self._take(word):
            items.append(item())
        return items

    def _negation(self) -> Node:
        if not self._take("not"):
            return self._comparison()
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self._fail(f"more than {MAX_DEPTH} times not")
        node = Not(self._negation())
        self._depth -= 1
        return node

    def _comparison(self) -> Node:
        left = self._operand()
        op = self._take(*COMPARISONS, "in")
        if op is None:
            return left
        return Compare(op.text, left, self._operand(), op.column)

    def _operand(self) -> Node:
        if self._take("("):
            return self._bracket()
        token = self._now
        if token.kind == "end":
            self._fail("something is missing here")
        if token.kind not in ("name", "text", "number") and token.text not in ("true", "false"):
            self._fail(f"a name, a text, a number or a bracket is expected, not {token.text!r}")
        self._at += 1
        if token.kind == "name":
            return Name(token.text, token.column)
        return Literal(self._value(token), token.column)

    def _value(self, token: Token) -> Value:
        if token.kind == "text":
            return self._unescaped(token)
        return self._number(token) if token.kind == "number" else token.text == "true"

    def _bracket(self) -> Node:
        node = self._expression()
        if not self._take(")"):
            self._fail("a closing bracket is missing here")
        return node

    def _unescaped(self, token: Token) -> str:
        def one(match: re.Match[str]) -> str:
            char = match.group(1)
            if char not in _ESCAPES:
                fail(self._source, token.column + 1 + match.start(), f"unknown escape \\{char}")
            return _ESCAPES[char]

        return re.sub(r"\\(.)", one, token.text[1:-1], flags=re.DOTALL)

    def _number(self, token: Token) -> int | float:
        if re.fullmatch(r"-?\d{1,300}", token.text):
            return int(token.text)
        value = float(token.text)
        if math.isinf(value):
            fail(self._source, token.column, "this number is too large")
        return value


def _one(kind: type[And] | type[Or], items: list[Node]) -> Node:
    return items[0] if len(items) == 1 else kind(tuple(items))
