"""When a request ends, and with which reason."""

from __future__ import annotations

import pytest
from rig import Rig

from sgviz.batch.req import Req
from sgviz.config import DEFAULT_MODEL
from sgviz.messages import FinishReason, SamplingParams
from sgviz.model.fetch import resolve_model
from sgviz.model.tokenizer import Tokenizer
from sgviz.scheduler.finish import finish_reason, tail_may_become_stop
from sgviz.scheduler.state import Limits

PIECES = {10: "a", 11: "b", 12: "ab", 13: "E", 14: "N", 15: "D", 16: "xEN", 17: "DE", 18: "é", 19: " "}
EOS = 2


def text(ids: list[int], skip_special_tokens: bool = True) -> str:
    return "".join(PIECES.get(token, ".") for token in ids)


def limits() -> Limits:
    return Rig(vocab_size=97).state.limits


def ending(ids: list[int], *, most: int = 100, abort: bool = False, **params: object) -> FinishReason | None:
    """The reason after the last of `ids` was appended."""
    req = make(ids, most=most, **params)
    if abort:
        req.to_finish = FinishReason(type="abort", message="gone")
    return finish_reason(req, limits(), text)


def make(ids: list[int], *, most: int = 100, **params: object) -> Req:
    sampling = SamplingParams(max_new_tokens=most, **params).normalize()
    return Req(rid="r", origin_input_ids=[1], sampling_params=sampling, max_new_tokens=most, output_ids=ids)


class TestOrder:
    """Everything at once: the rules are taken away one by one, and the next one speaks."""

    ids = (10, EOS)

    def test_an_abort_goes_before_all(self) -> None:
        reason = ending([10, 500], most=2, abort=True, stop="a", stop_token_ids=(EOS,))
        assert reason == FinishReason(type="abort", message="gone")

    @pytest.mark.parametrize("token", [97, -1, 10**6])
    def test_then_a_token_outside_the_vocabulary(self, token: int) -> None:
        reason = ending([10, token], most=2, stop="a")
        assert reason is not None and (reason.type, reason.status_code) == ("abort", 500)
        assert str(token) in reason.message and "97" in reason.message

    def test_then_a_stop_string(self) -> None:
        assert ending([10, EOS], most=2, stop="a", stop_token_ids=(EOS,)) == FinishReason(
            type="stop", matched="a"
        )

    def test_then_a_stop_token(self) -> None:
        assert ending([10, 11], most=2, stop_token_ids=(11,)) == FinishReason(type="stop", matched=11)

    def test_then_the_end_of_sequence(self) -> None:
        assert ending([10, EOS], most=2) == FinishReason(type="stop", matched=EOS)

    def test_then_the_length(self) -> None:
        assert ending([10, 11], most=2) == FinishReason(type="length", length=2)

    def test_else_it_goes_on(self) -> None:
        assert ending([10, 11], most=3, stop="zz", stop_token_ids=(50,)) is None


class TestIgnoreEos:
    def test_it_ignores_stop_token_ids_too(self) -> None:
        assert ending([10, EOS], ignore_eos=True) is None
        assert ending([10, 11], ignore_eos=True, stop_token_ids=(11,)) is None

    def test_it_does_not_ignore_stop_strings_and_length(self) -> None:
        assert ending([10], ignore_eos=True, stop="a") == FinishReason(type="stop", matched="a")
        assert ending([10], ignore_eos=True, most=1) == FinishReason(type="length", length=1)


class TestStopStrings:
    def test_over_token_boundaries(self) -> None:
        assert ending([13, 14], stop="END") is None
        assert ending([13, 14, 15], stop="END") == FinishReason(type="stop", matched="END")

    def test_in_the_middle_of_a_token(self) -> None:
        assert ending([16, 17], stop="ND") == FinishReason(type="stop", matched="ND")

    def test_the_one_that_stands_first_wins(self) -> None:
        assert ending([12], stop=("b", "ab")) == FinishReason(type="stop", matched="ab")

    def test_behind_a_long_answer(self) -> None:
        """Only a tail is decoded; it is long enough for the longest stop string in one-byte tokens."""
        assert ending([19] * 200 + [13, 14, 15], most=500, stop=("END", "é")) is not None
        assert ending([13, 14, 15] + [19] * 200, most=500, stop=("END",)) is None

    def test_a_stop_string_of_several_bytes(self) -> None:
        assert ending([19, 18], stop="é") == FinishReason(type="stop", matched="é")


def marked(ids: list[int], skip_special_tokens: bool = True) -> str:
    """Token 50 is special: its text is <s>."""
    return text([i for i in ids if i != 50]) if skip_special_tokens else text(ids).replace(".", "<s>")


class TestSpecialTokens:
    def reason(self, ids: list[int], **params: object) -> FinishReason | None:
        return finish_reason(make(ids, most=200, **params), limits(), marked)

    def test_their_text_stops_only_who_sees_it(self) -> None:
        assert self.reason([10, 50], stop="<s>", skip_special_tokens=False) == FinishReason(
            type="stop", matched="<s>"
        )
        assert self.reason([10, 50], stop="<s>") is None
        assert tail_may_become_stop(make([10, 50], stop="<s>!", skip_special_tokens=False), marked)
        assert not tail_may_become_stop(make([10, 50], stop="<s>!"), marked)

    @pytest.mark.parametrize("between", [0, 1, 3, 40])
    def test_skipped_ones_do_not_hide_the_beginning_of_a_stop(self, between: int) -> None:
        """The client sees END, whatever stood between its letters."""
        ids = [10] * 30 + [13] + [50] * between + [14] + [50] * between + [15]
        assert self.reason(ids, stop="END") == FinishReason(type="stop", matched="END")
        assert self.reason(ids[:-1], stop="END") is None
        assert tail_may_become_stop(make(ids[:-1], stop="END"), marked)


def test_a_special_token_of_the_real_tokenizer_stops() -> None:
    """SmolLM2's <|im_end|>: seen with skip_special_tokens=False, and only then."""
    tokenizer = Tokenizer.load(resolve_model(DEFAULT_MODEL))
    end = tokenizer.token_to_id("<|im_end|>")
    word = tokenizer.encode(" hello", add_special_tokens=False)
    assert end is not None
    for skip in (False, True):
        rig = Rig(
            vocab_size=tokenizer.vocab_size,
            rule=lambda rid, index, _: [*word, end, *word][index % (2 * len(word) + 1)],
            decode=tokenizer.decode,
        )
        rig.submit([5], 12, rid="r", stop="<|im_end|>", skip_special_tokens=skip, ignore_eos=True)
        rig.run()
        answer = rig.answers["r"]
        assert answer.reason == ("length" if skip else "stop")
        assert len(answer.output_ids) == (12 if skip else len(word) + 1)


class TestTail:
    @pytest.mark.parametrize(
        ("ids", "stop", "held"),
        [
            ([13], "END", True),
            ([13, 14], "END", True),
            ([16], "END", True),
            ([13, 10], "END", False),
            ([14], "END", False),
            ([10], ("b", "ax"), True),
            ([19, 11], ("ab",), False),
            ([10], (), False),
            ([13, 14, 15], "E", False),  # one character has no proper beginning
        ],
    )
    def test_whether_it_may_become_a_stop(self, ids: list[int], stop: object, held: bool) -> None:
        assert tail_may_become_stop(make(ids, stop=stop), text) == held


def test_the_whole_way_through_the_scheduler() -> None:
    """One scheduler, one request for each ending."""

    def rule(rid: str, index: int, _: int) -> int | None:
        tokens = {"eos": [10, 11, EOS], "token": [10, 11], "string": [13, 14, 15], "broken": [10, 500]}
        ids = tokens.get(rid, [10] * 50)
        return ids[index] if index < len(ids) else 10

    for overlap in (False, True):
        rig = Rig(rule=rule, decode=text, disable_overlap_schedule=not overlap)
        rig.submit([1], 9, rid="eos")
        rig.submit([1, 2], 9, rid="token", stop_token_ids=(11,))
        rig.submit([1, 3], 9, rid="string", stop="ND")
        rig.submit([1, 4], 9, rid="length")
        rig.submit([1, 5], 9, rid="broken")
        rig.submit([1, 6], 0, rid="none")
        rig.run()
        rig.check_empty()
        got = {rid: (len(answer.output_ids), answer.finish.matched) for rid, answer in rig.answers.items()}
        assert got == {
            "eos": (3, EOS),
            "token": (2, 11),
            "string": (3, "ND"),
            "length": (9, None),
            "broken": (2, None),
            "none": (0, None),
        }
        assert {rid: answer.reason for rid, answer in rig.answers.items() if answer.reason != "stop"} == {
            "length": "length",
            "broken": "abort",
            "none": "length",
        }
