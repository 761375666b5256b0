"""Ways of breaking a release folder: each is made for one file or one field, and does its damage to
the folder that it is called with."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from flashmap.release.card import write_card
from flashmap.release.contents import folder_files, refresh_record

from .pair_folders import edit_json, edit_weights, shard

Break = Callable[[Path], Any]


def config(**changes: Any) -> Break:
    return lambda f: edit_json(f / "config.json", **changes)


def remove(name: str) -> Break:
    return lambda f: (f / name).unlink()


def append(name: str, text: str) -> Break:
    return lambda f: (f / name).write_text((f / name).read_text() + text)


def write(name: str, content: bytes = b"text\n") -> Break:
    def change(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)

    return change


def replace(name: str, old: str, new: str) -> Break:
    def change(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text, old
        (folder / name).write_text(text.replace(old, new))

    return change


def instead(name: str, make: Break) -> Break:
    """Something else in the place of a file."""
    return lambda f: [(f / name).unlink(), make(f / name)]


def weights(edit: Callable[[dict[str, torch.Tensor]], Any]) -> Break:
    return lambda f: edit_weights(f, edit)


def ranking(edit: Callable[[dict[str, torch.Tensor]], Any]) -> Break:
    def change(folder: Path) -> None:
        path = folder / "draft_vocab.safetensors"
        tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
        path.unlink()
        edit(tensors)
        save_file(tensors, path)

    return change


def swap_first_two(tensors: dict[str, torch.Tensor]) -> None:
    tensors["ids"][:2] = tensors["ids"][:2].flip(0)


def both(*changes: Break) -> Break:
    return lambda f: [change(f) for change in changes]


def sharded(change: Callable[[dict[str, str]], Any]) -> Break:
    def break_index(folder: Path) -> None:
        shard(folder)
        edit_json(folder / "release.json", files=folder_files(folder))
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        change(index["weight_map"])
        path.write_text(json.dumps(index))

    return break_index


def torch_archive(folder: Path) -> None:
    torch.save({"a": torch.zeros(1)}, folder / "extra")


def case_twins(folder: Path) -> None:
    (folder / "license").write_text("the same name elsewhere\n")
    if len([path for path in folder.iterdir() if path.name.lower() == "license"]) < 2:
        pytest.skip("this file system does not tell case apart")


def no_utf8(folder: Path) -> None:
    try:
        (folder / os.fsdecode(b"caf\xe9.txt")).write_text("x")
    except OSError:
        pytest.skip("this file system takes no such name")


def other_picture(path: Path) -> None:
    from matplotlib.figure import Figure

    Figure(figsize=(1, 1)).savefig(path)


def target_folder(folder: Path) -> None:
    """A release of a source whose recipe named a folder."""
    edit_json(folder / "config.json", target_model="/models/toy")
    edit_json(folder / "release.json", target_model="/models/toy")
    text = (folder / "README.md").read_text().replace("base_model: toy\n", "")
    (folder / "README.md").write_text(text)
    write_card(folder)
    refresh_record(folder, ["config.json"])


def rename_shard(name: str) -> Break:
    """An index that names a place for its first file which a Hub's readers do not look at."""
    return sharded(lambda m: m.update({key: name for key in m if m[key].startswith("model-00001")}))


def record(**changes: Any) -> Break:
    return lambda f: edit_json(f / "release.json", **changes)
