"""The drafter's context: keys and values of the positions it can look at, one tensor for all
layers.

Legend: B sequences, L layers, A heads, d head width, m new positions, K slots.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .configuration_flashmap import FlashMapConfig


class FlashMapCache:
    """Context keys and values of one drafter over a batch of sequences, each as long as it is.

    `kv` is (L, 2, B, A, max_length, d): keys (normed and rotated) at index 0, values at index 1. An
    entry's place is its token's position in its own sequence. Those before `lengths[b]` come from
    the target's hidden states. The one at `lengths[b]` is scratch space for the anchor, which
    drafting writes without advancing the length, so that the anchor's true features overwrite it
    once the target has seen it; what lies beyond is never looked at.
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
        self.lengths = [0] * batch_size

    @property
    def length(self) -> int:
        """Entries of the longest sequence; setting it sets that of every sequence."""
        return max(self.lengths, default=0)

    @length.setter
    def length(self, value: int) -> None:
        """Let every sequence be this long."""
        self.lengths = [value] * len(self.lengths)

    @property
    def max_length(self) -> int:
        """Number of entries there is room for, the anchor's included."""
        return self.kv.shape[4]

    @property
    def is_even(self) -> bool:
        """Whether all sequences are equally long."""
        return len(set(self.lengths)) <= 1

    def positions(self, count: int) -> Tensor:
        """The next `count` positions of every sequence, int64 (B, count)."""
        first = torch.tensor(self.lengths, device=self.kv.device)
        return first.unsqueeze(1) + torch.arange(count, device=self.kv.device)

    def require_rows(self, found: int) -> None:
        """Raise ValueError if `found` is not the number of sequences."""
        if found != len(self.lengths):
            raise ValueError(
                f"FlashMapCache holds {len(self.lengths)} sequences and {found} are written to it."
            )

    def write(self, entries: list[tuple[Tensor, Tensor]]) -> None:
        """Write keys and values (B, A, m, d) of every layer at the next m positions.

        Raises:
            ValueError: they do not fit, or are for another number of sequences.
        """
        count = entries[0][0].shape[2]
        end = self.length + count
        self.require_rows(entries[0][0].shape[0])
        if end > self.max_length:
            raise ValueError(
                f"FlashMapCache holds {self.max_length} entries and {end} are asked for: make it"
                " with max_length >= prompt length + max_new_tokens + block_size + 1."
            )
        if self.is_even:
            for layer, (key, value) in enumerate(entries):
                self.kv[layer, 0, :, :, self.length : end] = key
                self.kv[layer, 1, :, :, self.length : end] = value
            return
        places = self.positions(count)[:, None, :, None].expand_as(entries[0][0])
        for layer, (key, value) in enumerate(entries):
            self.kv[layer, 0].scatter_(2, places, key)
            self.kv[layer, 1].scatter_(2, places, value)

    def advance(self, counts: Sequence[int]) -> None:
        """Let every sequence have so many more entries."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these sequences, in this order."""
        self.kv = self.kv[:, :, list(rows)]
        self.lengths = [self.lengths[row] for row in rows]

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

    def mask(self, num_slots: int) -> Tensor | None:
        """What `num_slots` slots after each anchor may see of `context(length + 1)`: boolean (B, 1,
        K, length + 1), or None if that is everything."""
        if self.is_even:
            return None
        places = torch.arange(self.length + 1, device=self.kv.device)
        visible = places <= torch.tensor(self.lengths, device=self.kv.device).unsqueeze(1)
        return visible[:, None, None].expand(-1, 1, num_slots, -1)
