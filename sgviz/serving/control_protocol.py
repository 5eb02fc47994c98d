"""The bodies of the control endpoints: as SGLang's, but a field that is unknown, or known and not built, is refused.

Ignoring one would leave an engine in another state than its operator believes. Imports: errors, messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from sgviz.errors import BadRequest, suggest
from sgviz.messages.flow import Activity, PauseMode
from sgviz.serving.protocol import parse

T = TypeVar("T", bound=msgspec.Struct)


class PauseRequest(msgspec.Struct, frozen=True):
    """POST /pause_generation."""

    mode: PauseMode = "abort"


class ContinueRequest(msgspec.Struct, frozen=True):
    """POST /continue_generation."""

    torch_empty_cache: bool | None = None  # no matter here: nothing is kept that could be given back


class UpdateWeightsRequest(msgspec.Struct, frozen=True):
    """POST /update_weights_from_disk."""

    model_path: str
    load_format: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None
    torch_empty_cache: bool | None = None  # no matter: the next weights use what torch keeps of the old


class WeightVersionRequest(msgspec.Struct, frozen=True):
    """POST /update_weight_version."""

    new_version: str
    abort_all_requests: bool = True


class ProfileRequest(msgspec.Struct, frozen=True):
    """POST /start_profile."""

    output_dir: str | None = None
    num_steps: int | None = None
    activities: list[Activity] | None = None
    with_stack: bool | None = None
    record_shapes: bool | None = None
    profile_id: str | None = None


class SlowDownRequest(msgspec.Struct, frozen=True):
    """POST /slow_down; null or left out: no more."""

    forward_sleep_time: float | None = None


# fields of SGLang that would do something here that is not built; with these values they do nothing
IDLE: Mapping[type, Mapping[str, tuple[object, ...]]] = MappingProxyType(
    {
        UpdateWeightsRequest: {
            "is_async": (False,), "keep_pause": (False, True), "recapture_cuda_graph": (False,), "token_step": (0,),
            "manifest": (),
        },
        ProfileRequest: {
            "start_step": (0,), "profile_by_stage": (False,), "merge_profiles": (False,), "profile_prefix": (),
            "profile_stages": (), "detailed_annotations": (False,),
        },
    }
)  # fmt: skip


def parse_control(kind: type[T], body: dict[str, Any]) -> T:
    """`body` as a `kind`. Raises BadRequest that names the field which is unknown, not supported or ill-typed."""
    idle, known = IDLE.get(kind, {}), [field.name for field in msgspec.structs.fields(kind)]
    for name, value in body.items():
        if name in known:
            continue
        if name not in idle:
            near = suggest(name, known)
            raise BadRequest(f"{name}: unknown field{near}; there are {', '.join(known)}", param=name)
        if value is not None and value not in idle[name]:
            raise BadRequest(f"{name} is not supported, got {value!r}", param=name)
    return parse(kind, {name: value for name, value in body.items() if name in known})
