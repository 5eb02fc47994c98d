"""A breakpoint's text made into a test of events: `parse` it, settle what its names mean, check its comparisons.

The test is put together from closures over the tree; the text is never executed. Everything that can be wrong is
found before the first event, so a test never raises. SGLang has no counterpart. Imports: errors, events.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from sgviz.errors import suggest
from sgviz.events import Event, Reason
from sgviz.events.schema import KIND_OF
from sgviz.scheduler.gate import vocabulary
from sgviz.scheduler.gate.grammar import And, Compare, Literal, Name, Node, Not, Or, fail, parse
from sgviz.scheduler.gate.vocabulary import FieldMeaning, KindMeaning, Sort

Predicate = Callable[[Event], bool]
Read = Callable[[Event], Any]  # a value of the event, None where it has none

_OPS: Mapping[str, Callable[[Any, Any], bool]] = MappingProxyType(
    {
        "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt,
        ">=": operator.ge,
    }
)  # fmt: skip
_LENGTHS = frozenset((Sort.NUMBER, Sort.TEXTS, Sort.LIST, Sort.IDS))
_ID_BYTES = 4


def compiled(text: str) -> Predicate:
    """The test that `text` describes.

    Raises:
        BadRequest: not of the language, an unknown name (the nearest is told), values that cannot be compared.
    """
    return _Compiler(text).test(parse(text))


class _Compiler:
    def __init__(self, source: str) -> None:
        self._source = source

    def test(self, node: Node) -> Predicate:
        match node:
            case And():
                return _all([self.test(item) for item in node.items])
            case Or():
                return _any([self.test(item) for item in node.items])
            case Not():
                return _not(self.test(node.item))
            case Compare():
                return self._comparison(node)
            case Name():
                return self._bare(node)
            case Literal():
                if not isinstance(node.value, bool):
                    fail(
                        self._source,
                        node.column,
                        f"{node} alone is neither true nor false; compare it with a field",
                    )
                return _constant(node.value)

    def _bare(self, node: Name) -> Predicate:
        found = self._meaning(node)
        if isinstance(found, KindMeaning):
            return _is_kind(found)
        return _truth(_reader(found))

    def _meaning(self, node: Name) -> vocabulary.Meaning:
        found = vocabulary.meaning(node.text)
        if isinstance(found, str):
            fail(self._source, node.column, found)
        return found

    # ------------------------------------------------------------ comparisons

    def _comparison(self, node: Compare) -> Predicate:
        left, left_sorts = self._operand(node.left, node)
        right, right_sorts = self._operand(node.right, node)
        if node.op == "in":
            self._check_in(node, left_sorts, right_sorts)
            return _contains(left, right)
        self._check_comparison(node, left_sorts, right_sorts)
        op = _OPS[node.op]
        return lambda event: _holds(op, left(event), right(event))

    def _operand(self, node: Node, comparison: Compare) -> tuple[Read, frozenset[Sort]]:
        if isinstance(node, Literal):
            return _value(node.value), frozenset((_sort_of(node.value),))
        if not isinstance(node, Name):
            fail(
                self._source,
                comparison.column,
                f"{comparison.op} compares names, texts and numbers, no brackets",
            )
        found = self._meaning(node)
        if isinstance(found, KindMeaning):
            what = f"{node.text} is a kind of event and has no value; write: {node.text} and ..."
            fail(self._source, node.column, what)
        return _reader(found), found.sorts

    def _check_comparison(self, node: Compare, left: frozenset[Sort], right: frozenset[Sort]) -> None:
        if left & _LENGTHS and right & _LENGTHS:
            return
        same = _plain(left) & _plain(right)
        if not same:
            hint = '; write "..." in the list' if Sort.TEXTS in left | right else ""
            fail(self._source, node.column, f"{_names(left)} cannot be compared with {_names(right)}{hint}")
        if node.op not in ("==", "!="):
            fail(self._source, node.column, f"{_names(left)} can be compared by == and != only")
        if Sort.REASON in left | right:
            self._check_reason(node)

    def _check_reason(self, node: Compare) -> None:
        allowed = [reason.value for reason in Reason]
        for side in (node.left, node.right):
            if isinstance(side, Literal) and side.value not in allowed:
                near = suggest(str(side.value), allowed)
                what = f"{side} is no reason{near}; reasons are {', '.join(allowed)}"
                fail(self._source, side.column, what)

    def _check_in(self, node: Compare, left: frozenset[Sort], right: frozenset[Sort]) -> None:
        if Sort.TEXT not in _plain(left) and not left & {Sort.NUMBER}:
            fail(self._source, node.column, f"in looks for a text or a number, not for {_names(left)}")
        if not right & {Sort.TEXTS, Sort.LIST, Sort.TEXT, Sort.REASON}:
            fail(self._source, node.column, f"in looks into a list or a text, not into {_names(right)}")


def _plain(sorts: frozenset[Sort]) -> frozenset[Sort]:
    """A reason compares as a text."""
    return frozenset(Sort.TEXT if sort is Sort.REASON else sort for sort in sorts)


def _sort_of(value: object) -> Sort:
    if isinstance(value, bool):
        return Sort.FLAG
    return Sort.TEXT if isinstance(value, str) else Sort.NUMBER


def _names(sorts: frozenset[Sort]) -> str:
    return " or ".join(sorted(sorts))


# ---------------------------------------------------------------- closures


def _constant(value: bool) -> Predicate:
    return lambda event: value


def _value(value: object) -> Read:
    return lambda event: value


def _all(tests: list[Predicate]) -> Predicate:
    return lambda event: all(test(event) for test in tests)


def _any(tests: list[Predicate]) -> Predicate:
    return lambda event: any(test(event) for test in tests)


def _not(test: Predicate) -> Predicate:
    return lambda event: not test(event)


def _is_kind(found: KindMeaning) -> Predicate:
    kinds = found.kinds
    return lambda event: KIND_OF[type(event.body)] in kinds


def _reader(found: FieldMeaning) -> Read:
    field, kinds = found.field, found.kinds
    if found.stamp:
        return lambda event: getattr(event, field)

    def read(event: Event) -> Any:
        body = event.body
        if KIND_OF[type(body)] not in kinds:
            return None
        return len(getattr(body, "rids")) if field == "size" else getattr(body, field)  # noqa: B009

    return read


def _truth(read: Read) -> Predicate:
    """A field alone: a list of flags counts when one of them is set, anything else when it is not empty or 0."""

    def test(event: Event) -> bool:
        value = read(event)
        return any(value) if isinstance(value, tuple) else bool(value)

    return test


def _holds(op: Callable[[Any, Any], bool], left: Any, right: Any) -> bool:
    """Values of one sort are compared; a list or ids stand for their number beside a number."""
    if left is None or right is None:
        return False
    left, right = _countable(left), _countable(right)
    if isinstance(left, str) is not isinstance(right, str) or isinstance(left, bool) is not isinstance(
        right, bool
    ):
        return False
    return bool(op(left, right))


def _countable(value: Any) -> Any:
    if isinstance(value, bytes):
        return len(value) // _ID_BYTES
    return len(value) if isinstance(value, tuple) else value


def _contains(left: Read, right: Read) -> Predicate:
    def test(event: Event) -> bool:
        item, box = left(event), right(event)
        if isinstance(box, str):
            return isinstance(item, str) and item in box
        return isinstance(box, tuple) and item in box

    return test
