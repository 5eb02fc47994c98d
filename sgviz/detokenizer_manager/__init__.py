"""Token ids to text, piece by piece. Mirrors SGLang's DetokenizerManager.

Imports: messages, channel, events.
"""

from sgviz.detokenizer_manager.decoding import TextDecoder
from sgviz.detokenizer_manager.manager import DetokenizerManager, Stop
from sgviz.detokenizer_manager.status import DecodeStatus, find_printable_text

__all__ = ["DecodeStatus", "DetokenizerManager", "Stop", "TextDecoder", "find_printable_text"]
