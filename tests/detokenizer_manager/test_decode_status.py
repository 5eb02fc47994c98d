"""Incremental decoding against the decode of everything at once."""

from __future__ import annotations

import random

import pytest
from byte_bpe import ByteBpe
from hypothesis import given, settings
from hypothesis import strategies as st

from sgviz.detokenizer_manager import DecodeStatus, find_printable_text

CODEC = ByteBpe()
CONTEXT = 5
STOPS = ["END", "中", " b", "\n\n", "🎉x", "é"]
TEXTS = st.text(
    st.one_of(
        st.sampled_from("abcdefgh. \n"),
        st.sampled_from("éüßñ中文字日本語カ"),
        st.sampled_from("👍🎉👨🇩\u200d\u0301 "),
        st.characters(exclude_categories=("Cs",), exclude_characters="\ufffd"),
    ),
    max_size=40,
)


class Run:
    """One request driven through a DecodeStatus as the scheduler would feed it."""

    def __init__(self, prompt: list[int]) -> None:
        context = prompt[-CONTEXT:]
        self.status = DecodeStatus(list(context), len(context))

    def step(self, ids: list[int]) -> str:
        self.status.decode_ids.extend(ids)
        return self.status.advance(*self._texts(drop_last=False))

    def end(
        self, ids: list[int], stop: str | None = None, *, drop_last: bool = False, keep: bool = False
    ) -> str:
        self.status.decode_ids.extend(ids)
        return self.status.finish(*self._texts(drop_last=drop_last), stop, keep_stop=keep)

    def _texts(self, *, drop_last: bool) -> tuple[str, str]:
        surr, read = CODEC.decode_batch(list(self.status.windows(drop_last=drop_last)))
        return surr, read


def cut(ids: list[int], rng: random.Random) -> list[list[int]]:
    """`ids` in random pieces, none empty."""
    out = []
    while ids:
        size = rng.choice((1, 1, 1, 2, 3, 7))
        out.append(ids[:size])
        ids = ids[size:]
    return out


def beyond(prompt: str, full: str) -> str:
    """The text of the output: what the full decode has beyond the prompt's."""
    same = next((i for i, (a, b) in enumerate(zip(prompt, full)) if a != b), min(len(prompt), len(full)))
    return full[same:]


@settings(max_examples=400, deadline=None)
@given(TEXTS, st.integers(0, 2**32))
def test_pieces_join_to_the_full_decode(text: str, seed: int) -> None:
    rng = random.Random(seed)
    ids = CODEC.encode("x" + text, merge=rng.random() < 0.7)
    at = rng.randint(1, len(ids))
    prompt, output = ids[:at], ids[at:]
    run = Run(prompt)
    pieces = [run.step(part) for part in cut(output, rng)]
    pieces.append(run.end([]))
    full = CODEC.decode(prompt + output)
    assert "".join(pieces) == beyond(CODEC.decode(prompt), full)
    assert "\ufffd" not in "".join(pieces)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, CODEC.vocab_size - 1), min_size=1, max_size=40), st.integers(0, 2**32))
def test_any_ids_at_all_join_to_the_full_decode(ids: list[int], seed: int) -> None:
    """Random tokens are mostly broken UTF-8; still nothing is lost, repeated or changed afterwards."""
    rng = random.Random(seed)
    prompt = CODEC.encode("prompt ")
    run = Run(prompt)
    pieces = [run.step(part) for part in cut(ids, rng)]
    pieces.append(run.end([]))
    assert "".join(pieces) == CODEC.decode(prompt + ids)[len("prompt ") :]


@settings(max_examples=200, deadline=None)
@given(TEXTS, st.integers(0, 2**32))
def test_a_half_character_is_never_sent(text: str, seed: int) -> None:
    rng = random.Random(seed)
    ids = CODEC.encode(text, merge=False)
    run = Run(CODEC.encode("p"))
    sent = ""
    for part in cut(ids, rng):
        sent += run.step(part)
        assert "\ufffd" not in sent
        assert text.startswith(sent)


def test_ends_in_half_a_character_only_if_the_answer_does() -> None:
    run = Run(CODEC.encode("p"))
    half = CODEC.encode("é", merge=False)[:1]
    assert run.step(half) == ""
    assert run.end([]) == "\ufffd"


def test_prompt_that_ends_in_half_a_character_is_not_sent_again() -> None:
    ids = CODEC.encode("abc中d", merge=False)
    run = Run(ids[:4])  # "abc" and the first of three bytes
    assert run.step(ids[4:5]) == ""
    assert run.step(ids[5:6]) == "中"
    assert run.end(ids[6:]) == "d"


def test_the_worked_example_of_a_split_character() -> None:
    run = Run(CODEC.encode("p"))
    first, second = CODEC.encode("é", merge=False)
    assert run.step([*CODEC.encode("ab cd", merge=False), first]) == "ab "
    assert run.step([second]) == "cdé"
    assert run.status.held == 0


@settings(max_examples=300, deadline=None)
@given(
    TEXTS,
    st.sampled_from(STOPS),
    TEXTS,
    st.booleans(),
    st.integers(0, 2**32),
)
def test_text_is_cut_at_the_stop_string(before: str, stop: str, after: str, keep: bool, seed: int) -> None:
    """Fed as the scheduler does: sends wait while the tail could become the stop string."""
    rng = random.Random(seed)
    prompt = CODEC.encode("p")
    output = CODEC.encode(before + stop + after, merge=rng.random() < 0.7)
    run, sent, waiting = Run(prompt), "", []
    for n, token in enumerate(output, start=1):
        waiting.append(token)
        text = CODEC.decode(output[:n])
        if stop in text:
            sent += run.end(waiting, stop, keep=keep)
            break
        if not any(text.rstrip("\ufffd").endswith(stop[:k]) for k in range(1, len(stop))):
            sent += run.step(waiting)
            waiting = []
    full = before + stop + after
    assert sent == full[: full.index(stop) + (len(stop) if keep else 0)]


def test_stop_string_that_was_never_completed_is_delivered() -> None:
    run = Run(CODEC.encode("p"))
    assert run.step(CODEC.encode("say ")) == "say "
    assert run.end(CODEC.encode("ENX"), None) == "ENX"


@pytest.mark.parametrize(("drop", "text"), [(True, "hi"), (False, "hi!")])
def test_stop_token_is_left_out(drop: bool, text: str) -> None:
    run = Run(CODEC.encode("p"))
    assert run.end(CODEC.encode("hi!", merge=False), drop_last=drop) == text


@pytest.mark.parametrize(
    ("text", "printable"),
    [
        ("", ""), ("ab", ""), ("ab cd", "ab "), ("line\n", "line\n"), ("中", "中"), ("x中", "x中"),
        ("中\ufffd", "中"), ("ab \ufffd", "ab "), ("\ufffd", ""),
    ],
)  # fmt: skip
def test_printable_prefix(text: str, printable: str) -> None:
    assert find_printable_text(text) == printable
