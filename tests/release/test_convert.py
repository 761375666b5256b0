"""`release convert`: checkpoints of other forms become sources that draft the same logits."""

import json
import os
import resource
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import toys
from support.checkpoints import MEMBERS, as_torch, write_speculators
from support.pair_folders import ROWS, edit_json, edit_weights, shard, write_drafter

from flashmap import FlashMapCache, FlashMapDraftModel
from flashmap.release.build import build_release
from flashmap.release.convert import convert_checkpoint
from flashmap.release.errors import ReleaseError
from flashmap.schedule import jump_grids


def logits(drafter: Any, num_steps: int) -> torch.Tensor:
    """What a drafter drafts after a fixed context, with fixed noise."""
    chance = torch.Generator().manual_seed(0)
    config = drafter.config

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=chance).to(drafter.dtype)

    width = config.target_hidden_size
    embedding, head = torch.nn.Embedding(ROWS, width), torch.nn.Linear(width, ROWS, bias=False)
    embedding.weight.data, head.weight.data = normal(ROWS, width), normal(ROWS, width)
    cache = FlashMapCache(config, 1, 32, dtype=drafter.dtype)
    drafter.extend_context(cache, normal(1, 5, width * len(config.target_layer_ids)))
    noise = normal(1, config.block_size, ROWS).float()
    with torch.no_grad():
        out: torch.Tensor = drafter.draft(
            torch.tensor([7]), cache, embedding, head, num_steps, noise=noise
        )
    return out


def assert_same_drafter(folder: Path, original: Any) -> None:
    """The folder loads and drafts bit for bit as `original`, in one jump and in several."""
    loaded = FlashMapDraftModel.from_pretrained(folder, dtype="auto")
    for num_steps in map(int, original.config.jump_grids):
        assert logits(loaded, num_steps).equal(logits(original, num_steps))


UNUSUAL: dict[str, Any] = {
    "rope_theta": 5000.0,
    "time_scale": 500.0,
    "qk_norm_eps": 1e-4,
    "layer_norm_eps": 1e-3,
    "rms_norm_eps": 1e-2,
    "noise_gate": "constant",
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_speculators_checkpoint_gives_the_same_logits(dtype: torch.dtype, tmp_path: Path) -> None:
    source = write_speculators(tmp_path / "source", dtype, **UNUSUAL)
    done = convert_checkpoint(source, tmp_path / "out")
    original = toys.drafter(vocab_size=ROWS, **UNUSUAL).to(dtype)
    assert_same_drafter(done.folder, original)
    config = json.loads((done.folder / "config.json").read_text())
    for name in (*UNUSUAL, "target_layer_ids", "block_size", "jump_grids", "num_steps"):
        assert config[name] == getattr(original.config, name)
    assert config["target_model"] == done.target_model == "org/target"
    assert config["max_position_embeddings"] == 777
    assert done.dropped == ["embed_tokens.weight", "lm_head.weight"]
    assert (done.derived, done.unplaced) == ([], [])


def test_its_tables_become_a_ranking(tmp_path: Path) -> None:
    source = write_speculators(tmp_path / "source")
    done = convert_checkpoint(source, tmp_path / "out")
    assert json.loads((done.folder / "config.json").read_text())["draft_vocab_size"] == 7
    ranking = load_file(done.folder / "draft_vocab.safetensors")
    assert ranking["ids"][:7].sort().values.tolist() == MEMBERS
    assert sorted(ranking["ids"].tolist()) == list(range(ROWS))
    assert ranking["counts"].tolist() == [1] * 7 + [0] * (ROWS - 7)


def test_the_result_is_a_source_for_the_build(tmp_path: Path) -> None:
    source = write_speculators(tmp_path / "source")
    converted = convert_checkpoint(source, tmp_path / "converted").folder
    built = build_release(converted, tmp_path / "built").folder
    assert_same_drafter(built, toys.drafter(vocab_size=ROWS))


# --- torch's own files


def prefixed(prefix: str) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda tensors: {prefix + name: tensor for name, tensor in tensors.items()}


WRAPPED: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str, list[str]]] = {
    "bare": (lambda t: t, "pytorch_model.bin", []),
    "ordered": (lambda t: OrderedDict(t), "weights.pt", []),
    "wrapped": (
        lambda t: {"state_dict": t, "epoch": 3, "optimizer": {"lr": 1.0}},
        "last.pth",
        ["epoch", "optimizer"],
    ),
    "twice": (lambda t: {"model": {"module": t}, "args": [1]}, "a.pt", ["args"]),
    "parallel": (prefixed("module."), "a.pt", []),
    "compiled": (prefixed("_orig_mod."), "a.bin", []),
    "inside another": (
        lambda t: prefixed("model.drafter.")(t) | {"model.loss.scale": torch.ones(1)},
        "a.bin",
        ["model.loss.scale"],
    ),
}


@pytest.mark.parametrize("kind", WRAPPED)
def test_torch_files_in_every_wrapping(kind: str, tmp_path: Path) -> None:
    wrap, name, unplaced = WRAPPED[kind]
    source = write_drafter(tmp_path / "source")
    original = FlashMapDraftModel.from_pretrained(source)
    done = convert_checkpoint(as_torch(source, wrap, name), tmp_path / "out")
    assert_same_drafter(done.folder, original)
    assert done.unplaced == unplaced
    assert (done.folder / "README.md").read_bytes() == (source / "README.md").read_bytes()
    again = convert_checkpoint(source / name, tmp_path / "again")  # the file instead of the folder
    for file in done.files:
        assert (again.folder / file).read_bytes() == (done.folder / file).read_bytes()


def test_torch_shards(tmp_path: Path) -> None:
    source = write_drafter(tmp_path / "source")
    original = FlashMapDraftModel.from_pretrained(source)
    for path in shard(source):
        torch.save(load_file(path), path.with_suffix(".bin"))
        path.unlink()
    index = (source / "model.safetensors.index.json").read_text()
    (source / "pytorch_model.bin.index.json").write_text(index.replace(".safetensors", ".bin"))
    (source / "model.safetensors.index.json").unlink()
    done = convert_checkpoint(source, tmp_path / "out")
    assert_same_drafter(done.folder, original)
    (source / "model-00002-of-00002.bin").unlink()
    with pytest.raises(ReleaseError, match=r"1 of 2 shards missing \(model-00002-of-00002\.bin\)"):
        convert_checkpoint(source, tmp_path / "other")


def test_shared_transposed_and_mixed_tensors_become_plain_ones(tmp_path: Path) -> None:
    def odd(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tied = "layers.0.self_attn.q_proj.weight", "layers.1.self_attn.q_proj.weight"
        tensors[tied[1]] = tensors[tied[0]]
        name = "layers.0.mlp.fc1.weight"
        tensors[name] = tensors[name].t().contiguous().t()
        stacked = torch.stack([tensors["state_norm.weight"], tensors["noise_norm.weight"]])
        tensors["state_norm.weight"], tensors["noise_norm.weight"] = stacked
        tensors["noise_gate"] = tensors["noise_gate"].bfloat16()
        return {name: torch.nn.Parameter(tensor) for name, tensor in tensors.items()}

    source = as_torch(write_drafter(tmp_path / "source"), odd, "a.pt")
    wanted = torch.load(source / "a.pt", weights_only=True)
    done = convert_checkpoint(source, tmp_path / "out")
    found = load_file(done.folder / "model.safetensors")
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == torch.float32 and found[name].equal(tensor.detach().float())


class Bomb:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_code_in_a_torch_file_is_not_run(tmp_path: Path) -> None:
    source = as_torch(
        write_drafter(tmp_path / "source"), lambda t: {**t, "x": Bomb(tmp_path / "mark")}, "a.pt"
    )
    with pytest.raises(ReleaseError, match="would run code"):
        convert_checkpoint(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


# --- what is not stated


def test_sizes_come_from_the_tensors_and_grids_from_the_vocabulary(tmp_path: Path) -> None:
    source = write_speculators(tmp_path / "source")
    raw = json.loads((source / "config.json").read_text())
    layer = raw["transformer_layer_config"]
    gone = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    for name in (*gone, "num_key_value_heads", "head_dim", "hidden_act"):
        del layer[name]
    for name in ("timestep_embed_dim", "timestep_frequency_dim", "target_hidden_size"):
        del raw[name]
    raw["time_grids"] = None
    (source / "config.json").write_text(json.dumps(raw))
    done = convert_checkpoint(source, tmp_path / "out")
    names = {*gone, "cond_dim", "time_embed_dim", "target_hidden_size", "jump_grids"}
    assert done.derived == sorted(names)
    config = json.loads((done.folder / "config.json").read_text())
    assert config["jump_grids"] == jump_grids(ROWS, 4, "compat")
    original = toys.drafter(vocab_size=ROWS, jump_grids=config["jump_grids"])
    assert_same_drafter(done.folder, original)


def test_fields_without_a_place_are_named(tmp_path: Path) -> None:
    source = write_speculators(tmp_path / "source")
    raw = json.loads((source / "config.json").read_text())
    raw["transformer_layer_config"]["use_cache"] = True
    edit_json(source / "config.json", **{**raw, "logit_bias": 0.5, "sampler": {"a": 1}})
    done = convert_checkpoint(source, tmp_path / "out")
    assert done.unplaced == ["logit_bias", "sampler", "transformer_layer_config.use_cache"]
    ours = write_drafter(tmp_path / "ours")
    edit_json(ours / "config.json", target_revision="abc", my_note="x")
    done = convert_checkpoint(ours, tmp_path / "other")
    assert done.unplaced == ["my_note"]
    assert json.loads((done.folder / "config.json").read_text())["target_revision"] == "abc"


def test_the_target_can_be_given(tmp_path: Path) -> None:
    source = write_speculators(tmp_path / "source")
    edit_json(source / "config.json", speculators_config=None)
    with pytest.raises(ReleaseError, match=r"without target_model.*give --target"):
        convert_checkpoint(source, tmp_path / "out")
    done = convert_checkpoint(source, tmp_path / "out", target="me/it")
    assert done.target_model == "me/it"


# --- draft vocabularies


def with_tables(**tables: torch.Tensor | None) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        def edit(tensors: dict[str, torch.Tensor]) -> None:
            for name, table in tables.items():
                del tensors[name]
                if table is not None:
                    tensors[name] = table

        edit_weights(folder, edit)

    return change


OFFSETS = torch.tensor(MEMBERS) - torch.arange(len(MEMBERS))


@pytest.mark.parametrize(
    "change",
    [
        with_tables(t2d=None),
        with_tables(d2t=None),
        with_tables(d2t=torch.tensor(MEMBERS)),  # ids instead of offsets
        lambda folder: edit_json(folder / "config.json", draft_vocab_size=None),
    ],
)
def test_one_table_is_enough(change: Callable[[Path], None], tmp_path: Path) -> None:
    source = write_speculators(tmp_path / "source")
    change(source)
    done = convert_checkpoint(source, tmp_path / "out")
    ranking = load_file(done.folder / "draft_vocab.safetensors")
    assert ranking["ids"][:7].tolist() == MEMBERS
    assert json.loads((done.folder / "config.json").read_text())["draft_vocab_size"] == 7


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (with_tables(t2d=None, d2t=torch.zeros(7, dtype=torch.int64)), "d2t all zero"),
        (with_tables(t2d=None, d2t=OFFSETS.flip(0)), "do not rise within the vocabulary"),
        (with_tables(t2d=None, d2t=OFFSETS + 1), "do not rise within the vocabulary"),
        (with_tables(d2t=OFFSETS + 1), "name different tokens"),
        (with_tables(t2d=None, d2t=OFFSETS[:6]), "6 tokens, draft_vocab_size 7"),
        (with_tables(t2d=None, d2t=None), "flashmap release vocab --target org/target"),
    ],
)
def test_tables_that_mean_nothing_are_refused(
    change: Callable[[Path], None], words: str, tmp_path: Path
) -> None:
    source = write_speculators(tmp_path / "source")
    change(source)
    with pytest.raises(ReleaseError) as caught:
        convert_checkpoint(source, tmp_path / "out")
    assert caught.value.check == "draft-vocab" and words in str(caught.value)


def test_the_whole_vocabulary_needs_no_tables(tmp_path: Path) -> None:
    source = write_speculators(tmp_path / "source")
    with_tables(t2d=None, d2t=torch.zeros(ROWS, dtype=torch.int64))(source)
    edit_json(source / "config.json", draft_vocab_size=ROWS)
    done = convert_checkpoint(source, tmp_path / "out")
    assert "draft_vocab.safetensors" not in done.files


def test_a_ranking_beside_the_weights_is_kept(tmp_path: Path) -> None:
    source = write_drafter(tmp_path / "source")
    edit_json(source / "config.json", draft_vocab_size=9)
    (source / "draft_vocab.safetensors").write_bytes(b"a ranking")
    done = convert_checkpoint(source, tmp_path / "out")
    assert (done.folder / "draft_vocab.safetensors").read_bytes() == b"a ranking"


# --- the folder written


def test_what_is_there_is_never_replaced(tmp_path: Path) -> None:
    source, out = write_drafter(tmp_path / "source"), tmp_path / "out"
    out.mkdir()
    convert_checkpoint(source, out)  # empty
    (out / "config.json").write_text("edited")
    with pytest.raises(ReleaseError, match="with something in it"):
        convert_checkpoint(source, out)
    assert (out / "config.json").read_text() == "edited"


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    source, out = write_drafter(tmp_path / "source"), tmp_path / "out"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        with pytest.raises(ReleaseError, match=r"out cannot be written .*it is as it was before"):
            convert_checkpoint(source, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == [source]
