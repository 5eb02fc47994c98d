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
from sgviz.config.parallel_groups import DisaggregationConfig, ParallelConfig
from sgviz.config.server_groups import HttpConfig, ObserveConfig, ServeConfig
from sgviz.config.settings import Settings

__all__ = [
    "DEFAULT_MAX_RUNNING",
    "DEFAULT_MODEL",
    "CacheConfig",
    "DisaggregationConfig",
    "GrammarConfig",
    "HttpConfig",
    "ModelConfig",
    "ObserveConfig",
    "ParallelConfig",
    "ScheduleConfig",
    "ServeConfig",
    "Settings",
    "SimConfig",
]
