"""Stage 1: HTTP <-> GenerateReqInput. The OpenAI endpoints, SGLang's native ones, keys, errors, the server.

Imports: errors, events, messages. `create_app(ServingContext(...))` makes the app, `ServerHandle` runs it.
"""

from sgviz.serving.app import create_app
from sgviz.serving.auth import AccessRules, AuthLevel
from sgviz.serving.context import (
    ChatTemplates,
    Keys,
    ModelFacts,
    ServerState,
    ServerStatus,
    ServingContext,
    Tokenizer,
    TokenizerManager,
)
from sgviz.serving.server import ServerHandle, loop_factory

__all__ = [
    "AccessRules", "AuthLevel", "ChatTemplates", "Keys", "ModelFacts", "ServerHandle", "ServerState",
    "ServerStatus", "ServingContext", "Tokenizer", "TokenizerManager", "create_app", "loop_factory",
]  # fmt: skip
