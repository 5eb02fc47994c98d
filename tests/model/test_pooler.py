"""The Pooler: which hidden states make a vector, in one forward or in several."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sgviz.errors import SgvizError
from sgviz.messages.embedding import EmbeddingSpec, Pooling, unpack_vector
from sgviz.model.pooler import Pooled, Pooler, to_host

DIM = 6


def states(tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(tokens, DIM, generator=torch.Generator().manual_seed(seed))


def expected(hidden: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    chosen = {"last": hidden[-1], "cls": hidden[0], "mean": hidden.mean(0)}[pooling]
    return chosen / chosen.norm()


@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
def test_each_member_has_its_own_vector_of_length_one(pooling: Pooling) -> None:
    lens = [3, 1, 5]
    hidden = states(sum(lens))
    members = [Pooled(row=row, prefix=0, extend=size) for row, size in enumerate(lens, 1)]
    vectors = Pooler(EmbeddingSpec(dim=DIM, pooling=pooling)).forward(hidden, members)
    for vector, part in zip(vectors, hidden.split(lens)):
        assert vector is not None
        torch.testing.assert_close(vector, expected(part, pooling))
        assert float(vector.norm()) == pytest.approx(1.0)


@given(st.lists(st.integers(1, 7), min_size=1, max_size=6), st.sampled_from(["last", "mean"]))
def test_chunks_give_the_vector_of_the_whole_prompt(cuts: list[int], pooling: Pooling) -> None:
    hidden = states(sum(cuts))
    pooler = Pooler(EmbeddingSpec(dim=DIM, pooling=pooling))
    prefix = 0
    for number, part in enumerate(hidden.split(cuts), 1):
        goes_on = number < len(cuts)
        other = states(2, seed=number)
        members = [
            Pooled(row=4, prefix=prefix, extend=len(part), goes_on=goes_on),
            Pooled(row=9, prefix=0, extend=2),
        ]
        vector, beside = pooler.forward(torch.cat((part, other)), members)
        assert beside is not None and (vector is None) == goes_on
        torch.testing.assert_close(beside, expected(other, pooling))
        prefix += len(part)
    assert vector is not None
    torch.testing.assert_close(vector, expected(hidden, pooling))


def test_a_prompt_that_begins_again_has_nothing_of_what_it_left() -> None:
    pooler = Pooler(EmbeddingSpec(dim=DIM, pooling="mean"))
    pooler.forward(states(3), [Pooled(row=2, prefix=0, extend=3, goes_on=True)])
    hidden = states(4, seed=1)
    pooler.forward(hidden[:2], [Pooled(row=2, prefix=0, extend=2, goes_on=True)])  # retracted, from the start
    (vector,) = pooler.forward(hidden[2:], [Pooled(row=2, prefix=2, extend=2)])
    assert vector is not None
    torch.testing.assert_close(vector, expected(hidden, "mean"))


def test_a_mean_with_a_part_missing_is_refused() -> None:
    pooler = Pooler(EmbeddingSpec(dim=DIM, pooling="mean"))
    with pytest.raises(SgvizError, match="has 0 tokens before this chunk, wanted 5"):
        pooler.forward(states(3), [Pooled(row=2, prefix=5, extend=3)])
    pooler.forward(states(5), [Pooled(row=3, prefix=0, extend=5, goes_on=True)])
    pooler.forget([3])
    with pytest.raises(SgvizError, match="has 0 tokens"):
        pooler.forward(states(3), [Pooled(row=3, prefix=5, extend=3)])


def test_a_vector_is_cut_before_it_gets_its_length() -> None:
    hidden = states(2)
    (vector,) = Pooler(EmbeddingSpec(dim=DIM)).forward(
        hidden, [Pooled(row=1, prefix=0, extend=2, dimensions=3)]
    )
    assert vector is not None
    torch.testing.assert_close(vector, hidden[-1, :3] / hidden[-1, :3].norm())


def test_on_the_wire_it_is_float32_and_empty_while_it_is_not_there() -> None:
    vector = states(1)[0]
    packed, nothing = to_host([vector, None])
    assert nothing == b"" and torch.equal(torch.tensor(unpack_vector(packed)), vector)
