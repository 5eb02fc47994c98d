"""torch.jit, one caller at a time: what it knows of classes is one table for the whole process, without a lock.

Schedulers that are threads of one process load their models side by side. Imports: torch.
"""

from __future__ import annotations

import threading
import warnings
from typing import Any

import torch
from torch import nn

# torch's table belongs to the process, so the lock does too
_one_at_a_time = threading.Lock()


def script(module: nn.Module) -> Any:
    """The module compiled from its source."""
    with _one_at_a_time, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit's age
        return torch.jit.script(module)


def trace(module: nn.Module, example: tuple[object, ...]) -> Any:
    """The operators that a call with `example` ran, as a graph."""
    with _one_at_a_time, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as above, and of Python's view of the traced sizes
        return torch.jit.trace(module, example, check_trace=False)
