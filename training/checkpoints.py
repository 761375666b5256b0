"""Checkpoints: a training run that is killed at any moment goes on where its newest one stands.

A checkpoint is a folder `step-NNNNNNNN`, written under another name and renamed when it is whole;
the newest two are kept. Beside the tensors it holds the recipe, so that a run is never continued
under another one.
"""

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from .recipe import Recipe

NAME = re.compile(r"step-(\d{8})")
STATE, ABOUT = "state.safetensors", "about.json"
KEPT = 2
# What may differ between a run and its continuation: it changes no weight.
FREE = {"log_every", "evaluate_every", "save_every", "compile", "chunk", "folder", "shard_size"}


def save_checkpoint(folder: Path, recipe: Recipe, step: int, tensors: Mapping[str, Tensor]) -> None:
    """Write the state after `step` updates, whole or not at all, and drop older ones."""
    folder.mkdir(parents=True, exist_ok=True)
    scratch, path = folder / f".step-{step:08d}.part", checkpoint_path(folder, step)
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    save_file({name: tensor.cpu() for name, tensor in tensors.items()}, scratch / STATE)
    about = {"step": step, "recipe": dataclasses.asdict(recipe)}
    (scratch / ABOUT).write_text(json.dumps(about, indent=2), encoding="utf-8")
    for name in (STATE, ABOUT):
        with (scratch / name).open("rb") as file:
            os.fsync(file.fileno())
    shutil.rmtree(path, ignore_errors=True)
    scratch.replace(path)
    for old in _steps(folder)[:-KEPT]:
        shutil.rmtree(checkpoint_path(folder, old))


def newest_checkpoint(folder: Path, recipe: Recipe) -> tuple[int, dict[str, Tensor]] | None:
    """Number of updates and state of the newest checkpoint, or None if there is none.

    Raises ValueError if it is damaged, or was made under a recipe that would have led elsewhere.
    """
    if not folder.is_dir():
        return None
    for left in folder.glob(".step-*.part"):
        shutil.rmtree(left, ignore_errors=True)  # another process may do so too
    steps = _steps(folder)
    if not steps:
        return None
    path = checkpoint_path(folder, steps[-1])
    try:
        made_under = json.loads((path / ABOUT).read_text(encoding="utf-8"))["recipe"]
        tensors = load_file(path / STATE)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise damaged(path, error) from error
    differing = sorted(_differences(made_under, dataclasses.asdict(recipe)))
    if differing:
        raise ValueError(
            f"{path} was made with another recipe ({', '.join(differing)}), so this run cannot go"
            " on from it: name another run.folder, or remove that one."
        )
    return steps[-1], tensors


def checkpoint_path(folder: Path, step: int) -> Path:
    """Where the state after `step` updates is kept."""
    return folder / f"step-{step:08d}"


def damaged(path: Path, why: object) -> ValueError:
    """The error for a checkpoint that cannot be gone on from."""
    return ValueError(
        f"{path} is damaged ({why}): remove it, and the run goes on from the one before it."
    )


def _steps(folder: Path) -> list[int]:
    matches = [NAME.fullmatch(path.name) for path in folder.iterdir()]
    return sorted(int(match[1]) for match in matches if match)


def _differences(found: Any, asked: Any, where: str = "") -> set[str]:
    """Dotted names of the settings in which two recipes differ and that change the weights."""
    if isinstance(found, dict) and isinstance(asked, dict):
        names = (found.keys() | asked.keys()) - (FREE if where == "run." else set())
        names -= {"evaluation"} if not where else set()
        return {
            difference
            for name in names
            for difference in _differences(found.get(name), asked.get(name), f"{where}{name}.")
        }
    same = found == asked or (isinstance(asked, tuple) and list(asked) == found)
    return set() if same else {f"{where.rstrip('.')}: {found!r} there, {asked!r} here"}


def seed_of(*parts: int) -> int:
    """A 63-bit seed from a run's seed, a step and whatever else tells two streams apart."""
    value = 0x9E3779B97F4A7C15
    for part in parts:
        value = ((value ^ (part & 0xFFFFFFFFFFFFFFFF)) * 0xBF58476D1CE4E5B9) % 2**64
        value ^= value >> 31
    return value >> 1


def seeded(seed: int, device: torch.device) -> torch.Generator:
    """A generator on `device` that starts at `seed`."""
    return torch.Generator(device=device).manual_seed(seed)
