"""The target's RMSNorms as one operation each while its pass is captured: transformers writes them
as eight, and a large target has four a layer.

Which norms these are is found out from their numbers, so that one with another formula keeps its
own.
"""

from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from .select_flashmap import select_ops

# Largest difference from a norm's own output, relative to the largest number: one rounding step.
_STEPS = {torch.float32: 1e-5, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


@torch.no_grad()
def plain_norms(target: PreTrainedModel) -> list[tuple[Any, Any]]:
    """RMSNorms of `target` that `target_norm` computes, each with the function that does."""
    found, same = [], []
    for module in target.modules():
        weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
        if weight is None or eps is None or weight.dtype not in _STEPS or "forward" in vars(module):
            continue
        norm = select_ops(weight.device, weight.dtype).target_norm
        fused = partial(norm, weight=weight, eps=eps)
        wave = torch.arange(2 * len(weight), device=weight.device).sin()
        x = wave.view(2, -1).to(weight.dtype)
        own = module(x)
        step = _STEPS[weight.dtype] * own.abs().max()
        found.append((module, fused))
        same.append((fused(x) - own).abs().max() <= step)
    kept = torch.stack(same).tolist() if same else []
    return [pair for pair, is_same in zip(found, kept, strict=True) if is_same]
