"""The configuration of speculators-format FlashMap checkpoints in this project's words.

That format names the same fields differently, counts target layers from 1, keeps grids in a list
and the transformer's sizes in a configuration of their own. It is translated here, once.
"""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from flashmap.modeling.configuration_flashmap import FlashMapConfig

from .errors import ReleaseError

LAYER, ABOUT = "transformer_layer_config", "speculators_config"
RENAMED = {
    "timestep_embed_dim": "cond_dim",
    "timestep_frequency_dim": "time_embed_dim",
    "adaln_eps": "layer_norm_eps",
}
SAME = (
    "target_hidden_size",
    "block_size",
    "time_scale",
    "qk_norm_eps",
    "noise_gate",
    "time_schedule",
    "num_steps",
    "draft_vocab_size",
    "mask_token_id",
    "flow_map",
)
SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
    "rms_norm_eps",
    "max_position_embeddings",
)
# What the drafter's architecture decides; another value would be another model.
FIXED = {
    "hidden_act": ("gelu",),
    "attention_bias": (False,),
    "tie_word_embeddings": (False,),
    "rope_scaling": (None,),
    "sliding_window": (None,),
}
# Of the file and the library that wrote it; the build writes its own.
BOOKKEEPING = {
    "architectures",
    "auto_map",
    "code_digest",
    "dtype",
    "flashmap_version",
    "head_dim",
    "markov_head_type",
    "markov_rank",
    "model_type",
    "num_key_value_heads",
    "speculators_model_type",
    "speculators_version",
    "torch_dtype",
    "transformers_version",
}
# Facts that ours has beside the model's own fields.
KEPT = {
    "draft_vocab_size",
    "flow_map",
    "mask_token_id",
    "max_position_embeddings",
    "num_target_layers",
    "target_revision",
    "target_vocab_hash",
}


def translate(raw: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Our fields from a config.json of either vocabulary, and the names of those that have no place
    there.

    Raises ReleaseError for a field that asks for another architecture or cannot be read.
    """
    if raw.get("speculators_model_type", raw.get("model_type")) != "flashmap":
        raise _refusal(
            f"speculators_model_type {raw.get('speculators_model_type')!r}, model_type"
            f" {raw.get('model_type')!r}",
            "'flashmap', the one drafter that is converted",
        )
    if LAYER not in raw:
        return _ours(raw)
    layer = _mapping(raw, LAYER)
    found = {name: raw[name] for name in SAME if raw.get(name) is not None}
    found |= {new: raw[old] for old, new in RENAMED.items() if raw.get(old) is not None}
    found |= {name: layer[name] for name in SIZES if layer.get(name) is not None}
    used = {LAYER, ABOUT, "aux_hidden_state_layer_ids", "time_grids", *SAME, *RENAMED}
    found["target_layer_ids"] = [layer_id - 1 for layer_id in _layer_ids(raw)]
    if grids := raw.get("time_grids"):
        if not isinstance(grids, list):
            raise _refusal(f"time_grids {str(grids)[:60]!r}", "a list of grids")
        found["jump_grids"] = {str(number): grid for number, grid in enumerate(grids, 1)}
    if theta := _rope_theta(layer):
        found["rope_theta"] = theta
    _require_architecture(layer)
    verifier = _mapping(_mapping(raw, ABOUT), "verifier").get("name_or_path")
    if verifier:
        found["target_model"] = verifier
    placed = {*SIZES, *FIXED, "rope_theta", "rope_parameters"}
    unplaced = [name for name in raw if name not in used | BOOKKEEPING]
    unplaced += [f"{LAYER}.{name}" for name in layer if name not in placed | BOOKKEEPING]
    return found, sorted(unplaced)


def _ours(raw: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    fields = own_fields() | KEPT
    found = {name: raw[name] for name in fields if raw.get(name) is not None}
    return found, sorted(raw.keys() - fields - BOOKKEEPING - FlashMapConfig().to_dict().keys())


def own_fields() -> set[str]:
    """Names of the configuration's own fields."""
    return set(inspect.signature(FlashMapConfig.__init__).parameters) - {"self", "kwargs"}


def _layer_ids(raw: Mapping[str, Any]) -> Iterable[int]:
    ids = raw.get("aux_hidden_state_layer_ids")
    if not isinstance(ids, list) or not all(type(one) is int and one >= 1 for one in ids):
        raise _refusal(
            f"aux_hidden_state_layer_ids {ids!r}",
            "a list of layers counted from 1: which ones the drafter reads cannot be guessed",
        )
    return ids


def _rope_theta(layer: Mapping[str, Any]) -> Any:
    rope = _mapping(layer, "rope_parameters")
    if rope.get("rope_type", "default") != "default":
        raise _refusal(
            f"rope_type {rope['rope_type']!r}", "'default', the only one this drafter has"
        )
    return rope.get("rope_theta", layer.get("rope_theta"))


def _require_architecture(layer: Mapping[str, Any]) -> None:
    heads, width = layer.get("num_attention_heads"), layer.get("hidden_size")
    fixed = {**FIXED, "num_key_value_heads": (heads, None)}
    if isinstance(heads, int) and isinstance(width, int) and heads:
        fixed["head_dim"] = (width // heads, None)
    for name, allowed in fixed.items():
        if name in layer and layer[name] not in allowed:
            raise _refusal(
                f"{LAYER}.{name} {layer[name]!r}", f"{allowed[0]!r}, as this drafter has it"
            )


def _mapping(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = raw.get(name) or {}
    if not isinstance(value, dict):
        raise _refusal(f"{name} {str(value)[:60]!r}", "an object")
    return value


def _refusal(found: str, expected: str) -> ReleaseError:
    return ReleaseError(
        "config", found, expected, "this checkpoint is another model, or its config.json is damaged"
    )
