"""The context of a fused step in an engine's pages: where entries are written, and attention that
gathers them.

Legend: B sequences, G blocks, K slots, A heads, d head width, N blocks of a sequence's table.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flashmap.modeling.reference_flashmap import KvLayout
from flashmap.modeling.step_flashmap import FusedStep

# To a KvLayout, of kernels/ or of modeling/: one file, two classes of one shape.
MakeLayout = Callable[[Sequence[Tensor]], Any]


class PageLayout:
    """The layout of caches that their engine may move: made anew when one of them is elsewhere.

    `caches` gives the engine's tensors, one a layer, `make` the layout of them. Making it waits for
    the device, so ask for it once before a graph is captured.
    """

    def __init__(self, caches: Callable[[], Sequence[Tensor]], make: MakeLayout) -> None:
        self._caches, self._make = caches, make
        self._places: list[int] = []
        self._layout: KvLayout | None = None

    def __call__(self) -> KvLayout:
        caches = self._caches()
        places = [cache.data_ptr() for cache in caches]
        if self._layout is None or places != self._places:
            self._layout, self._places = self._make(caches), places
        layout: KvLayout = self._layout
        return layout


def gathered_attention(
    step: FusedStep, layout: KvLayout, layer: int, query: Tensor, table: Tensor, lengths: Tensor
) -> Tensor:
    """Attention of `query` (G, K, A, d) onto entries 0 .. lengths[b] of each sequence, whose pages
    `table` (B, N) names: a copy of all N pages, so for devices without paged attention."""
    pages = table.long()
    key, value = (
        cache[pages].flatten(1, 2).transpose(1, 2).to(query.dtype)
        for cache in (layout.keys[layer], layout.values[layer])
    )
    out: Tensor = step.ops.context_attention(query, key, value, lengths)
    return out


def committed(positions: Tensor, in_use: Tensor) -> Tensor:
    """Number of entries (B), int32, that the blocks after anchors at `positions` (B) look at: up to
    the anchor's own, none where a sequence is padding."""
    return torch.where(in_use, positions + 1, 0).int()
