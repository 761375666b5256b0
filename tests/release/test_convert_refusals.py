"""`release convert` refuses what is no whole FlashMap drafter in one sentence, writing nothing."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import as_torch, write_speculators
from support.pair_folders import edit_json, edit_weights, truncate

from flashmap.release.convert import convert_checkpoint


def layer(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        raw = json.loads((folder / "config.json").read_text())
        raw["transformer_layer_config"].update(changes)
        (folder / "config.json").write_text(json.dumps(raw))

    return change


def config(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "config.json", **changes)


def weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    return lambda folder: edit_weights(folder, change)


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no folder": (lambda f: f.rename(f.with_name("gone")), "config.json"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json"),
    "another drafter": (config(speculators_model_type="eagle3"), "'eagle3'"),
    "no taps": (config(aux_hidden_state_layer_ids=None), "aux_hidden_state_layer_ids"),
    "taps from 0": (config(aux_hidden_state_layer_ids=[0, 1]), "counted from 1"),
    "no block size": (config(block_size=None), "without block_size"),
    "grids that are no list": (config(time_grids=5), "time_grids '5'"),
    "a bad grid": (config(time_grids=[[0.0, 1.0], [0.0, 2.0, 1.0]]), "jump_grids"),
    "no grids, no number of steps": (config(time_grids=None, num_steps="a"), "'a' steps"),
    "no grids, no list of steps": (config(time_grids=None, num_steps=[1]), "[1] steps"),
    "no grids, no vocabulary": (
        lambda f: [config(time_grids=None)(f), layer(vocab_size="x")(f)],
        "'x' tokens",
    ),
    "a draft vocabulary that is none": (config(draft_vocab_size=1.5), "draft_vocab_size 1.5"),
    "a draft vocabulary too large": (config(draft_vocab_size=10**30), f"size {10**30}"),
    "not an object": (config(speculators_config="x"), "speculators_config 'x'"),
    "another activation": (layer(hidden_act="silu"), "hidden_act 'silu'"),
    "grouped heads": (layer(num_key_value_heads=1), "num_key_value_heads 1"),
    "other heads": (layer(head_dim=64), "head_dim 64"),
    "scaled rope": (layer(rope_parameters={"rope_type": "yarn"}), "rope_type 'yarn'"),
    "other size": (layer(hidden_size=48, head_dim=None), "instead of"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "no weights"),
    "truncated": (lambda f: truncate(f / "model.safetensors"), "damaged"),
    "tensor missing": (weights(lambda t: t.pop("fc.weight")), "missing"),
    "two unknown": (
        weights(lambda t: t.update(y=torch.zeros(1), x=torch.zeros(1))),
        "2 tensors that this drafter has no place for: x, y",
    ),
    "quantised": (weights(lambda t: t.update(noise_gate=t["noise_gate"].int())), "noise_gate"),
    "not finite": (weights(lambda t: t["head.bias"].fill_(float("nan"))), "NaN"),
    "two torch files": (
        lambda f: [as_torch(f, lambda t: t, "a.pt"), (f / "b.pt").write_bytes(b"")],
        "name the file",
    ),
    "empty torch file": (
        lambda f: [(f / "model.safetensors").unlink(), (f / "a.pt").write_bytes(b"")],
        "unreadable",
    ),
    "cut torch file": (lambda f: truncate(as_torch(f, lambda t: t, "a.pt") / "a.pt"), "unreadable"),
    "pointer": (
        lambda f: [
            (f / "model.safetensors").unlink(),
            (f / "a.pt").write_text("version https://git-lfs.github.com/spec/v1\n"),
        ],
        "Git LFS pointer",
    ),
    "no tensors": (lambda f: as_torch(f, lambda t: {"a": 1}, "a.pt"), "no tensors by name"),
    "a list": (lambda f: as_torch(f, lambda t: list(t.values()), "a.pt"), "no tensors by name"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_checkpoint_is_refused(kind: str, tmp_path: Path) -> None:
    break_it, words = BROKEN[kind]
    source = write_speculators(tmp_path / "source")
    break_it(source)
    with pytest.raises(ValueError) as caught:
        convert_checkpoint(source, tmp_path / "out")
    assert words in str(caught.value)
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))
