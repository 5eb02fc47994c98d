"""The vocabulary: every kind survives the wire, has a name of its own and a meaning."""

from __future__ import annotations

import inspect
import types
import typing

import msgspec
import pytest

from sgviz.events.schema import BODY_OF, KIND_OF, Body, Event, Reason

VALUES: dict[object, object] = {
    str: "x",
    int: 7,
    float: 0.5,
    bool: True,
    bytes: b"\1\0\0\0",
    Reason: Reason.KV,
}


def example(kind: object) -> object:
    """A value of the annotated type, one item deep."""
    if kind in VALUES:
        return VALUES[kind]
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        return tuple(example(arg) for arg in args if arg is not Ellipsis)
    if origin is dict:
        return {"key": example(args[1])}
    if origin in (types.UnionType, typing.Union):
        return example(args[0])
    raise AssertionError(f"no example for {kind}")


def body_of(cls: type[Body]) -> Body:
    hints = typing.get_type_hints(cls)
    return cls(**{name: example(hints[name]) for name in cls.__struct_fields__})


@pytest.mark.parametrize("kind", sorted(BODY_OF))
def test_every_kind_survives_the_wire(kind: str) -> None:
    event = Event(1, 2, "scheduler", 3, body_of(BODY_OF[kind]))  # type: ignore[arg-type]
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(event), type=Event)
    assert again == event and again.kind == kind
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(event))[4][0] == kind  # the tag comes first


@pytest.mark.parametrize("kind", sorted(BODY_OF))
def test_every_kind_is_dotted_frozen_and_array_like(kind: str) -> None:
    cls = BODY_OF[kind]
    config = cls.__struct_config__
    assert kind.count(".") == 1 and kind == kind.lower()
    assert config.frozen and config.array_like
    with pytest.raises(AttributeError):
        setattr(body_of(cls), cls.__struct_fields__[0], None)


def test_optional_fields_come_last() -> None:
    """Fields are only appended, so a reader of an older file must be able to fill them in."""
    for cls in BODY_OF.values():
        required = len(cls.__struct_fields__) - len(cls.__struct_defaults__)
        body = body_of(cls)
        short = msgspec.to_builtins(body)[: 1 + required]
        assert msgspec.convert(short, type=cls), cls


def test_kinds_and_classes_are_one_to_one_and_documented() -> None:
    assert len(KIND_OF) == len(BODY_OF) and set(KIND_OF.values()) == set(BODY_OF)
    undocumented = [k for k, cls in BODY_OF.items() if not inspect.getdoc(cls) and k != "row.returned"]
    assert undocumented == []


def test_order_is_time_then_component_then_number() -> None:
    body = body_of(BODY_OF["request.dispatched"])
    events = [Event(seq, t, name, 0, body) for t in (2, 1) for name in "ba" for seq in (2, 1)]  # type: ignore[arg-type]
    keys = [(event.t, event.component, event.seq) for event in sorted(events, key=lambda e: e.sort_key)]
    assert keys == sorted(keys)
