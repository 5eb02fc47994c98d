"""ChatTemplate: a model's Jinja template for conversations, rendered the way Hugging Face does.

Templates come with models and requests, so they run in Jinja's sandbox. SGLang leaves this to transformers;
here it stands alone, because importing transformers takes seconds.
Imports: errors, jinja2.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NoReturn

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sgviz.errors import BadRequest

# what a template can run into; the last: something is nested too deeply
_FAULTS = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)


class ChatTemplate:
    """One compiled template. Raises BadRequest for source that does not parse.

    `uses_messages`: whether it looks at the conversation at all.
    """

    def __init__(self, source: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
            self.uses_messages = "messages" in meta.find_undeclared_variables(environment.parse(source))
        except TemplateError as error:
            raise BadRequest(f"the chat template does not parse: {error}", param="chat_template") from error

    def render(self, messages: Sequence[Mapping[str, object]], variables: Mapping[str, object]) -> str:
        """The prompt for `messages`. Raises BadRequest with the template's own words if it refuses them."""
        try:
            return self._template.render(messages=list(messages), **variables)
        except (TemplateError, *_FAULTS) as error:
            raise BadRequest(
                f"the chat template refuses these messages: {error}", param="messages"
            ) from error


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks answers for training; here it just shows its body."""

    tags = {"generation"}  # noqa: RUF012 - the name and kind that Jinja looks for

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without Jinja's HTML escapes."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
