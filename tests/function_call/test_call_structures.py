"""Strict tools: under the grammar of a format, every call that its detector reads follows the schema of its tool.

The vocabulary is bytes, with or without the markers of the format as special tokens. A model that insists on a text
is played by hand: it takes the token it wants where the grammar lets it, and any other that it may have where not.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import jsonschema
import numpy as np
import pytest

from sgviz.batch.grammar import Grammar
from sgviz.function_call import FORMATS, Call, FunctionCallParser, ToolSpec
from sgviz.grammar import Key
from sgviz.grammar.llguidance_backend import LLGuidanceBackend
from sgviz.grammar.vocabulary import Vocabulary

EOS = 256
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["city"],
    "additionalProperties": False,
}  # fmt: skip
NODE = {
    "type": "object",
    "properties": {"v": {"type": "boolean"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["v"],
    "additionalProperties": False,
}
TOOLS = [ToolSpec("weather", CITY), ToolSpec("node", NODE)]
SCHEMAS = {tool.name: tool.schema for tool in TOOLS}
STRICT = [name for name, detector in FORMATS.items() if detector.structure is not None]
GOOD = ('{"city": "Rome", "days": 7}', '{"v": true, "next": {"v": false}}')
BAD = ('{"town": "Rome"}', '{"v": 1}')


class Player:
    """A format, its grammar, and the ids of texts."""

    def __init__(self, name: str, *, special: bool, several: bool = True) -> None:
        self.detector = FORMATS[name]
        markers = self.detector.markers if special else ()
        self.tokens = [bytes([value]) for value in range(256)] + [b"<eos>"]
        self.tokens += [marker.encode() for marker in markers]
        ids = {"<eos>": EOS} | {marker: EOS + 1 + place for place, marker in enumerate(markers)}
        self._special = ids
        vocabulary = Vocabulary(tokens=self.tokens, special=ids, encode=lambda text: list(text.encode()))
        assert self.detector.structure is not None
        tag = self.detector.structure(TOOLS, several=several)
        backend = LLGuidanceBackend(lambda: vocabulary, (EOS,))
        self._compiled = backend.compile(Key("structural_tag", json.dumps({"format": tag})))

    def ids(self, text: str) -> list[int]:
        """The markers as special tokens, where they are some."""
        out: list[int] = []
        while text:
            marker = next((each for each in self._special if text.startswith(each)), None)
            out += [self._special[marker]] if marker else list(text[0].encode())
            text = text[len(marker or text[0]) :]
        return out

    def plays(self, ids: Sequence[int], rng: random.Random, most: int = 400) -> tuple[str, int, bool]:
        """`(text, tokens that were not as wished, ended)` of a model that wants `ids` and then to end."""
        grammar, out, other = self._compiled.start(), bytearray(), 0
        wishes = [*ids, EOS]
        for place in range(most):
            wish, may = wishes[min(place, len(ids))], allowed(grammar, len(self.tokens))
            token = wish if wish in may else EOS if EOS in may else rng.choice(may)
            other += token != wish
            assert grammar.accept(token) is None
            if token == EOS:
                return out.decode(errors="replace"), other, True
            out += self.tokens[token]
        return out.decode(errors="replace"), other, False

    def reads(self, text: str) -> tuple[str, list[Call]]:
        return FunctionCallParser(self.detector, SCHEMAS).parse(text)


def allowed(grammar: Grammar, size: int) -> list[int]:
    row = np.zeros(-(-size // 32), dtype=np.int32)
    grammar.fill(row)
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[:size]).tolist()


def check(calls: list[Call], ended: bool) -> None:
    """All calls follow their schemas; of an answer that was cut off the last may be unfinished."""
    for call in calls if ended else calls[:-1]:
        jsonschema.validate(json.loads(call.parameters), SCHEMAS[call.name])


def written(name: str, calls: Sequence[tuple[str, str]]) -> str:
    """Calls as a model of that format writes them."""
    if name == "llama3":
        return "<|python_tag|>" + "; ".join(f'{{"name": "{f}", "parameters": {a}}}' for f, a in calls)
    if name == "mistral":
        return "[TOOL_CALLS] [" + ", ".join(f'{{"name": "{f}", "arguments": {a}}}' for f, a in calls) + "]"
    if name.startswith("deepseek"):
        head, tail = (
            ("function<｜tool▁sep｜>{}\n```json\n", "\n```")
            if name == "deepseekv3"
            else ("{}<｜tool▁sep｜>", "")
        )
        each = [f"<｜tool▁call▁begin｜>{head.format(f)}{a}{tail}<｜tool▁call▁end｜>" for f, a in calls]
        between = "\n" if name == "deepseekv3" else ""
        return f"<｜tool▁calls▁begin｜>{between.join(each)}<｜tool▁calls▁end｜>"
    return "\n".join(f'<tool_call>\n{{"name": "{f}", "arguments": {a}}}\n</tool_call>' for f, a in calls)


PAIR = list(zip(SCHEMAS, GOOD))


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", STRICT)
def test_what_follows_the_schemas_is_written_as_it_is_wished(name: str, special: bool) -> None:
    player = Player(name, special=special)
    for text in ("Just text, 1 < 2 [a] {b}.", written(name, PAIR[:1]), "Look: " + written(name, PAIR)):
        got, other, ended = player.plays(player.ids(text), random.Random(0))
        assert (got, other, ended) == (text, 0, True), got
        content, calls = player.reads(got)
        assert [call.name for call in calls] == [f for f, a in PAIR if a in text]
        check(calls, ended)
        assert content == text.split("<tool_call>")[0].strip() or calls


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", STRICT)
def test_no_wish_makes_a_call_that_does_not_follow_its_schema(name: str, special: bool) -> None:
    player, rng = Player(name, special=special), random.Random(7)
    wrong = [*zip(SCHEMAS, BAD), ("nobody", GOOD[0]), ("weather", GOOD[1])]
    texts = ["text " * (number % 2) + written(name, [each]) for number, each in enumerate(wrong)]
    texts += [written(name, [PAIR[0], each]) for each in wrong]
    texts += [f'{{"name": "{f}", "parameters": {a}}}' for f, a in wrong]
    texts += [f" \n{{'name': '{f}', 'parameters': {a}}}" for f, a in wrong[:1]]
    texts += [f"[TOOL_CALLS]{f}[ARGS]{a}" for f, a in wrong]
    read = ended_at_all = 0
    for text in texts:
        for ids in (player.ids(text), list(text.encode())):  # the second: markers in letters
            got, _, ended = player.plays(ids, rng)
            calls = player.reads(got)[1]
            check(calls, ended)
            read += len(calls)
            ended_at_all += ended
    assert read >= len(wrong) and ended_at_all >= len(texts)


@pytest.mark.parametrize("name", STRICT)
def test_one_call_where_no_more_are_wanted(name: str) -> None:
    player = Player(name, special=True, several=False)
    text = written(name, PAIR)
    got, _, ended = player.plays(player.ids(text), random.Random(1))
    assert ended and len(player.reads(got)[1]) == 1


@pytest.mark.parametrize("name", STRICT)
def test_random_answers_hold_nothing_but_calls_of_the_tools(name: str) -> None:
    player, rng = Player(name, special=True), random.Random(3)
    begins = [player.ids(written(name, PAIR)[:cut]) for cut in (0, 1, 16, 25, 40)]
    for number in range(30):
        start = begins[number % len(begins)]
        ids = [*start, *(rng.choice(player.ids(written(name, PAIR))) for _ in range(60))]
        got, _, ended = player.plays(ids, rng, most=300)
        check(player.reads(got)[1], ended)


def test_a_format_of_expressions_cannot_be_held_to_a_schema() -> None:
    assert FORMATS["pythonic"].structure is None
