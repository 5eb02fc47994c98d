"""Grown is, to its reader, the list as it was; and a stream does not copy what it has shown before."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgviz.messages import GenerateReqInput
from sgviz.tokenizer_manager.grown import Grown
from sgviz.tokenizer_manager.meta import OutputBuilder
from sgviz.tokenizer_manager.state import ReqState

places = st.none() | st.integers(-12, 12)


@given(st.lists(st.integers(), max_size=8), st.lists(st.integers(), max_size=8), places, places)
def test_it_is_the_list_as_it_was(
    items: list[int], later: list[int], start: int | None, stop: int | None
) -> None:
    growing = list(items)
    seen = Grown(growing)
    growing += later
    assert list(seen) == items and len(seen) == len(items) and bool(seen) == bool(items)
    assert seen[start:stop] == items[start:stop] and seen[start:stop:-2] == items[start:stop:-2]
    assert [seen[place] for place in range(-len(items), len(items))] == items + items
    for place in (len(items), -len(items) - 1):
        with pytest.raises(IndexError):
            seen[place]
    assert all((token in seen) == (token in items) for token in later)


@pytest.mark.parametrize(
    ("as_views", "stream", "kind"), [(True, True, Grown), (False, True, list), (True, False, list)]
)
def test_only_streams_of_readers_that_want_views_get_them(as_views: bool, stream: bool, kind: type) -> None:
    obj = GenerateReqInput(stream=stream, as_views=as_views, return_logprob=True, token_ids_logprob=[1])
    state = ReqState("r", obj, asyncio.Event(), output_ids=[4, 5], stats=None)  # type: ignore[arg-type]
    state.logprobs.output_token += [(-1.0, 4, None), (-2.0, 5, None)]
    output = OutputBuilder().output(state)
    state.output_ids.append(6)
    lists = {name: value for name, value in output["meta_info"].items() if name.endswith("logprobs")}
    assert len(lists) == 6 and {type(value) for value in (output["output_ids"], *lists.values())} == {kind}
    assert list(output["output_ids"]) == [4, 5]
    assert list(lists["output_token_logprobs"]) == [(-1.0, 4, None), (-2.0, 5, None)]
