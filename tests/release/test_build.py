"""`release build`: complete, explicit, repeatable, and never at the cost of somebody's files."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from support.pair_folders import edit_json, edit_weights, shard, truncate, write_drafter
from support.releases import check_statically, failures, run_build, write_source

from flashmap import FlashMapCache, FlashMapDraftModel
from flashmap.modeling.configuration_flashmap import FlashMapConfig
from flashmap.release import golden
from flashmap.release import weights as weights_module
from flashmap.release.build import build_release
from flashmap.release.contents import folder_files
from flashmap.release.errors import ReleaseError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_drafter(tmp_path / "source")


def test_a_folder_is_complete(source: Path, tmp_path: Path) -> None:
    built = build_release(source, tmp_path / "out", tag="v1", repo_id="owner/name")
    names = set(built.files)
    code = {path.name for path in (ROOT / "modeling").glob("*_flashmap.py")}
    assert names == code | {
        "config.json",
        "model.safetensors",
        "README.md",
        "LICENSE",
        "release.json",
        "custom_generate/generate.py",
        "custom_generate/requirements.txt",
        "eval/golden.json",
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
    assert (record["grid_mode"], record["target_revision"]) == ("exact", "0" * 40)
    assert record["versions"]["torch"] == torch.__version__
    assert record["files"] == folder_files(built.folder)


def test_the_configuration_states_everything(source: Path, tmp_path: Path) -> None:
    edit_json(
        source / "config.json",
        target_vocab_hash="ab",
        max_position_embeddings=512,
        draft_vocab_size=100,
        top_k=50,
    )
    folder = build_release(source, tmp_path / "out").folder
    config = json.loads((folder / "config.json").read_text())
    fields = set(FlashMapConfig().to_diff_dict()) | {"time_scale", "layer_norm_eps", "num_steps"}
    assert fields - {"transformers_version"} <= config.keys()
    assert config["architectures"] == ["FlashMapDraftModel"]
    assert config["auto_map"]["AutoModel"] == "modeling_flashmap.FlashMapDraftModel"
    assert config["dtype"] == config["torch_dtype"] == "float32"
    assert config["num_key_value_heads"] * config["head_dim"] == config["hidden_size"]
    assert (config["target_vocab_hash"], config["max_position_embeddings"]) == ("ab", 512)
    assert (config["draft_vocab_size"], config["num_target_layers"]) == (100, 3)
    assert "top_k" not in config
    edit_json(source / "config.json", draft_vocab_size=None, max_position_embeddings=None)
    folder = build_release(source, tmp_path / "out").folder
    config = json.loads((folder / "config.json").read_text())
    assert config["draft_vocab_size"] == config["vocab_size"]
    assert config["max_position_embeddings"] == 131072


def test_what_lies_beside_the_weights_comes_along(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source")
    out = build_release(source, tmp_path / "out").folder
    same = {"draft_vocab.safetensors", "recipe.toml", "eval/acceptance.json"}
    assert all((out / name).read_bytes() == (source / name).read_bytes() for name in same)
    prompts = (source / "prompts.jsonl").read_bytes()
    assert (out / "eval/prompts.jsonl").read_bytes() == prompts
    again = build_release(out, tmp_path / "again").folder  # a release is a source too
    assert folder_files(again, record=True) == folder_files(out, record=True)


def test_golden_outputs_are_what_the_drafter_says(source: Path, tmp_path: Path) -> None:
    out = build_release(source, tmp_path / "out").folder
    document = json.loads((out / "eval/golden.json").read_text())
    model = FlashMapDraftModel.from_pretrained(out)
    config = model.config
    width, tokens = config.target_hidden_size, 2 * config.target_hidden_size
    config.vocab_size = tokens
    embed = torch.nn.Embedding.from_pretrained(golden.hashed("embedding", tokens, width))
    head = torch.nn.Linear(width, tokens, bias=False)
    head.weight.data = golden.hashed("head", tokens, width)
    cache = FlashMapCache(config, 1, golden.CONTEXT + 1)
    model.extend_context(cache, golden.hashed("features", 1, golden.CONTEXT, 2 * width))
    noise = 2.0 * golden.hashed("noise", 1, config.block_size, tokens)
    with torch.no_grad():
        for steps, rows in document["logits"].items():
            logits = model.draft(torch.tensor([1]), cache, embed, head, int(steps), noise)
            assert (logits[0, :, : golden.COLUMNS] - torch.tensor(rows)).abs().max() < 1e-4
    assert document["logits"].keys() == {"1", "2"} and document["tolerance"] == 1e-4


def test_golden_inputs_are_fixed_numbers_spread_evenly() -> None:
    # An own statement of the rule, in Python's integers.
    def value(name: str, place: int) -> float:
        x = place + 1 + 1000003 * sum(name.encode())
        for _ in range(2):
            x = ((x ^ (x >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
        return (x ^ (x >> 16)) / 2**31 - 1.0

    found = golden.hashed("noise", 100, 50).flatten()
    assert found[:20].tolist() == pytest.approx([value("noise", i) for i in range(20)], abs=1e-7)
    assert abs(float(found.mean())) < 0.03 and float(found.std()) == pytest.approx(
        3**-0.5, rel=0.03
    )
    assert not golden.hashed("head", 9).equal(golden.hashed("embedding", 9))


@pytest.mark.parametrize(
    ("golden_rows", "found"),
    [([[1.0, 2.0]], 0.5), ([[1.0]], None), ([[1.0, float("nan")]], None)],
)
def test_a_difference_is_relative_to_the_largest(
    golden_rows: list[list[float]], found: float | None
) -> None:
    assert golden.difference({"1": [[1.0, 1.0]]}, {"1": golden_rows}) == found
    assert golden.difference({"1": [[1.0]]}, {"2": [[1.0]]}) is None


def test_two_builds_are_byte_identical(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_source(tmp_path / "source")
    first = build_release(source, tmp_path / "a").folder
    moved = Path(shutil.copytree(source, tmp_path / "elsewhere" / "source"))
    for path in moved.rglob("*"):
        os.utime(path, (1, 1))
    other = {"LC_ALL": "C", "TZ": "Asia/Tokyo", "PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "2"}
    done = run_build("import os; os.umask(0o077)", moved, tmp_path / "b", **other)
    assert done.returncode == 0, done.stderr
    assert folder_files(first, record=True) == folder_files(tmp_path / "b", record=True)
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "b").rglob("*") if path.is_file()}
    assert modes == {0o644}


def test_building_again_changes_nothing(source: Path, tmp_path: Path) -> None:
    first = build_release(source, tmp_path / "out")
    stamp = (first.folder / "config.json").stat().st_mtime_ns
    assert first.changed and not build_release(source, tmp_path / "out").changed
    assert (first.folder / "config.json").stat().st_mtime_ns == stamp
    (source / "README.md").write_text("# Another card\n")
    assert build_release(source, tmp_path / "out").changed
    assert "\n# Another card\n" in (first.folder / "README.md").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out"}


def test_shards_and_odd_tensors_become_one_plain_file(source: Path, tmp_path: Path) -> None:
    whole = build_release(source, tmp_path / "whole").folder
    shard(source)
    folder = build_release(source, tmp_path / "out").folder
    assert folder_files(folder) == folder_files(whole)
    assert failures(check_statically(folder)) == {}
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_weights_above_a_size_are_split(source: Path, tmp_path: Path) -> None:
    whole = load_file(build_release(source, tmp_path / "whole").folder / "model.safetensors")
    folder = build_release(source, tmp_path / "out", max_shard_size="20KB").folder
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(shards) > 1 and set(index["weight_map"].values()) == set(shards)
    found = {name: t for shard in shards for name, t in load_file(folder / shard).items()}
    assert found.keys() == whole.keys() and all(found[name].equal(whole[name]) for name in whole)
    assert failures(check_statically(folder)) == {}
    model = FlashMapDraftModel.from_pretrained(folder)
    assert all(tensor.equal(whole[name]) for name, tensor in model.state_dict().items())
    # Back to one file: no shard of the earlier build stays.
    build_release(source, folder)
    assert [path.name for path in folder.glob("*.safetensors*")] == ["model.safetensors"]
    with pytest.raises(ReleaseError, match="'a lot'"):
        build_release(source, folder, max_shard_size="a lot")


def test_shared_and_transposed_tensors_are_cloned(tmp_path: Path) -> None:
    base = torch.arange(6.0).view(2, 3)
    tensors = {"a": base, "tied": base, "view": base[1], "t": base.t()}
    weights_module.write_weights(tensors, tmp_path, "5GB")
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == tensors.keys()
    assert all(found[name].equal(tensor) for name, tensor in tensors.items())


FP8 = torch.float8_e4m3fn


def edit(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], Any]:
    return lambda folder: edit_weights(folder, change)


INCOMPLETE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "files"),
    "no taps": (lambda f: edit_json(f / "config.json", target_layer_ids=None), "config"),
    "other model": (lambda f: edit_json(f / "config.json", model_type="llama"), "config"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "weight-files"),
    "truncated": (lambda f: truncate(f / "model.safetensors"), "weight-files"),
    "missing shard": (lambda f: shard(f)[0].unlink(), "weight-files"),
    "index of numbers": (
        lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": 5}}'),
        "weight-files",
    ),
    "whole numbers": (edit(lambda t: t.update({n: v.char() for n, v in t.items()})), "dtype"),
    "eight bits": (edit(lambda t: t.update({n: v.to(FP8) for n, v in t.items()})), "dtype"),
    "a size of the draft vocabulary that is none": (
        lambda f: edit_json(f / "config.json", draft_vocab_size=[99]),
        "draft-vocab",
    ),
    "a file": (lambda f: [shutil.rmtree(f), f.write_text("x")], "source"),
    "two dtypes": (edit(lambda t: t.update(noise_gate=t["noise_gate"].half())), "dtype"),
    "tensor missing": (edit(lambda t: t.pop("fc.weight")), "weights"),
    "tensor unknown": (edit(lambda t: t.update(x=torch.zeros(1))), "weights"),
    "another shape": (edit(lambda t: t.update({"fc.weight": torch.zeros(3, 3)})), "weights"),
    "NaN": (edit(lambda t: t["head.bias"].fill_(float("nan"))), "finite"),
    "infinite": (edit(lambda t: t["head.bias"].fill_(float("inf"))), "finite"),
    "a card with half a part": (
        lambda f: (f / "README.md").write_text("<!-- flashmap:begin usage -->\n"),
        "card-sections",
    ),
    "a recipe that is no TOML": (lambda f: (f / "recipe.toml").write_text("[run"), "eval"),
    "another picture": (lambda f: (f / "acceptance.png").write_bytes(b"x"), "picture"),
    "a measurement that is none": (
        lambda f: [(f / "eval").mkdir(), (f / "eval/x.json").write_text("{}")],
        "eval",
    ),
}


@pytest.mark.parametrize(
    ("asked", "check"),
    [
        ({"repo_id": "me"}, "repo-id"),
        ({"repo_id": "me/a b"}, "repo-id"),
        ({"repo_id": ""}, "repo-id"),
        ({"tag": "v 1"}, "tag"),
        ({"tag": ""}, "tag"),
        ({"max_shard_size": "-1GB"}, "weights"),
        ({"max_shard_size": "0GB"}, "weights"),
    ],
)
def test_what_no_hub_takes_is_refused(
    asked: dict[str, Any], check: str, source: Path, tmp_path: Path
) -> None:
    with pytest.raises(ReleaseError) as caught:
        build_release(source, tmp_path / "out", **asked)
    assert caught.value.check == check and str(next(iter(asked.values()))) in caught.value.found
    assert not (tmp_path / "out").exists()


def test_the_root_of_a_disk_is_refused(source: Path) -> None:
    with pytest.raises(ReleaseError, match=r"^out: found --out /; expected a folder below it"):
        build_release(source, Path("/"))


def test_a_finding_about_the_source_names_no_scratch_folder(source: Path, tmp_path: Path) -> None:
    (source / "recipe.toml").write_text("[run")
    with pytest.raises(ReleaseError, match=r"found recipe\.toml unreadable"):
        build_release(source, tmp_path / "out")


@pytest.mark.parametrize("kind", INCOMPLETE)
def test_an_incomplete_source_is_refused(kind: str, source: Path, tmp_path: Path) -> None:
    break_it, check = INCOMPLETE[kind]
    break_it(source)
    with pytest.raises(ReleaseError) as caught:
        build_release(source, tmp_path / "out")
    assert caught.value.check == check
    assert not (tmp_path / "out").exists()
