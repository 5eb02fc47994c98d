"""Where the log-probabilities of a prompt begin, and how many an answer may have.

Mirrors SGLang's check of `logprob_start_len`; the bound is ours. A prompt is checked where it is whole: by the
tokenizer manager, or by the scheduler's sessions if it is a turn. Imports: errors.
"""

from __future__ import annotations

from sgviz.errors import BadRequest

NAME = "logprob_start_len"
MAX_INPUT_ENTRIES = 1_000_000  # log-probabilities of one prompt: positions times (1 + alternatives + ids)
LONGEST_PROMPT = 2**31 - 1  # more tokens than any context has


def check_start(start: object, longest: int = LONGEST_PROMPT, whose: str = "tokens of a prompt") -> int:
    """`start` if it is a place in a prompt of `longest` tokens, its end or -1. Raises BadRequest."""
    if type(start) is not int or not -1 <= start <= longest:
        raise BadRequest(
            f"{NAME} must be between -1 (no log-probabilities of the prompt) and the {whose}, got {start!r:.60}",
            param=NAME,
        )
    return start


def settle_start(start: object, length: int, tops: int, ids: int) -> int:
    """The first of the `length` prompt tokens whose log-probability is wanted, -1 for none.

    Args:
        tops, ids: alternatives and chosen ids that are wanted at each place.

    Raises:
        BadRequest: it lies outside the prompt, or the answer would have too many entries.
    """
    place = check_start(start, length, f"prompt's {length} tokens")
    if place in (-1, length):
        return -1
    entries = (length - place) * (1 + tops + ids)
    if entries > MAX_INPUT_ENTRIES:
        raise BadRequest(
            f"{length - place} prompt tokens with {tops} alternatives and {ids} chosen ids each are {entries} "
            f"log-probabilities; at most {MAX_INPUT_ENTRIES} are given for one prompt",
            param="top_logprobs_num",
        )
    return place
