"""The step debugger: `engine.debugger()`, and `sgviz.connect(url).debugger()` for a server in other processes.

A bridge: it drives the gate of the scheduler and reads recordings. SGLang has no counterpart.
Imports: launch, serving, tokenizer_manager, messages, recording.
"""

from sgviz.debugger.bridge import DebugBridge, DebugReply
from sgviz.debugger.debugger import Debugger
from sgviz.debugger.link import EngineLink, HttpLink, Link
from sgviz.debugger.remote import Connection, connect, connect_debugger
from sgviz.debugger.routes import debug_mount

__all__ = [
    "Connection", "DebugBridge", "DebugReply", "Debugger", "EngineLink", "HttpLink", "Link", "connect",
    "connect_debugger", "debug_mount",
]  # fmt: skip
