"""The chat template of an engine: the model's own, or the file that the settings name, read once at the start.

Mirrors SGLang's template manager. Imports: model (tokenizer, template), errors.
"""

from __future__ import annotations

from typing import Any

from sgviz.errors import BadRequest, ConfigError
from sgviz.model.chat_template import ChatTemplate
from sgviz.model.tokenizer import Tokenizer


class Templates:
    """Makes prompt ids of conversations.

    Args:
        path: a Jinja file in place of the model's own template.

    Raises:
        ConfigError: the file cannot be read, or is no template.
    """

    def __init__(self, tokenizer: Tokenizer, path: str | None) -> None:
        self._tokenizer = tokenizer
        self._template = None if path is None else _compiled(path)

    def apply(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, **kwargs: Any
    ) -> list[int]:
        """Prompt ids. Raises BadRequest if the template refuses the messages, or the model has none."""
        return self._tokenizer.apply_chat_template(messages, add_generation_prompt, self._template, **kwargs)


def _compiled(path: str) -> ChatTemplate:
    try:
        with open(path, encoding="utf-8") as file:
            template = ChatTemplate(file.read())
        if template.uses_messages:
            return template
        why = "is no chat template: it does not use `messages`"
    except OSError as error:
        why = f"cannot be read: {error.strerror}"
    except UnicodeDecodeError as error:
        why = f"is no UTF-8 text: {error}"
    except BadRequest as error:
        why = f"is no Jinja template: {error.message}"
    raise ConfigError(f"chat_template {path!r} {why}", param="chat_template")
