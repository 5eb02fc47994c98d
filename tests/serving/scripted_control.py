"""The operators' side of a scripted TokenizerManager."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sgviz.messages.flow import Load, UpdateWeightFromDiskReqOutput


@dataclass
class ScriptedWeights:
    model_path: str = ""
    version: str = "default"


@dataclass
class ScriptedControl:
    """Notes what was asked for, does as if it were done, or raises `failure`."""

    calls: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    weights: ScriptedWeights = field(default_factory=ScriptedWeights)
    load: Load = field(default_factory=Load)
    failure: Exception | None = None

    def _note(self, name: str, *arguments: Any) -> None:
        if self.failure is not None:
            raise self.failure
        self.calls.append((name, arguments))

    async def pause_generation(self, mode: str) -> int:
        self._note("pause_generation", mode)
        return 2

    async def continue_generation(self) -> None:
        self._note("continue_generation")

    async def update_weights_from_disk(
        self, model_path: str, load_format: str | None, **options: Any
    ) -> UpdateWeightFromDiskReqOutput:
        self._note("update_weights_from_disk", model_path, load_format, options)
        self.weights = ScriptedWeights(model_path, options["weight_version"])
        return UpdateWeightFromDiskReqOutput(id="", success=True, message="as asked", progress={"r": 3})

    async def update_weight_version(self, new_version: str, abort_all_requests: bool) -> None:
        self._note("update_weight_version", new_version, abort_all_requests)
        self.weights.version = new_version

    async def start_profile(
        self, output_dir: str | None, num_steps: int | None, activities: Any, **options: Any
    ) -> str:
        self._note("start_profile", output_dir, num_steps, activities, options)
        return "trace"

    async def stop_profile(self) -> str:
        self._note("stop_profile")
        return "trace"

    async def slow_down(self, forward_sleep_time: float | None) -> None:
        self._note("slow_down", forward_sleep_time)

    async def get_loads(self) -> dict[int, Load]:
        self._note("get_loads")
        return {0: self.load}
