"""The language of breakpoints: what it means, where its errors point, and that it executes nothing."""

from __future__ import annotations

import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgviz.errors import BadRequest
from sgviz.events import Event, Reason, schema
from sgviz.events.schema import BODY_OF
from sgviz.scheduler.gate import compiled
from sgviz.scheduler.gate.grammar import And, Compare, Literal, Name, Node, Not, Or, parse, quoted
from sgviz.scheduler.gate.vocabulary import KINDS, NICKNAMES, NOT_SCHEDULER, fields


def event(body: schema.AnyBody, iteration: int = 7) -> Event:
    return Event(3, 100, "scheduler", iteration, body)


REFUSED = event(schema.AdmitRefused(rid="r1", reason=Reason.KV, need=12, have=8, holders=(("r2", 5),)))
PLANNED = event(
    schema.BatchPlanned(
        bid=4, mode="extend", rids=("a", "b", "c"), extend_lens=(5, 6, 7), prefix_lens=(0, 0, 0), running=2,
        waiting=1, kv_free=50, kv_evictable=0, kv_protected=0, new_token_ratio=0.5,
    )
)  # fmt: skip
EVICTED = event(schema.TreeEvicted(node=9, tokens=16, last_access=2))
RETURNED = event(schema.PoolReturned(rid="r1", slots=bytes(4 * 6), why="retract", free=20))
STREAMED = event(schema.OutputStreamed(rids=("a", "b"), tokens=(1, 2), finished=(False, True)))


@pytest.mark.parametrize(
    ("text", "hits"),
    [
        ('refused and reason == "kv"', [REFUSED]),
        ("refused and reason == 'rows'", []),
        ("admit.refused", [REFUSED]),
        ("refused or evicted", [REFUSED, EVICTED]),
        ("decision", [REFUSED, EVICTED]),
        ("not (refused or evicted or planned)", [RETURNED, STREAMED]),
        ("batch.size > 2", [PLANNED]),
        ("batch.size > 3", []),
        ("size == 2", [STREAMED]),
        ("need > have", [REFUSED]),
        ("need >= 12 and have < 9", [REFUSED]),
        ("tree.tokens == 16", [EVICTED]),
        ("tokens == 2", [STREAMED]),  # a list counts by its length
        ("slots == 6", [RETURNED]),
        ("pool.free <= 20", [RETURNED]),
        ("free <= 20", [RETURNED]),
        ('"b" in rids', [PLANNED, STREAMED]),
        ('planned and "z" in rids', []),
        ('"tract" in why', [RETURNED]),
        ("finished", [STREAMED]),  # one flag of the list is set
        ("new_token_ratio < 0.6", [PLANNED]),
        ("iteration == 7 and kind == 'tree.evicted'", [EVICTED]),
        ('batch.planned.mode == "extend"', [PLANNED]),
        ("6 in extend_lens", [PLANNED]),
        ("true", [REFUSED, PLANNED, EVICTED, RETURNED, STREAMED]),
        ("false", []),
        ('rid == "r1" and not refused', [RETURNED]),
        ("not need > 3", [PLANNED, EVICTED, RETURNED, STREAMED]),  # without the field a comparison is false
    ],
)
def test_a_text_means_what_it_says(text: str, hits: list[Event]) -> None:
    test = compiled(text)
    assert [one for one in (REFUSED, PLANNED, EVICTED, RETURNED, STREAMED) if test(one)] == hits


@pytest.mark.parametrize(
    ("text", "column", "says"),
    [
        ('refused and resaon == "kv"', 13, "did you mean 'reason'"),
        ("refussed", 1, "did you mean 'refused'"),
        ("batch.sise > 8", 1, "did you mean 'size'"),
        ('reason == "runing_slots"', 11, "did you mean 'running_slots'"),
        ("need = 3", 6, "write =="),
        ("need > ", 8, "missing"),
        ("(need > 3", 10, "closing bracket"),
        ('rid == "abc', 8, "closing quote"),
        ("need > 3)", 9, "not expected"),
        ('need > "a"', 6, "cannot be compared"),
        ('rid > "a"', 5, "== and != only"),
        ('rids == "a"', 6, "in the list"),
        ("3 and refused", 1, "neither true nor false"),
        ("refused == 3", 1, "is a kind of event"),
        ("request.finished", 1, "does not happen in the scheduler"),
        ("need in have", 6, "in looks into a list"),
        ("(need > 3) == true", 12, "no brackets"),
        ("need > 3 need", 10, "not expected"),
        ("__import__('os')", 11, "not expected"),
        ("rid.__class__ == 3", 1, "unknown name"),
        ('rid == "a\\q"', 10, "unknown escape"),
        ("need > 1e999", 8, "too large"),
        ("refused; evicted", 8, "not of the language"),
    ],
)  # fmt: skip
def test_an_error_points_at_its_column(text: str, column: int, says: str) -> None:
    with pytest.raises(BadRequest) as failure:
        compiled(text)
    message = failure.value.message
    assert f"column {column}:" in message and says in message
    shown, mark = message.splitlines()[1:3]
    assert shown == "  " + text and mark.index("^") - 2 == column - 1


def test_empty_and_endless_texts_are_refused() -> None:
    for text in (
        "",
        "   ",
        "(" * 100 + "true" + ")" * 100,
        "not " * 100 + "true",
        "true or " * 1000 + "true",
    ):
        with pytest.raises(BadRequest):
            compiled(text)


def test_every_kind_of_event_is_the_scheduler_s_or_known_not_to_be() -> None:
    assert set(KINDS) | NOT_SCHEDULER == set(BODY_OF) and not set(KINDS) & NOT_SCHEDULER
    for names in NICKNAMES.values():
        assert set(names) <= set(KINDS)


def test_no_nickname_hides_a_field() -> None:
    assert not set(NICKNAMES) & {name for kind in KINDS for name in fields(kind)}


def test_every_field_of_every_kind_can_be_named() -> None:
    for kind in KINDS:
        for field in fields(kind):
            compiled(f"{kind} and not {kind}.{field}")


# ---------------------------------------------------------------- properties

NAMES = st.sampled_from(["refused", "batch.planned", "need", "batch.size", "rids", "iteration", "reason"])
VALUES = st.one_of(
    st.text(max_size=12), st.integers(-(10**20), 10**20), st.floats(allow_nan=False, allow_infinity=False),
    st.booleans(),
)  # fmt: skip
OPERANDS = st.one_of(NAMES.map(lambda name: Name(name, 0)), VALUES.map(lambda value: Literal(value, 0)))
COMPARISONS = st.builds(
    Compare, st.sampled_from(["==", "!=", "<", "<=", ">", ">=", "in"]), OPERANDS, OPERANDS, st.just(0)
)


def _joined(children: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    several = st.lists(children, min_size=2, max_size=3).map(tuple)
    return st.one_of(several.map(And), several.map(Or), children.map(Not))


TREES = st.recursive(st.one_of(OPERANDS, COMPARISONS), _joined, max_leaves=8)


def without_columns(node: Node) -> object:
    match node:
        case Literal():
            return type(node.value), node.value
        case Name():
            return node.text
        case Compare():
            return node.op, without_columns(node.left), without_columns(node.right)
        case Not():
            return "not", without_columns(node.item)
        case And() | Or():
            return type(node), [without_columns(item) for item in node.items]


@given(TREES)
def test_a_written_tree_is_read_again_as_it_was(tree: Node) -> None:
    assert without_columns(parse(str(tree))) == without_columns(tree)


@given(st.text(max_size=40))
def test_any_text_can_be_quoted(text: str) -> None:
    assert parse(quoted(text)) == Literal(text, 1)


FRAGMENTS = st.sampled_from(
    ["refused", "rid", "==", '"kv"', "(", ")", "and", "not", "__import__", "exec", "eval", "('os')", ".system",
     "lambda", ":", "[]", "{}", "0", ";", "print", "\\", "'", "rids", "in",
     "batch.size", "open", ",", "\n", "need", ">"]
)  # fmt: skip


@given(
    st.one_of(st.text(alphabet=string.printable, max_size=60), st.lists(FRAGMENTS, max_size=12).map(" ".join))
)
def test_any_text_gives_a_test_or_one_clean_error_and_does_nothing_else(text: str) -> None:
    try:
        test = compiled(text)
    except BadRequest as error:
        column = re.match(r"breakpoint, column (\d+)", error.message)
        assert column is None or 1 <= int(column[1]) <= len(text) + 1
        return
    for one in (REFUSED, PLANNED, EVICTED, RETURNED, STREAMED):
        assert test(one) in (True, False)


def test_the_language_uses_nothing_that_executes_text() -> None:
    """No eval, exec, compile, import or attribute chosen by the text beyond the schema's own fields."""
    for module in ("grammar", "predicate", "vocabulary"):
        source = __import__(f"sgviz.scheduler.gate.{module}", fromlist=["x"]).__spec__.origin
        with open(source) as file:
            code = file.read()
        assert not re.search(
            r"\b(eval|exec|compile|__import__|importlib)\s*\(", code.replace("re.compile(", "")
        )
