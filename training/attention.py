"""The frozen target, faster where training knows more than transformers can.

Prompts of a generation share their last position, and documents of a step need no mask, since
what is padded follows everything that is looked at. Both ways give what `sdpa` gives.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from flashmap.modeling.target_flashmap import layers_with_windows, text_config

GROUPED, CAUSAL = "flashmap_grouped", "flashmap_causal"


def _grouped(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attention of one new token a sequence, the heads that share keys as rows of one query.

    Repeating the cache for each of them, as the usual way does, would read and write it several
    times a step.
    """
    groups = query.shape[1] // key.shape[1]
    if query.shape[2] > 1 or groups == 1:
        result: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, mask, **options
        )
        return result
    rows = query.unflatten(1, (-1, groups)).squeeze(3)
    out = F.scaled_dot_product_attention(rows, key, value, mask, scale=options.get("scaling"))
    return out.flatten(1, 2).unsqueeze(1), None


def _causal(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attention of every position to those before it and itself, with no mask in memory."""
    shared = query.shape[1] != key.shape[1]
    out = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=options.get("scaling"), enable_gqa=shared
    )
    return out.transpose(1, 2), None


def _no_mask(*arguments: Any, **options: Any) -> None:
    return None


AttentionInterface.register(GROUPED, _grouped)
AttentionMaskInterface.register(GROUPED, sdpa_mask)
AttentionInterface.register(CAUSAL, _causal)
AttentionMaskInterface.register(CAUSAL, _no_mask)


def is_plain(target: PreTrainedModel) -> bool:
    """Whether every layer attends to all positions before its own, by `sdpa`."""
    config: Any = text_config(target)
    return not layers_with_windows(target) and config._attn_implementation == "sdpa"


@contextmanager
def attention(target: PreTrainedModel, name: str) -> Iterator[None]:
    """Let the target attend in another way for a while, if it is plain."""
    config: Any = text_config(target)
    if not is_plain(target):
        yield
        return
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before
