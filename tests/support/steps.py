"""A random toy for the fused step: a drafter, its target's embedding and head, what they read."""

from typing import Any

import torch
from torch import Tensor, nn

from flashmap import FlashMapDraftModel
from flashmap.modeling.step_flashmap import ContextRows, DenseContext, FusedStep

from . import toys


def anchored(
    step: FusedStep, features: Tensor, anchors: Tensor, room: int | None = None
) -> DenseContext:
    """A context of `features` (B, T, n H) and the anchors' embeddings (B, H) after them."""
    rows, length = features.shape[:2]
    config = step.config
    shape = (config.num_hidden_layers, 2, rows, config.num_attention_heads, room or length + 1)
    kv = torch.zeros(*shape, config.head_size, dtype=anchors.dtype, device=anchors.device)
    lengths = torch.full((rows,), length, device=anchors.device)
    context = DenseContext(step, kv, lengths)
    places = torch.arange(length, device=anchors.device).expand(rows, length)
    new = ContextRows(features.flatten(0, 1), places.flatten(), context.slots(places).flatten())
    own = ContextRows(anchors, lengths, context.slots(lengths.unsqueeze(1)).flatten())
    step.write(context, new, own)
    return context


class Toy:
    """A drafter for toy targets, with features (3, 9, n H) and anchors."""

    def __init__(self, **changes: Any) -> None:
        self.model: FlashMapDraftModel = toys.drafter(**changes)
        generator = torch.Generator().manual_seed(5)
        width = self.model.config.target_hidden_size
        self.embed_tokens = nn.Embedding(toys.VOCAB, width)
        self.lm_head = nn.Linear(width, toys.VOCAB)
        with torch.no_grad():
            for weight in (*self.embed_tokens.parameters(), *self.lm_head.parameters()):
                weight.copy_(0.4 * torch.randn(weight.shape, generator=generator))
        self.features = torch.randn(3, 9, self.model.fc.in_features, generator=generator)
        self.anchor_ids = torch.tensor([5, 17, 40])
        self.seeds = torch.tensor([11, -3, 2**40])

    @property
    def anchors(self) -> Tensor:
        """The anchors' embeddings (3, H)."""
        return self.embed_tokens(self.anchor_ids).detach()

    def step(self, **options: Any) -> FusedStep:
        """A fused step for positions up to 64."""
        return FusedStep(self.model, self.embed_tokens.weight, self.lm_head, 64, **options)

    @torch.no_grad()
    def expected(self, num_steps: int, rows: slice = slice(None), num_draws: int = 1) -> Tensor:
        """The model's own draft, (G, K, V)."""
        features = self.features[rows]
        cache = self.model.new_cache(len(features), 10)
        self.model.extend_context(cache, features)
        logits = self.model.draft(
            self.anchor_ids[rows], cache, self.embed_tokens, self.lm_head, num_steps,
            seed=self.seeds[rows].tolist(), num_draws=num_draws,
        )  # fmt: skip
        return logits.flatten(0, -3)

    @torch.no_grad()
    def found(self, step: FusedStep, rows: slice = slice(None), **options: Any) -> Tensor:
        """The step's draft, (G, K, S)."""
        context = anchored(step, self.features[rows], self.anchors[rows])
        seeds = self.seeds[rows]
        return step.logits(step.hidden(context, context.lengths, seeds=seeds, **options))
