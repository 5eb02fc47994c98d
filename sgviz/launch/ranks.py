"""The schedulers of one engine: their names, their shares of the machine, and which of them live.

Imports: config, data_parallel, scheduler (policies), launch.messages.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import msgspec

from sgviz.config import Settings
from sgviz.data_parallel.policies import make_dispatch_policy
from sgviz.launch.messages import InitInfo
from sgviz.scheduler.policy import make_policy

SCHEDULER, CONTROLLER, DETOKENIZER = "scheduler", "data_parallel_controller", "detokenizer"


def schedulers_of(settings: Settings) -> list[str]:
    """The component names: `scheduler`, or `scheduler-0` and so on where there are several."""
    size = settings.parallel.dp_size
    return [SCHEDULER] if size == 1 else [f"{SCHEDULER}-{rank}" for rank in range(size)]


def children_of(settings: Settings) -> list[str]:
    """All components behind the main process of node 0, in the order in which they start."""
    first = [CONTROLLER] if settings.parallel.dp_size > 1 else []
    return [*first, *local_schedulers_of(settings), DETOKENIZER]


def local_schedulers_of(settings: Settings) -> list[str]:
    """Those of `schedulers_of` that run on this node."""
    here = settings.parallel.ranks_of(settings.parallel.node_rank)
    return schedulers_of(settings)[here.start : here.stop]


def rank_of(component: str) -> int | None:
    """The data parallel rank of a scheduler among several; None for any other component."""
    kind, _, number = component.partition("-")
    return int(number) if kind == SCHEDULER and number else None


def check_policies(settings: Settings) -> None:
    """Raise ConfigError if the policy of the queue, or that of the ranks, cannot be made."""
    make_policy(settings.schedule.schedule_policy, 0)
    make_dispatch_policy(settings.parallel.load_balance_method)


def share_of(settings: Settings, mode: str) -> Settings:
    """The settings of one rank: on a CPU, torch's threads are shared out among those that are processes."""
    size, model = settings.parallel.dp_size // settings.parallel.nnodes, settings.model
    if (
        size == 1
        or mode == "threads"
        or model.torch_threads is not None
        or model.device not in ("auto", "cpu")
    ):
        return settings
    threads = max(1, len(os.sched_getaffinity(0)) // size)
    return msgspec.structs.replace(settings, model=msgspec.structs.replace(model, torch_threads=threads))


def common_info(infos: Mapping[str, InitInfo], schedulers: Sequence[str]) -> InitInfo:
    """What holds for all ranks: the first one's account of itself, with the narrowest limits of all."""
    ranks = [infos[name] for name in schedulers]
    names = ("max_total_num_tokens", "max_req_len", "max_req_input_len", "max_running_requests")
    narrow = {name: min(getattr(info, name) for info in ranks) for name in names}
    return msgspec.structs.replace(ranks[0], **narrow)
