"""Where the serving engines keep a drafter's keys and values, as layouts that `write_context`
writes to.

Both are views of the engine's own tensors. Make a layout anew when the engine reallocates them, and
before a graph is captured.

Legend: A heads, d head width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .reference_flashmap import KvLayout, kv_layout


def vllm_layout(caches: Sequence[Tensor]) -> KvLayout:
    """The FlashAttention cache of vLLM, one tensor (blocks, A, page, 2 d) a layer: keys come before
    values in the last dimension.

    Raises:
        ValueError: the layers differ, or are stored otherwise.
    """
    pages = [cache.transpose(1, 2) for cache in caches]
    halves = [page.chunk(2, dim=-1) for page in pages]
    return kv_layout([key for key, _ in halves], [value for _, value in halves])


def sglang_layout(keys: Sequence[Tensor], values: Sequence[Tensor]) -> KvLayout:
    """The pool of sglang, keys and values (rows, A, d) a layer: a slot is a row.

    Raises:
        ValueError: the layers differ, or are stored otherwise.
    """
    return kv_layout([key.unsqueeze(1) for key in keys], [value.unsqueeze(1) for value in values])


def gated_slots(slots: Tensor, commit_lengths: Tensor) -> Tensor:
    """Slots (B W) of verify windows `slots` (B, W), those past the first `commit_lengths` (B) of
    each window replaced by -1, which `write_context` skips."""
    columns = torch.arange(slots.shape[1], device=slots.device)
    return slots.where(columns < commit_lengths.unsqueeze(1), -1).flatten()
