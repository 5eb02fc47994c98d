"""Other weights for a running model: loaded beside it, checked, and put in its place between two forwards.

Mirrors `update_weights_from_disk` of SGLang's ModelRunner. Different: the new model is built whole, with its packed
layouts and its decode graph, before the old one goes; so nothing is half loaded, and both are in memory for a moment.
Imports: errors, model, worker.model_runner, torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import fields

from sgviz.errors import BadRequest, SgvizError
from sgviz.model.fetch import resolve_model
from sgviz.model.model_config import DecoderConfig, ModelFacts, load_config
from sgviz.worker.model_runner import Loaded, ModelRunner

MAY_DIFFER = ("name", "dtype")  # how the weights are stored; they are turned into the running model's type


class WeightsOnTheWay:
    """One load in a thread of its own; satisfies `worker.protocol.NewWeights`.

    Args:
        put: lets the finished model take the place of the old one, behind what was launched, and waits for that.
    """

    def __init__(self, runner: ModelRunner, model_path: str, put: Callable[[Loaded], None]) -> None:
        self._put = put
        self._loaded: Future[Loaded] = Future()
        arguments = (runner, model_path, self._loaded)
        threading.Thread(target=_load, args=arguments, name="sgviz-weights", daemon=True).start()

    def done(self) -> bool:
        return self._loaded.done()

    def install(self) -> None:
        self._put(self._loaded.result())


def _load(runner: ModelRunner, model_path: str, loaded: Future[Loaded]) -> None:
    try:
        loaded.set_result(load_beside(runner, model_path))
    except SgvizError as error:
        loaded.set_exception(BadRequest(error.message, param="model_path"))
    except (MemoryError, RuntimeError) as error:  # torch's shortage of memory is a RuntimeError
        loaded.set_exception(BadRequest(f"{model_path} cannot be loaded: {error}", param="model_path"))
    except BaseException as error:
        loaded.set_exception(error)


def load_beside(runner: ModelRunner, model_path: str) -> Loaded:
    """The model at `model_path` as the runner would run it. Raises SgvizError if it is not of the same kind."""
    folder = resolve_model(model_path)
    found = differences(runner.config, load_config(folder))
    if found:
        raise BadRequest(f"{model_path} is not a model like the one that runs: {'; '.join(found)}")
    return runner.load(folder)


def differences(running: DecoderConfig, other: DecoderConfig) -> list[str]:
    """What keeps `other` from taking the place of `running`, each as `name is x, not y`."""
    pairs: list[tuple[str, object, object]] = []
    for config_field in fields(DecoderConfig):
        name = config_field.name
        pairs.append((name, getattr(running, name), getattr(other, name)))
    for fact in fields(ModelFacts):
        pairs.append((fact.name, getattr(running.facts, fact.name), getattr(other.facts, fact.name)))
    return [
        f"{name} is {new!r}, not {old!r}"
        for name, old, new in pairs
        if old != new and name not in (*MAY_DIFFER, "facts")
    ]
