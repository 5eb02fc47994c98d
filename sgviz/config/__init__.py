"""The settings of an engine and its server.

Imports: errors.
"""

from sgviz.config.engine_groups import (
    DEFAULT_MAX_RUNNING,
    DEFAULT_MODEL,
    CacheConfig,
    GrammarConfig,
    ModelConfig,
    ScheduleConfig,
    SimConfig,
)
from sgviz.config.server_groups import HttpConfig, ObserveConfig, ServeConfig
from sgviz.config.settings import Settings

__all__ = [
    "DEFAULT_MAX_RUNNING",
    "DEFAULT_MODEL",
    "CacheConfig",
    "GrammarConfig",
    "HttpConfig",
    "ModelConfig",
    "ObserveConfig",
    "ScheduleConfig",
    "ServeConfig",
    "Settings",
    "SimConfig",
]
