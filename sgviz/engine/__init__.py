"""Engine: the Python face of the pipeline. Mirrors SGLang's Engine. Imports: everything below."""

from sgviz.engine.chat import ChatReply
from sgviz.engine.engine import Engine
from sgviz.engine.given import Mode, settings_of
from sgviz.engine.http_face import Server

__all__ = ["ChatReply", "Engine", "Mode", "Server", "settings_of"]
