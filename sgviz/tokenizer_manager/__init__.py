"""Requests in, answers out: the rid table, tokenizing, sending, waiting, receiving and waking.

Mirrors SGLang's TokenizerManager. In the order of a request: `tokenize`, `batch` (fan-out), `table` (send),
`receive`, `wait`, `meta`. Imports: messages, channel, errors, events.
"""

from sgviz.tokenizer_manager.codec import TextCodec
from sgviz.tokenizer_manager.manager import TokenizerManager
from sgviz.tokenizer_manager.meta import Output, raise_failure
from sgviz.tokenizer_manager.request_log import RequestLog
from sgviz.tokenizer_manager.state import Limits, ReqState

__all__ = ["Limits", "Output", "ReqState", "RequestLog", "TextCodec", "TokenizerManager", "raise_failure"]
