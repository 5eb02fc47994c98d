"""Tokenizer: text to ids and back, without transformers (whose import takes seconds and pulls torch in).

Works on the files every fast Hugging Face tokenizer has: tokenizer.json, tokenizer_config.json and, in newer
folders, chat_template.jinja. Gives what transformers' AutoTokenizer gives.
Imports: errors, model.chat_template, model.model_config (reading JSON), tokenizers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tokenizers import Tokenizer as Backend

from sgviz.errors import BadRequest, StartupError
from sgviz.model.chat_template import ChatTemplate
from sgviz.model.model_config import JsonObject, read_json

LONG_TEXT = 20_000  # characters
DEFAULT_TEMPLATE = "default"
TOOL_TEMPLATE = "tool_use"
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """One model's tokenizer. Safe to use from several threads.

    Attributes:
        special_tokens: the named ones ("bos_token", ...) and their text, as templates see them.
        eos_token_id, bos_token_id: None if the model has none.
        all_special_ids: ids that `skip_special_tokens` leaves out.
        vocab_size: ids the tokenizer knows, added tokens included; the model may have more rows.
    """

    def __init__(
        self, backend: Backend, special_tokens: Mapping[str, str], templates: Mapping[str, str]
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._templates = {name: ChatTemplate(source) for name, source in templates.items()}
        self.special_tokens = dict(special_tokens)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.eos_token_id = self._named_id("eos_token")
        self.bos_token_id = self._named_id("bos_token")
        added = backend.get_added_tokens_decoder()
        special = {int(i) for i, token in added.items() if token.special}
        named = {self._named_id(name) for name in self.special_tokens}
        self.all_special_ids: tuple[int, ...] = tuple(sorted(special | {i for i in named if i is not None}))

    @staticmethod
    def load(path: Path) -> Tokenizer:
        """The tokenizer in folder `path`. Raises StartupError if there is none that can be read."""
        file = path / "tokenizer.json"
        if not file.exists():
            raise StartupError(
                f"the model folder {path} has no tokenizer.json; only fast tokenizers can be loaded"
            )
        try:
            backend = Backend.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise StartupError(f"{file} cannot be read: {error}") from error
        config = (
            read_json(path / "tokenizer_config.json") if (path / "tokenizer_config.json").exists() else {}
        )
        try:
            return Tokenizer(backend, _special_tokens(path, config), _template_sources(path, config))
        except BadRequest as error:
            raise StartupError(f"{path}: {error}") from error

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`; with `add_special_tokens` those the model wants around a text (often none)."""
        if len(text) > LONG_TEXT:  # the batch call does not hold the interpreter lock meanwhile
            return self.encode_batch([text], add_special_tokens)[0]
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        return [
            item.ids
            for item in self._backend.encode_batch(list(texts), add_special_tokens=add_special_tokens)
        ]

    def decode(
        self,
        ids: Sequence[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """Text of `ids`; bytes that make no character become U+FFFD.

        `spaces_between_special_tokens` is part of the request format; fast tokenizers, in transformers
        too, put no spaces there in either case.
        """
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def decode_batch(
        self,
        batch: Sequence[Sequence[int]],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> list[str]:
        """`decode` of each member, in one call."""
        texts: list[str] = self._backend.decode_batch(
            [list(ids) for ids in batch], skip_special_tokens=skip_special_tokens
        )
        return texts

    def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool = True,
        chat_template: str | ChatTemplate | None = None,
        **variables: object,
    ) -> str:
        """The prompt text of a conversation.

        Args:
            chat_template: source, or a compiled template, to use instead of the model's own.
            variables: handed to the template (`tools`, `enable_thinking`, ...).

        Raises:
            BadRequest: no messages, no template, or the template refuses the messages.
        """
        if not messages:
            raise BadRequest("messages is empty; a chat needs at least one message", param="messages")
        template = self._choose(chat_template, bool(variables.get("tools")))
        given = {"tools": None, "documents": None, **self.special_tokens, **variables}
        return template.render(messages, {**given, "add_generation_prompt": add_generation_prompt})

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool = True,
        chat_template: str | ChatTemplate | None = None,
        **variables: object,
    ) -> list[int]:
        """Ids of `render_chat`; the template has written the special tokens itself."""
        text = self.render_chat(messages, add_generation_prompt, chat_template, **variables)
        return self.encode(text, add_special_tokens=False)

    @property
    def has_chat_template(self) -> bool:
        return DEFAULT_TEMPLATE in self._templates

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary entry (not decoded text), None for an id that has none."""
        token: str | None = self._backend.id_to_token(token_id) if token_id >= 0 else None
        return token

    def token_to_id(self, token: str) -> int | None:
        found: int | None = self._backend.token_to_id(token)
        return found

    def added_tokens(self) -> dict[int, str]:
        """Tokens beside the learnt vocabulary, special or not, by id; their text is written as it is."""
        return {int(i): str(token.content) for i, token in self._backend.get_added_tokens_decoder().items()}

    @property
    def decoder_types(self) -> tuple[str, ...]:
        """The steps of its decoder as tokenizer.json names them, such as ("ByteLevel",); empty without one."""
        decoder = self._backend.decoder
        if decoder is None:
            return ()
        state: JsonObject = json.loads(decoder.__getstate__())
        steps = state.get("decoders")
        return (
            tuple(str(step["type"]) for step in steps) if isinstance(steps, list) else (str(state["type"]),)
        )

    def count_tokens(self, text: str, add_special_tokens: bool = True) -> int:
        return len(self.encode(text, add_special_tokens))

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.token_to_id(token)

    def _choose(self, given: str | ChatTemplate | None, with_tools: bool) -> ChatTemplate:
        if given is not None:
            return given if isinstance(given, ChatTemplate) else ChatTemplate(given)
        names = (TOOL_TEMPLATE, DEFAULT_TEMPLATE) if with_tools else (DEFAULT_TEMPLATE,)
        for name in names:
            if name in self._templates:
                return self._templates[name]
        raise BadRequest(
            "this model has no chat template; give a chat_template, or send a plain prompt for completion",
            param="messages",
        )


def _special_tokens(path: Path, config: JsonObject) -> dict[str, str]:
    """Named tokens from tokenizer_config.json, or for old folders from special_tokens_map.json."""
    file = path / "special_tokens_map.json"
    sources: Iterable[JsonObject] = (read_json(file), config) if file.exists() else (config,)
    found: dict[str, str] = {}
    for source in sources:
        for name in NAMED_TOKENS:
            value = source.get(name)
            text = value.get("content") if isinstance(value, Mapping) else value
            if isinstance(text, str):
                found[name] = text
    return found


def _template_sources(path: Path, config: JsonObject) -> dict[str, str]:
    """Template sources by name: files of their own win over the config."""
    value = config.get("chat_template")
    sources: dict[str, str] = {}
    if isinstance(value, str):
        sources[DEFAULT_TEMPLATE] = value
    elif isinstance(value, list):
        sources = {str(item["name"]): str(item["template"]) for item in value}
    for file in sorted((path / "additional_chat_templates").glob("*.jinja")):
        sources[file.stem] = file.read_text(encoding="utf-8")
    if (path / "chat_template.jinja").exists():
        sources[DEFAULT_TEMPLATE] = (path / "chat_template.jinja").read_text(encoding="utf-8")
    return sources
