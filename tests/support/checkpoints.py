"""A tiny drafter in other forms: as the speculators library writes one (other names, layers counted
from 1, tables of the tokens it can say), and in torch's own files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from . import toys
from .pair_folders import ROWS

MEMBERS = [0, 3, 4, 70, 71, 200, 263]


def write_speculators(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """A tiny drafter as the speculators library writes one."""
    drafter = toys.drafter(**{"vocab_size": ROWS, **changes}).to(dtype)
    return as_speculators(folder, drafter, MEMBERS)


def as_speculators(folder: Path, drafter: Any, members: list[int]) -> Path:
    """Write a drafter that may say `members` as the speculators library does."""
    ours = drafter.config
    rows, width = ours.vocab_size, ours.target_hidden_size
    config = {
        "architectures": ["FlashMapDraftModel"],
        "speculators_model_type": "flashmap",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "flashmap",
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": {
            "model_type": "qwen3",
            "hidden_size": ours.hidden_size,
            "num_hidden_layers": ours.num_hidden_layers,
            "num_attention_heads": ours.num_attention_heads,
            "num_key_value_heads": ours.num_attention_heads,
            "head_dim": ours.head_size,
            "intermediate_size": ours.intermediate_size,
            "vocab_size": ours.vocab_size,
            "rms_norm_eps": ours.rms_norm_eps,
            "hidden_act": "gelu",
            "tie_word_embeddings": False,
            "max_position_embeddings": 777,
            "rope_parameters": {"rope_type": "default", "rope_theta": ours.rope_theta},
        },
        "aux_hidden_state_layer_ids": [tap + 1 for tap in ours.target_layer_ids],
        "target_hidden_size": ours.target_hidden_size,
        "block_size": ours.block_size,
        "timestep_embed_dim": ours.cond_dim,
        "timestep_frequency_dim": ours.time_embed_dim,
        "time_scale": ours.time_scale,
        "qk_norm_eps": ours.qk_norm_eps,
        "adaln_eps": ours.layer_norm_eps,
        "noise_gate": ours.noise_gate,
        "time_schedule": ours.time_schedule,
        "num_steps": ours.num_steps,
        "time_grids": [ours.jump_grids[str(n)] for n in range(1, len(ours.jump_grids) + 1)],
        "draft_vocab_size": len(members),
        "mask_token_id": None,
        "dtype": "float32",
        "transformers_version": "5.0.0",
    }
    t2d = torch.zeros(rows, dtype=torch.bool)
    t2d[members] = True
    tables = {"t2d": t2d, "d2t": torch.tensor(members) - torch.arange(len(members))}
    table = torch.zeros(rows, width)
    targets = {"embed_tokens.weight": table, "lm_head.weight": table + 1.0}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    save_file({**tensors, **tables, **targets}, folder / "model.safetensors")
    return folder


def as_torch(folder: Path, wrap: Callable[[dict[str, torch.Tensor]], Any], name: str) -> Path:
    """Replace a folder's safetensors by a torch file."""
    tensors = load_file(folder / "model.safetensors")
    torch.save(wrap(tensors), folder / name)
    (folder / "model.safetensors").unlink()
    return folder
