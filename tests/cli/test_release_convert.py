"""`release convert` at the command line."""

import json
from pathlib import Path

from support.checkpoints import write_speculators
from support.commands import Run, assert_one_message
from support.pair_folders import edit_json


def test_convert(tmp_path: Path, run: Run) -> None:
    source = write_speculators(tmp_path / "source")
    edit_json(source / "config.json", my_note="x", time_grids=None)
    ended = run("release", "convert", source, "--out", tmp_path / "a", "--json")
    document = json.loads(ended.out)
    assert ended.status == 0
    assert list(document) == [
        "folder", "files", "target_model", "unread", "unfilled", "derived", "dropped", "unplaced",
        "failing",
    ]  # fmt: skip
    owed = ["num_target_layers", "target_revision", "target_vocab_hash"]
    assert (document["unread"], document["unfilled"]) == ("", owed)
    assert document["files"] == sorted(path.name for path in (tmp_path / "a").iterdir())
    assert document["unplaced"] == ["my_note"]
    ended = run("release", "convert", source, "--out", tmp_path / "b", "--target", "me/it")
    assert ended.status == 0 and "for me/it" in ended.out
    assert "not stated, taken from weights or target, or computed: jump_grids" in ended.out
    assert "left out, the target's own: lm_head.weight" in ended.out
    placed, filled = ended.err.splitlines()
    assert placed == "no place for: my_note"
    assert all(name in filled for name in owed)


def test_bad_input(tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out"
    assert_one_message(run("release", "convert", tmp_path / "gone", "--out", out), "gone")
    source = write_speculators(tmp_path / "source")
    (source / "model.safetensors").unlink()
    assert_one_message(run("release", "convert", source, "--out", out), "no weights", source)
    assert not out.exists()
