"""The decoding state of one request: which ids are settled, which text has left.

Mirrors SGLang's DecodeStatus. A token may hold half a character, so text is made by decoding a window
twice: without the new ids (`surr`) and with them (`read`); what the second has beyond the first is new.
Imports: standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass

REPLACEMENT = "\ufffd"  # what a decoder puts in place of an unfinished character
_CJK_BLOCKS = (
    (0x4E00, 0x9FFF),
    (0x3400, 0x4DBF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B820, 0x2CEAF),
    (0xF900, 0xFAFF),
    (0x2F800, 0x2FA1F),
)


@dataclass(slots=True)
class DecodeStatus:
    """What the detokenizer remembers of a request between two messages.

    Attributes:
        decode_ids: up to 5 prompt ids of context, then the output ids so far.
        read_offset: ids before it are in `decoded_text` (or belong to the prompt).
        surr_offset: where the window starts; `surr` is [surr_offset, read_offset).
        decoded_text: settled text, the prompt's excluded.
        sent_offset: characters of the answer already emitted; may run ahead of `decoded_text`.
        dp_rank: whose request it is.
    """

    decode_ids: list[int]
    read_offset: int
    surr_offset: int = 0
    decoded_text: str = ""
    sent_offset: int = 0
    dp_rank: int = 0

    @property
    def held(self) -> int:
        """Ids whose text is not settled yet."""
        return len(self.decode_ids) - self.read_offset

    def windows(self, *, drop_last: bool) -> tuple[list[int], list[int]]:
        """The ids of `surr` and of `read`, the latter without its last id if `drop_last` (a stop token)."""
        end = len(self.decode_ids) - int(drop_last)
        return self.decode_ids[self.surr_offset : self.read_offset], self.decode_ids[self.surr_offset : end]

    def advance(self, surr_text: str, read_text: str) -> str:
        """Take the two decoded windows of an unfinished request; returns the text to emit now."""
        new_text = unseen_text(surr_text, read_text)
        if new_text and not new_text.endswith(REPLACEMENT):
            piece = new_text[self._sent_early() :]
            self.decoded_text += new_text
            self.surr_offset, self.read_offset = self.read_offset, len(self.decode_ids)
        else:
            piece = find_printable_text(new_text)[self._sent_early() :]
        self.sent_offset += len(piece)
        return piece

    def finish(self, surr_text: str, read_text: str, stop: str | None, *, keep_stop: bool) -> str:
        """Take the last windows; returns the rest of the text, cut at `stop` (after it if `keep_stop`)."""
        full = self.decoded_text + unseen_text(surr_text, read_text)
        at = full.find(stop) if stop else -1
        if stop and at >= 0:
            full = full[: at + len(stop) if keep_stop else at]
        return full[self.sent_offset :]

    def _sent_early(self) -> int:
        return self.sent_offset - len(self.decoded_text)


def unseen_text(surr_text: str, read_text: str) -> str:
    """What `read_text` has beyond `surr_text`, whose half character at the end may have become whole."""
    start = len(surr_text)
    if not read_text.startswith(surr_text):
        while start and surr_text[start - 1] == REPLACEMENT and surr_text[:start] != read_text[:start]:
            start -= 1
    return read_text[start:]


def find_printable_text(text: str) -> str:
    """The part of unsettled text that no later token can change: whole lines, CJK characters, whole words."""
    if text.endswith("\n") or (text and _is_cjk(text[-1])):
        return text
    if len(text) > 1 and _is_cjk(text[-2]):
        return text[:-1]
    return text[: text.rfind(" ") + 1]


def _is_cjk(char: str) -> bool:
    code = ord(char)
    return any(low <= code <= high for low, high in _CJK_BLOCKS)
