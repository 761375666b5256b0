"""`release build`: complete, explicit, repeatable, and never at the cost of somebody's files."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from support.pair_folders import edit_json, edit_weights, shard, truncate, write_drafter

from flashmap.modeling.configuration_flashmap import FlashMapConfig
from flashmap.release import build as build_module
from flashmap.release.build import build_release
from flashmap.release.contents import folder_files
from flashmap.release.errors import ReleaseError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_drafter(tmp_path / "source")


def test_a_folder_is_complete(source: Path, tmp_path: Path) -> None:
    built = build_release(source, tmp_path / "out", tag="v1", repo_id="owner/name")
    names = {path.name for path in built.folder.iterdir()}
    code = {path.name for path in (ROOT / "modeling").glob("*_flashmap.py")}
    assert names == code | {
        "config.json",
        "model.safetensors",
        "README.md",
        "LICENSE",
        "release.json",
        "custom_generate",
    }
    assert not any(path.is_symlink() for path in built.folder.iterdir())
    for name in code - {"configuration_flashmap.py"}:
        assert (built.folder / name).read_bytes() == (ROOT / "modeling" / name).read_bytes()
    ours = (built.folder / "configuration_flashmap.py").read_text().splitlines()
    theirs = (ROOT / "modeling" / "configuration_flashmap.py").read_text().splitlines()
    changed = [(a, b) for a, b in zip(ours, theirs, strict=True) if a != b]
    assert [a for a, _ in changed] == [f'CODE_DIGEST = "{built.digest}"']
    record = json.loads((built.folder / "release.json").read_text())
    assert (record["tag"], record["repo_id"]) == ("v1", "owner/name")
    assert record["files"] == folder_files(built.folder)


def test_the_configuration_states_everything(source: Path, tmp_path: Path) -> None:
    edit_json(source / "config.json", target_vocab_hash="ab", max_position_embeddings=512, top_k=50)
    folder = build_release(source, tmp_path / "out").folder
    config = json.loads((folder / "config.json").read_text())
    fields = set(FlashMapConfig().to_diff_dict()) | {"time_scale", "layer_norm_eps", "num_steps"}
    assert fields - {"transformers_version"} <= config.keys()
    assert config["architectures"] == ["FlashMapDraftModel"]
    assert config["auto_map"]["AutoModel"] == "modeling_flashmap.FlashMapDraftModel"
    assert config["dtype"] == config["torch_dtype"] == "float32"
    assert config["num_key_value_heads"] * config["head_dim"] == config["hidden_size"]
    assert (config["target_vocab_hash"], config["max_position_embeddings"]) == ("ab", 512)
    assert "top_k" not in config


def test_two_builds_are_byte_identical(source: Path, tmp_path: Path) -> None:
    first, second = (build_release(source, tmp_path / name).folder for name in ("a", "b"))
    assert folder_files(first, record=True) == folder_files(second, record=True)


def test_building_again_changes_nothing(source: Path, tmp_path: Path) -> None:
    first = build_release(source, tmp_path / "out")
    stamp = (first.folder / "config.json").stat().st_mtime_ns
    assert first.changed and not build_release(source, tmp_path / "out").changed
    assert (first.folder / "config.json").stat().st_mtime_ns == stamp
    (source / "README.md").write_text("# Another card\n")
    assert build_release(source, tmp_path / "out").changed
    assert (first.folder / "README.md").read_text() == "# Another card\n"
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out"}


def test_shards_and_odd_tensors_become_one_plain_file(source: Path, tmp_path: Path) -> None:
    whole = build_release(source, tmp_path / "whole").folder
    shard(source)
    folder = build_release(source, tmp_path / "out").folder
    assert folder_files(folder) == folder_files(whole)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_shared_and_transposed_tensors_are_cloned(tmp_path: Path) -> None:
    base = torch.arange(6.0).view(2, 3)
    build_module._write_tensors(
        {"a": base, "tied": base, "t": base.t()}, tmp_path / "x.safetensors"
    )
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        assert file.get_tensor("t").equal(base.t()) and file.get_tensor("tied").equal(base)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("foreign folder", "1 files that no build wrote (thesis.txt)"),
        ("file added", "1 files that no build wrote (notes/thesis.txt)"),
        ("file edited", "1 files changed since the build (README.md)"),
        ("a file", "something that no build wrote"),
        ("broken record", "that no build wrote"),
    ],
)
def test_what_no_build_wrote_is_never_replaced(
    kind: str, words: str, source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    if kind == "foreign folder":
        out.mkdir()
        (out / "thesis.txt").write_text("years of work")
    elif kind == "a file":
        out.write_text("years of work")
    else:
        build_release(source, out)
    if kind == "file added":
        (out / "notes").mkdir()
        (out / "notes" / "thesis.txt").write_text("years of work")
    if kind == "file edited":
        (out / "README.md").write_text("years of work")
    if kind == "broken record":
        (out / "release.json").write_text("[]")
    before = folder_files(out, record=True) if out.is_dir() else out.read_text()
    (source / "README.md").write_text("# Another card\n")
    with pytest.raises(ReleaseError) as caught:
        build_release(source, out)
    assert caught.value.check == "out" and str(out) in caught.value.found
    assert words in caught.value.found
    assert before == (folder_files(out, record=True) if out.is_dir() else out.read_text())
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out"}


def test_an_empty_folder_is_filled_not_replaced(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.chdir(out)
    inode = out.stat().st_ino
    built = build_release(source, Path())
    assert out.stat().st_ino == inode and Path.cwd() == out == built.folder
    assert "release.json" in built.files and not build_release(source, Path()).changed
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out"}


def test_a_failed_move_leaves_an_empty_folder_empty(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, move = tmp_path / "out", shutil.move
    out.mkdir()

    def fail_for_the_record(source: Path, to: Path) -> object:
        if to.name == "release.json":
            raise OSError("disk gone")
        return move(source, to)

    monkeypatch.setattr(shutil, "move", fail_for_the_record)
    with pytest.raises(OSError, match="disk gone"):
        build_release(source, out)
    assert list(out.iterdir()) == []


def test_a_failed_rename_puts_the_old_build_back(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = build_release(source, tmp_path / "out").folder
    before = folder_files(out, record=True)
    (source / "README.md").write_text("# Another card\n")
    rename = Path.rename

    def fail_for_the_new_one(self: Path, to: Path) -> Path:
        if to == out and not self.name.endswith(".old"):
            raise OSError("disk gone")
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", fail_for_the_new_one)
    with pytest.raises(OSError, match="disk gone"):
        build_release(source, out)
    monkeypatch.undo()
    assert folder_files(out, record=True) == before
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out"}


def edit(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], Any]:
    return lambda folder: edit_weights(folder, change)


INCOMPLETE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "config"),
    "no taps": (lambda f: edit_json(f / "config.json", target_layer_ids=None), "config"),
    "other model": (lambda f: edit_json(f / "config.json", model_type="llama"), "config"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "weights"),
    "truncated": (lambda f: truncate(f / "model.safetensors"), "weights"),
    "missing shard": (lambda f: shard(f)[0].unlink(), "weights"),
    "index of numbers": (
        lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": 5}}'),
        "weights",
    ),
    "two dtypes": (edit(lambda t: t.update(noise_gate=t["noise_gate"].half())), "weights"),
    "tensor missing": (edit(lambda t: t.pop("fc.weight")), "weights"),
    "tensor unknown": (edit(lambda t: t.update(x=torch.zeros(1))), "weights"),
    "another shape": (edit(lambda t: t.update({"fc.weight": torch.zeros(3, 3)})), "weights"),
    "NaN": (edit(lambda t: t["head.bias"].fill_(float("nan"))), "finite"),
    "infinite": (edit(lambda t: t["head.bias"].fill_(float("inf"))), "finite"),
    "no card": (lambda f: (f / "README.md").unlink(), "card"),
}


@pytest.mark.parametrize("kind", INCOMPLETE)
def test_an_incomplete_source_is_refused(kind: str, source: Path, tmp_path: Path) -> None:
    break_it, check = INCOMPLETE[kind]
    break_it(source)
    with pytest.raises(ReleaseError) as caught:
        build_release(source, tmp_path / "out")
    assert caught.value.check == check
    assert not (tmp_path / "out").exists()
