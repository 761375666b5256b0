"""A tiny target with a tokenizer and a tiny drafter, as folders on disk, and ways to break them."""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from flashmap.pair import vocabulary_hash
from flashmap.schedule import jump_times

from . import toys

SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
TOKENS = 256 + len(SPECIAL)
ROWS = 264  # some padding, as real embeddings have


def tokenizer(tokens: int = TOKENS, template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer without merges, whose first ids are special; `tokens` cuts or extends
    its vocabulary."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*SPECIAL, *letters, *(f"extra{i}" for i in range(max(0, tokens - TOKENS)))][:tokens]
    core = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(SPECIAL)
    result = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=SPECIAL[0], pad_token=SPECIAL[0]
    )
    result.model_input_names = ["input_ids", "attention_mask"]
    result.chat_template = template
    return result


def write_target(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """A tiny Llama with its tokenizer."""
    model = toys.llama(
        **{"vocab_size": ROWS, "bos_token_id": 1, "eos_token_id": 0, "pad_token_id": 0, **changes}
    )
    model.to(dtype).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@cache
def _grids() -> dict[str, list[float]]:
    """Jump grids that belong to a vocabulary of so many rows."""
    return {str(n): jump_times([i / n for i in range(n + 1)], ROWS) for n in range(1, 5)}


def write_drafter(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """A tiny drafter for that target, with a card, and with what a release has to state of both."""
    facts = {
        "vocab_size": ROWS,
        "jump_grids": _grids(),
        "num_target_layers": 3,
        "target_revision": "0" * 40,
        "target_vocab_hash": vocabulary_hash(tokenizer()),
    }
    toys.drafter(**{**facts, **changes}).to(dtype).save_pretrained(folder)
    (folder / "README.md").write_text("---\nlicense: mit\n---\n\n# A tiny drafter\n")
    return folder


def write_pair(folder: Path) -> Path:
    """Both, as target/ and draft/ of a folder."""
    write_target(folder / "target")
    write_drafter(folder / "draft")
    return folder


def edit_json(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file; None removes one."""
    value = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: item for key, item in value.items() if item is not None}))


def edit_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Rewrite model.safetensors after `edit` has changed the tensors in place."""
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    edit(tensors)
    path.unlink()
    save_file(tensors, path, metadata={"format": "pt"})


def shard(folder: Path) -> list[Path]:
    """Split model.safetensors into two files with an index."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    halves = [names[::2], names[1::2]]
    files = [folder / f"model-0000{i + 1}-of-00002.safetensors" for i in range(2)]
    for half, file in zip(halves, files, strict=True):
        save_file({name: tensors[name].clone() for name in half}, file, metadata={"format": "pt"})
    weight_map = {
        name: file.name for half, file in zip(halves, files, strict=True) for name in half
    }
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()
    return files


def truncate(path: Path) -> None:
    """Keep the first two thirds of a file, as a broken download does."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 2 // 3])


def copy_pair(source: Path, folder: Path) -> tuple[Path, Path]:
    """A copy of a pair's two folders, to be broken."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    return folder / "target", folder / "draft"


# What a user can get wrong about a pair: what breaks it, and words that the one message has to say.
Breaker = Callable[[Path, Path], Any]


def _nan(tensors: dict[str, torch.Tensor]) -> None:
    next(iter(tensors.values())).view(-1)[1] = float("nan")


def _without_one(tensors: dict[str, torch.Tensor]) -> None:
    tensors.pop(sorted(tensors)[0])


def _with_another(tensors: dict[str, torch.Tensor]) -> None:
    tensors["leftover.weight"] = torch.zeros(2)


def _wrong_shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["fc.weight"] = torch.zeros(3, 3)


def _pointer(path: Path) -> None:
    path.unlink()
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")


BROKEN_PAIRS: dict[str, tuple[Breaker, list[str]]] = {
    "missing target folder": (lambda t, d: shutil.rmtree(t), ["target", "no folder"]),
    "missing drafter folder": (lambda t, d: shutil.rmtree(d), ["drafter", "no folder"]),
    "no config": (lambda t, d: (d / "config.json").unlink(), ["draft", "config.json"]),
    "config is not JSON": (
        lambda t, d: (d / "config.json").write_text("{"),
        ["config.json", "JSON"],
    ),
    "no target_layer_ids": (
        lambda t, d: edit_json(d / "config.json", target_layer_ids=None),
        ["target_layer_ids"],
    ),
    "grid goes back": (
        lambda t, d: edit_json(
            d / "config.json", jump_grids={"1": [0.0, 1.0], "2": [0.0, 1.5, 1.0]}
        ),
        ["config.json", "jump_grids"],
    ),
    "hidden_size is a word": (
        lambda t, d: edit_json(t / "config.json", hidden_size="abc"),
        ["target", "cannot be loaded", "got str"],
    ),
    "no attention heads": (
        lambda t, d: edit_json(
            t / "config.json", num_attention_heads=0, num_key_value_heads=0, head_dim=None
        ),
        ["target", "cannot be loaded"],
    ),
    "unknown kind of RoPE": (
        lambda t, d: edit_json(
            t / "config.json",
            rope_parameters={"rope_type": "moebius", "rope_theta": 1e4, "factor": 2.0},
            rope_scaling={"rope_type": "moebius", "factor": 2.0},
        ),
        ["target", "cannot be loaded", "moebius"],
    ),
    "index of numbers": (
        lambda t, d: (t / "model.safetensors.index.json").write_text('{"weight_map": {"a": 5}}'),
        ["target", "model.safetensors.index.json", "5"],
    ),
    "drafter's hidden_size is a word": (
        lambda t, d: edit_json(d / "config.json", hidden_size="abc"),
        ["draft", "config.json", "hidden_size"],
    ),
    "truncated target": (lambda t, d: truncate(t / "model.safetensors"), ["target", "cut short"]),
    "truncated drafter": (lambda t, d: truncate(d / "model.safetensors"), ["draft", "cut short"]),
    "empty weights": (
        lambda t, d: (d / "model.safetensors").write_bytes(b""),
        ["draft", "cut short"],
    ),
    "no weights": (lambda t, d: (t / "model.safetensors").unlink(), ["target", "missing"]),
    "missing shard": (lambda t, d: shard(t)[1].unlink(), ["1 of 2", "00002-of-00002"]),
    "truncated shard": (lambda t, d: truncate(shard(t)[0]), ["00001-of-00002", "cut short"]),
    "Git LFS pointer": (lambda t, d: _pointer(d / "model.safetensors"), ["git lfs pull"]),
    "NaN in the drafter": (lambda t, d: edit_weights(d, _nan), ["draft", "NaN"]),
    "NaN in the target": (lambda t, d: edit_weights(t, _nan), ["target", "NaN"]),
    "tensor missing": (lambda t, d: edit_weights(d, _without_one), ["missing"]),
    "target tensor missing": (lambda t, d: edit_weights(t, _without_one), ["target", "missing"]),
    "tensor left over": (lambda t, d: edit_weights(d, _with_another), ["leftover.weight"]),
    "wrong shape": (lambda t, d: edit_weights(d, _wrong_shape), ["fc.weight"]),
    "larger vocabulary": (
        lambda t, d: write_drafter(d, vocab_size=ROWS + 40),
        [str(ROWS + 40), str(ROWS)],
    ),
    "another width": (
        lambda t, d: write_drafter(d, target_hidden_size=32),
        ["32", str(toys.WIDTH)],
    ),
    "tap past the last layer": (lambda t, d: write_drafter(d, target_layer_ids=[0, 7]), ["7"]),
    "larger tokenizer": (
        lambda t, d: tokenizer(ROWS + 100).save_pretrained(t),
        ["tokenizer", "another model family"],
    ),
    "smaller tokenizer": (
        lambda t, d: tokenizer(90).save_pretrained(t),
        ["tokenizer", "another model family"],
    ),
    "other words in the tokenizer": (
        lambda t, d: edit_json(d / "config.json", target_vocab_hash="0" * 64),
        ["target_vocab_hash"],
    ),
    "no tokenizer": (lambda t, d: [f.unlink() for f in t.glob("tokenizer*")], ["tokenizer"]),
    "a drafter as target": (
        lambda t, d: [shutil.rmtree(t), shutil.copytree(d, t)],
        ["target"],
    ),
    "a target as drafter": (
        lambda t, d: [shutil.rmtree(d), shutil.copytree(t, d)],
        ["draft", "'llama'"],
    ),
}
