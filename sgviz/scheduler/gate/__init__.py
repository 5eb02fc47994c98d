"""The gate of the step debugger: where the scheduler's thread parks, looks, and is let go again.

SGLang has no counterpart. Present only where a debugger may attach. Imports: messages, events, scheduler.state.
"""

from sgviz.scheduler.gate.host import DebugHost, LocalPredicates
from sgviz.scheduler.gate.predicate import Predicate, compiled

__all__ = ["DebugHost", "LocalPredicates", "Predicate", "compiled"]
