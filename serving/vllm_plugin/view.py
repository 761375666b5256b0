"""A FlashMap release in vLLM's words: the configuration that its DFlash runtime reads.

Nothing here needs vLLM to be importable, so that it can be tested without.
"""

from collections.abc import Mapping
from typing import Any

from flashmap.serving.drafter import common_fields, draft_config, read_config


def draft_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What vLLM's configuration of the draft holds; `flashmap` in it is the drafter's own.

    Raises:
        ValueError: see `draft_config`.
    """
    config = draft_config(raw)
    return common_fields(config) | {
        # vLLM counts the inputs of layers, the output of the last tap's layer being one more.
        "eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in config.target_layer_ids],
        # Slots carry no token of their own; causal false asks for attention to all of the context.
        "dflash_config": {
            "mask_token_id": 0,
            "target_layer_ids": config.target_layer_ids,
            "causal": False,
        },
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
