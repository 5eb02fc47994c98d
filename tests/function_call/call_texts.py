"""Texts as models of each format write them, with what is in them; and what looks like a call and is none."""

from __future__ import annotations

from dataclasses import dataclass, field

NAMES = ("get_weather", "add", "search", "ping")


@dataclass(frozen=True)
class Recorded:
    """One answer. `content` is what is no call. `calls`: `(name, arguments)`, the arguments as they are passed on."""

    format: str
    text: str
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    at_once: bool = False  # its arguments cannot come before they are whole

    def __str__(self) -> str:
        return f"{self.format}:{self.text[:24]!r}"


PARIS = '{"city": "Paris", "unit": "celsius"}'
NESTED = '{"query": "say \\"hi\\" to {him} ]", "filters": [{"a": [1, 2.5e3, null]}, {}], "deep": {"x": {"y": true}}}'
HTML = '{"query": "<b>tool_call</b> <tool_call> </tool_call> 日本語 🙂"}'
SUM = '{"a": 1, "b": -2}'


def qwen(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def fenced(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"


DEEPSEEK = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"

CALLING = [
    Recorded("qwen25", qwen("get_weather", PARIS), calls=[("get_weather", PARIS)]),
    Recorded(
        "qwen25",
        "I'll look that up.\n" + qwen("search", NESTED) + "\n" + qwen("search", HTML) + "\n",
        "I'll look that up.",
        [("search", NESTED), ("search", HTML)],
    ),
    Recorded("qwen25", f"{qwen('add', SUM)}\nThat's all.\n", "That's all.\n", [("add", SUM)]),
    Recorded(
        "qwen25",
        f"One.\n\n{qwen('add', SUM)}\n{qwen('ping', '{}')}\nTwo.",
        "One.\n\nTwo.",
        [("add", SUM), ("ping", "{}")],
    ),
    Recorded(
        "qwen25",
        f"One.{qwen('add', SUM)} \n{qwen('ping', '{}')}Two.",
        "One. \nTwo.",
        [("add", SUM), ("ping", "{}")],
    ),
    Recorded("qwen25", f"One.{qwen('add', SUM)} \n Two.", "One. \n Two.", [("add", SUM)]),
    Recorded("qwen25", qwen("add", SUM) + "\n<tool_c", calls=[("add", SUM)], content="<tool_c"),
    Recorded("qwen25", qwen("add", SUM)[:-3], calls=[("add", SUM)]),
    Recorded(
        "hermes",
        f'<tool_call>{{"arguments": {SUM}, "name": "add"}}</tool_call>',
        calls=[("add", SUM)],
        at_once=True,
    ),
    Recorded(
        "hermes",
        f'<tool_call> {{"id": 7, "name":"add" ,"arguments":{SUM}, "extra": [{{"x": "}}"}}]}} </tool_call>',
        calls=[("add", SUM)],
    ),
    Recorded("hermes", '<tool_call>{"name": "ping"}</tool_call>', calls=[("ping", "{}")], at_once=True),
    Recorded(
        "hermes",
        '<tool_call>{"name": "ping", "arguments": null}</tool_call>',
        calls=[("ping", "{}")],
        at_once=True,
    ),
    Recorded(
        "hermes",
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
        calls=[("add", '{"a": 1}')],
        at_once=True,
    ),
    Recorded("llama3", f'{{"name": "get_weather", "parameters": {PARIS}}}', calls=[("get_weather", PARIS)]),
    Recorded(
        "llama3",
        f'<|python_tag|>{{"type": "function", "name": "add", "parameters": {SUM}}}; '
        f'{{"name": "search", "parameters": {NESTED}}}',
        calls=[("add", SUM), ("search", NESTED)],
    ),
    Recorded(
        "llama3",
        "{'name': 'search', 'parameters': {'query': \"it's\", 'exact': True, 'limit': None}}",
        calls=[("search", '{"query": "it\'s", "exact": true, "limit": null}')],
        at_once=True,
    ),
    Recorded("llama3", f'Sure. <|python_tag|>{{"name": "add", "arguments": {SUM}}}', "Sure.", [("add", SUM)]),
    Recorded(
        "mistral",
        f'[TOOL_CALLS] [{{"name": "add", "arguments": {SUM}}}, {{"name": "search", "arguments": {NESTED}}}]',
        calls=[("add", SUM), ("search", NESTED)],
    ),
    Recorded(
        "mistral",
        f"On it. [TOOL_CALLS]add[ARGS]{SUM}[TOOL_CALLS]search[CALL_ID]a1B2c3D4e[ARGS]{NESTED}",
        "On it.",
        [("add", SUM), ("search", NESTED)],
    ),
    Recorded("mistral", f"[TOOL_CALLS]add{SUM}", calls=[("add", SUM)]),
    Recorded("mistral", f'[TOOL_CALLS]{{"name": "add", "arguments": {SUM}}}', calls=[("add", SUM)]),
    Recorded(
        "pythonic",
        "[get_weather(city='Paris', unit=\"celsius\"), add(a=1, b=-2)]",
        calls=[("get_weather", PARIS), ("add", SUM)],
        at_once=True,
    ),
    Recorded(
        "pythonic",
        "<|python_start|>[search(query='a ] ( \\' b', filters=[{'k': (1, 2.5)}], on=True, off=None), ping()]"
        "<|python_end|>",
        calls=[
            ("search", '{"query": "a ] ( \' b", "filters": [{"k": [1, 2.5]}], "on": true, "off": null}'),
            ("ping", "{}"),
        ],
        at_once=True,
    ),
    Recorded(
        "pythonic",
        "See [1] and [x](y): [ping()] done",
        "See [1] and [x](y): done",
        [("ping", "{}")],
        at_once=True,
    ),
    Recorded("deepseekv3", DEEPSEEK.format(fenced("get_weather", PARIS)), calls=[("get_weather", PARIS)]),
    Recorded(
        "deepseekv3",
        "Let me see.\n\n" + DEEPSEEK.format(fenced("add", SUM) + "\n" + fenced("search", NESTED)),
        "Let me see.",
        [("add", SUM), ("search", NESTED)],
    ),
    Recorded(
        "deepseekv31",
        DEEPSEEK.format(
            f"<｜tool▁call▁begin｜>add<｜tool▁sep｜>{SUM}<｜tool▁call▁end｜>"
            f"<｜tool▁call▁begin｜>search<｜tool▁sep｜>{HTML}<｜tool▁call▁end｜>"
        ),
        calls=[("add", SUM), ("search", HTML)],
    ),
    # cut off in the middle of the arguments: a call as far as it goes
    Recorded(
        "qwen25", qwen("search", HTML).partition("</tool")[0], calls=[("search", HTML.partition("</tool")[0])]
    ),
    Recorded("mistral", f"[TOOL_CALLS]add[ARGS]{SUM[:8]}", calls=[("add", SUM[:8])]),
    # brackets left open: the end marker ends the arguments all the same
    Recorded(
        "qwen25",
        '<tool_call>\n{"name": "add", "arguments": {"a": 1</tool_call>\n' + qwen("ping", "{}"),
        calls=[("add", '{"a": 1'), ("ping", "{}")],
    ),
    Recorded("qwen25", qwen("ping", "{}").replace("}}", "}"), calls=[("ping", "{}")]),
]

NOT_CALLING = [
    Recorded(name, text, text)
    for name, texts in {
        "qwen25": [
            "Just an answer, 1 < 2 and <tool> <tool_call",
            "<tool_call>",
            "<tool_call>\nI can't do that.\n</tool_call>",
            '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
            '<tool_call>{"name": "add", "arguments": [1, 2]}</tool_call>',
            '<tool_call>{"name": "add", "arguments": 3}</tool_call>',
            '<tool_call>{"name": "add", "arguments": "no object"}</tool_call>',
            '<tool_call>{"name": "add", "arguments": "\\ud800{"}</tool_call>',
            '<tool_call>{"arguments": {"a": 1}}</tool_call>',
            '<tool_call>{"name": 5}</tool_call>',
            '<tool_call>{"name" "add"}</tool_call>',
            '<tool_call>{"name": "ad',
            "</tool_call> without a beginning",
            f'<tool_call>{{"{"x" * 300}": 1, "name": "add"}}</tool_call>',
            "  \n leading and trailing \n\n",
        ],
        "llama3": [
            '{"answer": 42}',
            "{",
            "{'name': 'add', 'parameters': {1: 2}}",
            "{'name': 'add', 'parameters': __import__('os')}",
            '<|python_tag|>brave_search.call(query="x")',
            'Some {"name": "add", "parameters": {}} inside',
        ],
        "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS] []", "[TOOL_CALLS]nobody[ARGS]{}", "[TOOL", "[1, 2]"],
        "pythonic": [
            "[", "[1, 2, 3]", "[add", "[add(", "[add(1)]", "[add(a=b)]", "[add(a=1), nobody()]", "[add(a=1e999)]",
            "[add(**{'a': 1})]", "[add(a='\\ud800')]", "[add(a=open('x'))]", "[add(a=1) if True else 2]",
            "[add(a=" + "[" * 300 + "]" * 300 + ")]",
        ],
        "deepseekv3": [
            "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁begin｜>nothing<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>nobody\n```json\n{}\n```<｜tool▁call▁end｜>",
        ],
    }.items()
    for text in texts
]  # fmt: skip

ALL = [*CALLING, *NOT_CALLING]
