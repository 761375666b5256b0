"""Weights have the interchange format's names and shapes; folders load equal, whole or in part."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import golden, toys
from torch import Tensor

from flashmap import FlashMapConfig, FlashMapDraftModel


def expected_shapes(config: FlashMapConfig) -> dict[str, tuple[int, ...]]:
    """The table of the interchange format."""
    hidden, width, cond = config.hidden_size, config.target_hidden_size, config.cond_dim
    inner, head = config.intermediate_size, config.hidden_size // config.num_attention_heads
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(config.target_layer_ids) * width),
        "hidden_norm.weight": (hidden,), "anchor_norm.weight": (hidden,),
        "state_norm.weight": (width,), "noise_norm.weight": (width,), "noise_gate": (1,),
        "anchor_proj.weight": (hidden, width), "anchor_proj.bias": (hidden,),
        "x_embed.weight": (hidden, width), "x_embed.bias": (hidden,),
        "head.weight": (width, hidden), "head.bias": (width,),
        "final_adaln.linear.weight": (3 * hidden, cond), "final_adaln.linear.bias": (3 * hidden,),
    }  # fmt: skip
    for embed in ("time_embed", "jump_embed"):
        shapes |= {
            f"{embed}.linear_1.weight": (cond, config.time_embed_dim),
            f"{embed}.linear_1.bias": (cond,),
            f"{embed}.linear_2.weight": (cond, cond),
            f"{embed}.linear_2.bias": (cond,),
        }
    for number in range(config.num_hidden_layers):
        layer = f"layers.{number}"
        for norm in ("self_attn_adaln", "cross_attn_adaln", "mlp_adaln"):
            shapes[f"{layer}.{norm}.linear.weight"] = (3 * hidden, cond)
            shapes[f"{layer}.{norm}.linear.bias"] = (3 * hidden,)
        for attention in ("self_attn", "cross_attn"):
            for projection in "qkvo":
                shapes[f"{layer}.{attention}.{projection}_proj.weight"] = (hidden, hidden)
            for norm in "qk":
                shapes[f"{layer}.{attention}.{norm}_norm.weight"] = (head,)
        shapes |= {
            f"{layer}.mlp.fc1.weight": (inner, hidden), f"{layer}.mlp.fc1.bias": (inner,),
            f"{layer}.mlp.fc2.weight": (hidden, inner), f"{layer}.mlp.fc2.bias": (hidden,),
        }  # fmt: skip
    return shapes


def on_meta(**fields: Any) -> FlashMapDraftModel:
    with torch.device("meta"):
        return FlashMapDraftModel(FlashMapConfig(**fields))


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({}, 500_111_361),
        ({"target_hidden_size": 2560}, 474_940_929),
        (
            {"target_hidden_size": 576, "hidden_size": 576, "num_attention_heads": 9,
             "intermediate_size": 2304, "num_hidden_layers": 4},
            29_940_865,
        ),
    ],
)  # fmt: skip
def test_names_shapes_and_counts(fields: dict[str, Any], count: int) -> None:
    model = on_meta(**fields)
    shapes = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    assert shapes == expected_shapes(model.config)
    assert sum(weight.numel() for weight in model.parameters()) == count
    assert all(weight.is_meta for weight in model.parameters())
    assert list(model.buffers()) == []


@pytest.mark.parametrize("name", golden.CASES)
def test_the_published_packages_weights_fit_without_a_key_left_over(name: str) -> None:
    case = golden.load(name)  # loads strictly
    assert {k: tuple(v.shape) for k, v in case.model.state_dict().items()} == expected_shapes(
        case.model.config
    )


def test_a_new_model_starts_as_the_identity() -> None:
    model = FlashMapDraftModel(toys.drafter_config(hidden_size=64, target_hidden_size=96))
    for name, weight in model.named_parameters():
        if "adaln" in name or name.endswith("bias"):
            assert weight.count_nonzero() == 0, name
        elif "norm" in name or name == "noise_gate":
            assert (weight == 1).all(), name
        else:
            assert 0.015 < weight.std() < 0.025, name
    inputs = torch.randn(2, 3, 96)
    context = [(torch.randn(2, 2, 5, 32), torch.randn(2, 2, 5, 32))] * 2
    positions = torch.arange(5, 8).expand(2, 3)
    hidden = model(inputs, model.time_conditioning(0.0, 1.0), positions, context)
    x = torch.nn.functional.layer_norm(model.x_embed(inputs), (64,), eps=1e-6)
    assert torch.allclose(hidden, model.head(x), atol=1e-6)


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        first[name].dtype == second[name].dtype and first[name].equal(second[name])
        for name in first
    )


def drafted(model: FlashMapDraftModel) -> Tensor:
    target = toys.llama()
    cache = model.new_cache(1, 6)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        model.extend_context(cache, torch.randn(1, 5, 2 * toys.WIDTH, generator=generator))
        return model.draft(
            torch.tensor([3]), cache, target.get_input_embeddings(),
            target.get_output_embeddings(), num_steps=2, seed=4,
        )  # fmt: skip


class Poisoned:
    """torch.empty and torch.empty_like that hand out NaN, as reused memory may."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("empty", "empty_like", "empty_strided"):
            monkeypatch.setattr(torch, name, self.poisoned(getattr(torch, name)))

    @staticmethod
    def poisoned(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Tensor:
            tensor: Tensor = function(*args, **kwargs)
            if tensor.is_floating_point() and not tensor.is_meta:
                with torch.no_grad():
                    tensor.fill_(float("nan"))
            return tensor

        return call


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_model_loads_equal(
    tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = toys.drafter().to(dtype)
    model.save_pretrained(tmp_path)
    assert same(load_file(tmp_path / "model.safetensors"), dict(model.state_dict()))
    expected = drafted(model)
    # Memory that loading takes afresh holds what was there before: make that NaN.
    blocks = [torch.full((size,), float("nan")) for size in (16, 64, 256, 1024, 4096)] * 50
    del blocks
    gc.collect()
    Poisoned(monkeypatch)
    loaded = FlashMapDraftModel.from_pretrained(tmp_path, dtype=dtype)
    monkeypatch.undo()
    assert same(dict(loaded.state_dict()), dict(model.state_dict()))
    assert drafted(loaded).equal(expected)
    assert not loaded.training
    assert list(loaded.buffers()) == []


def test_a_constructed_model_draws_like_one_loaded_over_the_meta_device() -> None:
    model = toys.drafter()
    empty = on_meta(**{k: v for k, v in model.config.to_dict().items() if k in FIELDS})
    empty.load_state_dict(model.state_dict(), assign=True)
    assert drafted(empty).equal(drafted(model))


FIELDS = (
    "target_model", "target_hidden_size", "vocab_size", "target_layer_ids", "block_size",
    "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "cond_dim",
    "time_embed_dim", "jump_grids",
)  # fmt: skip


def test_a_model_materialised_from_meta_has_nothing_left_uninitialised() -> None:
    model = on_meta(**{k: getattr(toys.drafter_config(), k) for k in FIELDS})
    model.to_empty(device="cpu")
    model.load_state_dict(toys.drafter().state_dict())
    assert drafted(model).equal(drafted(toys.drafter()))


MISSING = {
    "head.weight": "normal", "head.bias": "zero", "noise_gate": "one", "hidden_norm.weight": "one",
    "layers.1.self_attn_adaln.linear.weight": "zero", "final_adaln.linear.bias": "zero",
    "layers.0.cross_attn.q_proj.weight": "normal", "layers.0.self_attn.k_norm.weight": "one",
    "time_embed.linear_2.weight": "normal", "fc.weight": "normal", "layers.1.mlp.fc1.bias": "zero",
}  # fmt: skip


@pytest.mark.parametrize("names", [[name] for name in MISSING] + [list(MISSING)])
def test_a_missing_weight_is_initialised_and_the_others_keep_their_values(
    tmp_path: Path, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = toys.drafter()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.25)  # nothing equals its initial value
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    save_file({k: v for k, v in weights.items() if k not in names}, path, metadata={"format": "pt"})
    Poisoned(monkeypatch)
    loaded = FlashMapDraftModel.from_pretrained(tmp_path)
    monkeypatch.undo()
    found = dict(loaded.state_dict())
    for name, weight in weights.items():
        if name not in names:
            assert found[name].equal(weight), f"{name} was loaded and then lost"
            continue
        rule = MISSING[name]
        if rule == "normal":
            assert 0.01 < found[name].std() < 0.03, name
        else:
            assert (found[name] == (rule == "one")).all(), name


def test_every_weight_missing_is_a_new_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = toys.drafter()
    model.save_pretrained(tmp_path)
    only = {"noise_gate": model.noise_gate.detach().clone()}
    save_file(only, tmp_path / "model.safetensors", metadata={"format": "pt"})
    Poisoned(monkeypatch)
    loaded = FlashMapDraftModel.from_pretrained(tmp_path)
    monkeypatch.undo()
    assert all(torch.isfinite(weight).all() for weight in loaded.parameters())
    assert all((w == 0).all() for name, w in loaded.named_parameters() if "adaln" in name)


def test_extra_tensors_of_other_formats_are_skipped(tmp_path: Path) -> None:
    model = toys.drafter()
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    extra = {name: torch.zeros(4) for name in ("embed_tokens.weight", "lm_head.weight", "t2d")}
    save_file(load_file(path) | extra, path, metadata={"format": "pt"})
    loaded = FlashMapDraftModel.from_pretrained(tmp_path)
    assert same(dict(loaded.state_dict()), dict(model.state_dict()))
