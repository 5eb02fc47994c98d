"""Folders with the tiny model under other weights, or with something wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from sgviz.model.fetch import resolve_model

WEIGHTS = "model.safetensors"


def copied(folder: Path, model: str = "tiny-llama", **config: Any) -> Path:
    """The model's folder again, with these entries of its config changed."""
    shutil.copytree(resolve_model(model), folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return folder


def other_weights(folder: Path, model: str = "tiny-llama", seed: int = 3) -> Path:
    """The same model with noise on every weight: its answers are others."""
    copied(folder, model)
    random = torch.Generator().manual_seed(seed)
    tensors = load_file(folder / WEIGHTS)
    noisy = {
        name: tensor
        + 0.3 * torch.randn(tensor.shape, generator=random) * tensor.float().std().to(tensor.dtype)
        for name, tensor in tensors.items()
    }
    save_file({name: noisy[name].to(tensors[name].dtype) for name in noisy}, folder / WEIGHTS)
    return folder


def without_a_tensor(folder: Path) -> Path:
    """A checkpoint that was not written to its end."""
    copied(folder)
    tensors = load_file(folder / WEIGHTS)
    del tensors["model.norm.weight"]
    save_file(tensors, folder / WEIGHTS)
    return folder


def of_integers(folder: Path) -> Path:
    """Every tensor is there and has its shape, but none holds weights."""
    copied(folder)
    tensors = load_file(folder / WEIGHTS)
    save_file({name: tensor.to(torch.int64) for name, tensor in tensors.items()}, folder / WEIGHTS)
    return folder
