"""A target with an exactly known distribution, and drafters for it, fast enough for 20,000 runs.

The target is a second-order Markov chain. It reads the tokens before the newest ones out of its
cache, so a cache that was not rolled back correctly changes its distribution.

Legend: V vocabulary of the drafter, W of the target (W >= V), K slots of a block, H hidden width.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from flashmap import FlashMapConfig
from flashmap.modeling.target_flashmap import FeatureTap

HIDDEN = 4
_NOISES = 1009


class TableTarget(nn.Module):
    """p(next | last two tokens) = softmax(table[second last, last] / temperature), for any W."""

    def __init__(self, vocab_size: int, seed: int = 0, scale: float = 1.5) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        shape = (vocab_size, vocab_size, vocab_size)
        self.register_buffer("table", torch.randn(shape, generator=generator) * scale)
        self.config = transformers.LlamaConfig(
            vocab_size=vocab_size, hidden_size=HIDDEN, num_hidden_layers=1, num_attention_heads=1,
            num_key_value_heads=1, max_position_embeddings=64, eos_token_id=None,
        )  # fmt: skip
        self.embed_tokens = nn.Embedding(vocab_size, HIDDEN)
        self.layers = nn.ModuleList([nn.Identity()])
        self.lm_head = nn.Linear(HIDDEN, vocab_size, bias=False)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(
        self,
        input_ids: Tensor,
        past_key_values: Any,
        use_cache: bool = True,
        logits_to_keep: int = 0,
        position_ids: Tensor | None = None,
    ) -> Any:
        """Logits of the newest `logits_to_keep` tokens; token ids stand in for keys and values."""
        self.layers[0](self.embed_tokens(input_ids))
        stored, _ = past_key_values.update(*[input_ids[:, None, :, None].float()] * 2, 0)
        tokens = stored[0, 0, :, 0].long()
        if position_ids is not None:
            assert int(position_ids[0, -1]) == len(tokens) - 1, "positions disagree with the cache"
        last = tokens[-logits_to_keep:]
        before = tokens[-logits_to_keep - 1 : -1]
        return SimpleNamespace(logits=self.table[before, last].unsqueeze(0))

    def joint(self, prompt: Tensor, temperature: float, num_tokens: int) -> Tensor:
        """Exact float64 probabilities of the next `num_tokens` tokens, shape (W, ) * num_tokens."""
        p = torch.softmax(self.table.double() / temperature, dim=-1)
        size = p.shape[0]
        before, last = int(prompt[0, -2]), int(prompt[0, -1])
        joint = p[before, last]
        if num_tokens > 1:
            joint = joint[:, None] * p[last]
        for _ in range(num_tokens - 2):
            joint = joint.unsqueeze(-1) * p.reshape((1,) * (joint.dim() - 2) + (size,) * 3)
        return joint


class TableDrafter:
    """A drafter with logits from a table of the anchor, plus noise by seed and position.

    Args:
        logits: (W, K, V) by anchor.
        noise: size of the noise on every logit; each seed and position has its own.
    """

    device = torch.device("cpu")

    def __init__(self, logits: Tensor, noise: float = 0.7) -> None:
        _, block_size, vocab_size = logits.shape
        self.logits = logits
        generator = torch.Generator().manual_seed(5)
        shape = (_NOISES, block_size, vocab_size)
        self.noises = torch.randn(shape, generator=generator) * noise
        self.config = FlashMapConfig(
            target_hidden_size=HIDDEN, vocab_size=vocab_size, block_size=block_size,
            target_layer_ids=[0],
        )  # fmt: skip

    def check_target(self, target: nn.Module) -> None: ...

    def target_features(self, target: nn.Module) -> FeatureTap:
        return FeatureTap(target, [0])

    def new_cache(self, batch_size: int, max_length: int) -> Any:
        return SimpleNamespace(length=0, lengths=[0], reserve=lambda length: None)

    def extend_context(
        self, cache: Any, target_hidden: Tensor, counts: Sequence[int] | None = None
    ) -> None:
        cache.length += target_hidden.shape[1] if counts is None else counts[0]
        cache.lengths = [cache.length]

    def draft(
        self, anchor_ids: Tensor, cache: Any, embed_tokens: Any, lm_head: Any, num_steps: Any,
        *, seed: Sequence[int], num_draws: int = 1, jump_bank_size: int = 0,
    ) -> Tensor:  # fmt: skip
        """Logits (1, K, V) of the block after the anchor, or (1, M, K, V) of several draws."""
        first = seed[0] * 31 + cache.length
        draws = [
            self.logits[anchor_ids] + self.noises[(first + 331 * draw) % _NOISES]
            for draw in range(num_draws)
        ]
        return draws[0] if num_draws == 1 else torch.stack(draws, dim=1)


def reasonable(target: TableTarget, block_size: int, vocab_size: int) -> Tensor:
    """Draft logits (W, K, V) that know the target on average, the less the later the slot."""
    p = torch.softmax(target.table, dim=-1)
    first = p.mean(dim=0)  # (anchor, next)
    step, slots = first, []
    for _ in range(block_size):
        slots.append(step)
        step = step @ first
    logits: Tensor = torch.stack(slots, dim=1).log()[..., :vocab_size]
    return logits


def wrong(target: TableTarget, block_size: int, vocab_size: int) -> Tensor:
    """Draft logits (W, K, V) that prefer what the target thinks unlikely."""
    return -1.5 * reasonable(target, block_size, vocab_size)
