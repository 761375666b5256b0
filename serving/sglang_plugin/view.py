"""A FlashMap release in sglang's words: the configuration that its DSPARK worker reads.

Nothing here needs sglang to be importable, so that it can be tested without.
"""

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from flashmap.serving.drafter import KIND, common_fields, draft_config, read_config


def draft_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What sglang's configuration of the draft holds; `flashmap` in it is the drafter's own.

    Raises:
        ValueError: see `draft_config`.
    """
    config = draft_config(raw)
    return common_fields(config) | {
        "model_type": KIND,
        "num_target_layers": raw.get("num_target_layers"),
        "target_layer_ids": config.target_layer_ids,
        # Slots carry no token of their own, and no slot's token depends on another's.
        "mask_token_id": 0,
        "markov_rank": 1,
        "markov_head_type": "vanilla",
        "enable_confidence_head": False,
    }


class FlashMapReleaseConfig:
    """What sglang calls to read a config.json whose model_type is "flashmap"."""

    @classmethod
    def from_pretrained(cls, model: Any, revision: str | None = None, **_: Any) -> Any:
        """Sglang's configuration of the draft in a folder or a Hub id."""
        return PretrainedConfig(**draft_fields(read_config(str(model), revision)))
