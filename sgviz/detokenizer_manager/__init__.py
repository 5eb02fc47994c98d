"""Token ids to text, piece by piece. Mirrors SGLang's DetokenizerManager.

Imports: scheduler (the names of the stops), messages, channel, events.
"""

from sgviz.detokenizer_manager.decoding import TextDecoder
from sgviz.detokenizer_manager.manager import DetokenizerManager
from sgviz.detokenizer_manager.status import DecodeStatus, find_printable_text

__all__ = ["DecodeStatus", "DetokenizerManager", "TextDecoder", "find_printable_text"]
