"""A FlashMap release in vLLM's words: the configuration that its DFlash runtime reads.

Nothing here needs vLLM to be importable, so that it can be tested without.
"""

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from flashmap.modeling.configuration_flashmap import FlashMapConfig
from flashmap.release.foreign import own_fields, translate

ARCHITECTURE = "FlashMapDraftModel"
KIND = "flashmap"  # model_type of a release, speculators_model_type of a speculators checkpoint
_POSITIONS = 131072  # where a release does not say: the drafter has no limit of its own


def is_flashmap(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json is a FlashMap drafter's, in either vocabulary."""
    return KIND in (raw.get("model_type"), raw.get("speculators_model_type"))


def read_config(model: str, revision: str | None) -> dict[str, Any]:
    """The config.json of a folder or a Hub id; OSError if there is none."""
    raw: dict[str, Any] = PretrainedConfig.get_config_dict(model, revision=revision)[0]
    return raw


def draft_config(raw: Mapping[str, Any]) -> FlashMapConfig:
    """The drafter's own configuration.

    Raises:
        ValueError: the release is of a flow whose jumps were not trained, or a field is not valid.
    """
    fields, _ = translate(raw)
    if fields.get("flow_map") is False:
        raise ValueError(
            "flow_map is false in config.json: this checkpoint is of training's first stage, whose"
            " jumps are not trained. Serve the checkpoint of the last stage."
        )
    config: FlashMapConfig = FlashMapConfig.from_dict(fields)
    return config


def draft_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What vLLM's configuration of the draft holds; `flashmap` in it is the drafter's own.

    Raises:
        ValueError: see `draft_config`.
    """
    config = draft_config(raw)
    same = (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "vocab_size",
        "rms_norm_eps",
        "target_hidden_size",
        "block_size",
    )
    return {name: getattr(config, name) for name in same} | {
        "architectures": [ARCHITECTURE],
        "num_key_value_heads": config.num_attention_heads,
        "head_dim": config.head_size,
        "hidden_act": "gelu",
        "tie_word_embeddings": False,
        "max_position_embeddings": getattr(config, "max_position_embeddings", None) or _POSITIONS,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        # vLLM counts the inputs of layers, the output of the last tap's layer being one more.
        "eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in config.target_layer_ids],
        # Slots carry no token of their own; causal false asks for attention to all of the context.
        "dflash_config": {
            "mask_token_id": 0,
            "target_layer_ids": config.target_layer_ids,
            "causal": False,
        },
        "draft_vocab_size": getattr(config, "draft_vocab_size", None) or config.vocab_size,
        KIND: {name: getattr(config, name) for name in own_fields()},
    }


def fill_speculators(config_dict: dict[str, Any], pre_trained_config: dict[str, Any]) -> None:
    """VLLM's hook for the configurations of the speculators library: fill its second argument."""
    fields = draft_fields(config_dict)
    pre_trained_config.clear()
    pre_trained_config.update(fields)


class FlashMapReleaseConfig:
    """What vLLM calls to read a config.json whose model_type is "flashmap"."""

    @classmethod
    def from_pretrained(cls, model: Any, revision: str | None = None, **_: Any) -> Any:
        """VLLM's configuration of the draft in a folder or a Hub id."""
        from vllm.transformers_utils.configs.speculators.base import SpeculatorsConfig

        return SpeculatorsConfig(**draft_fields(read_config(str(model), revision)))
