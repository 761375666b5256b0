"""The drafter's context: keys and values of the positions it can look at, one tensor for all
layers.

Legend: B sequences, L layers, A heads, d head width, m new positions.
"""

import torch
from torch import Tensor

from .configuration_flashmap import FlashMapConfig


class FlashMapCache:
    """Context keys and values of one drafter over a batch of sequences of equal length.

    `kv` is (L, 2, B, A, max_length, d): keys (normed and rotated) at index 0, values at index 1.
    Entries [0, length) come from the target's hidden states. Entry `length` is scratch space for
    the anchor, which drafting writes without advancing `length`, so that the anchor's true features
    overwrite it once the target has seen it.
    """

    def __init__(
        self,
        config: FlashMapConfig,
        batch_size: int,
        max_length: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        shape = (
            config.num_hidden_layers,
            2,
            batch_size,
            config.num_attention_heads,
            max_length,
            config.head_size,
        )
        self.kv = torch.zeros(shape, device=device, dtype=dtype)
        self.length = 0

    @property
    def max_length(self) -> int:
        """Number of entries there is room for, the anchor's included."""
        return self.kv.shape[4]

    def write(self, entries: list[tuple[Tensor, Tensor]]) -> None:
        """Write keys and values (B, A, m, d) of every layer at [length, length + m).

        Raises:
            ValueError: they do not fit, or are for another number of sequences.
        """
        end = self.length + entries[0][0].shape[2]
        rows, found = self.kv.shape[2], entries[0][0].shape[0]
        if found != rows:
            raise ValueError(f"FlashMapCache holds {rows} sequences and {found} are written to it.")
        if end > self.max_length:
            raise ValueError(
                f"FlashMapCache holds {self.max_length} entries and {end} are asked for: make it"
                " with max_length >= prompt length + max_new_tokens + block_size + 1."
            )
        for layer, (key, value) in enumerate(entries):
            self.kv[layer, 0, :, :, self.length : end] = key
            self.kv[layer, 1, :, :, self.length : end] = value

    def reserve(self, max_length: int) -> None:
        """Make room for `max_length` entries, at least doubling if that takes a larger tensor."""
        if max_length > self.max_length:
            grown = self.kv.new_zeros(
                (*self.kv.shape[:4], max(max_length, 2 * self.max_length), self.kv.shape[5])
            )
            grown[:, :, :, :, : self.max_length] = self.kv
            self.kv = grown

    def context(self, length: int) -> list[tuple[Tensor, Tensor]]:
        """Views of the first `length` keys and values, each (B, A, length, d), a pair a layer."""
        return [(layer[0, :, :, :length], layer[1, :, :, :length]) for layer in self.kv]
