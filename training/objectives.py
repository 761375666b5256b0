"""Objectives of one jump: from a step's blocks to one loss, made of the pieces in `losses`.

- Product: the single jump from noise to tokens, one proposal a block. Its best map ignores the
  noise.
- Mixture: the same jump for several noise draws, whose mixture is the proposal.

Those of several jumps are in `flow`.

Legend: B documents, N anchors of a document, G = B N blocks, M noise draws, K slots, H target
hidden width, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flashmap.modeling.modeling_flashmap import FlashMapDraftModel

from . import losses
from .blocks import (
    Blocks,
    Context,
    Slots,
    Target,
    build_context,
    encode_documents,
    slots_of,
    target_slots,
)
from .recipe import LossRecipe, RunRecipe


class Result(NamedTuple):
    """What a step's blocks gave.

    Attributes:
        loss: to be minimised, per valid slot.
        stats: float32 (3): mean cross-entropy of a valid slot, leading tokens a block that equal
            the document's where each slot takes its likeliest, and leading tokens that sampling at
            temperature 1 would accept (-1 where the target's distribution is not at hand).
    """

    loss: Tensor
    stats: Tensor


class Step(NamedTuple):
    """A step's blocks and what is known of them.

    Attributes:
        blocks: the documents and anchors.
        slots: what the blocks' slots should become.
        features: the target's (B, T, n H).
        embeds: embeddings of the anchors (B, N, H).
        wanted: the target's logits (G, K, V) for each slot given the document before it, or None.
    """

    blocks: Blocks
    slots: Slots
    features: Tensor
    embeds: Tensor
    wanted: Tensor | None


Judge = Callable[[Tensor, Tensor, Tensor, "Tensor | None"], tuple[Tensor, Tensor]]


class Objective(ABC):
    """A loss of a drafter on blocks. It keeps the target's constants, so that none is computed in
    a step."""

    num_draws = 1

    def __init__(
        self, recipe: LossRecipe, model: FlashMapDraftModel, target: Target, run: RunRecipe
    ) -> None:
        self.recipe, self.model, self.target, self.chunk = recipe, model, target, run.chunk
        # Only the vocabulary-sized part is worth compiling: on a GPU its many passes over the
        # logits become a few, and it is most of a step.
        self.judge: Judge = torch.compile(self._judge) if run.compile else self._judge
        self.block_size = model.config.block_size
        with torch.no_grad():
            uniform, factor = model.target_constants(target.embedding)
        self.uniform, self.factor = uniform.clone(), factor.clone()

    @property
    def needs_target_logits(self) -> bool:
        """Whether the target's distributions enter the loss."""
        return self.recipe.total_variation > 0.0

    def __call__(self, blocks: Blocks, features: Tensor, target_logits: Tensor | None) -> Result:
        """Loss of these blocks, given the target's features (B, T, n H) and logits (B, T, V)."""
        embeds = self.target.embed(blocks.ids.gather(1, blocks.anchors))
        wanted = (
            None if target_logits is None else target_slots(target_logits, blocks, self.block_size)
        )
        step = Step(blocks, slots_of(blocks, self.block_size), features, embeds, wanted)
        loss, stats = self.block_losses(step)
        count, num_blocks = step.slots.valid.sum().clamp(min=1), blocks.anchors.numel()
        return Result(loss / count, torch.cat((stats[:1] / count, stats[1:] / num_blocks)))

    @abstractmethod
    def block_losses(self, step: Step) -> tuple[Tensor, Tensor]:
        """Sums over blocks of the weighted losses and of the statistics."""

    def context(self, step: Step, model: FlashMapDraftModel | None = None) -> Context:
        """What the blocks may look at, as the drafter or another `model` encodes it."""
        model = model or self.model
        shared = encode_documents(model, step.features)
        return build_context(model, shared, step.blocks.anchors, step.embeds, self.num_draws)

    def one_jump(self, step: Step) -> Tensor:
        """Outputs (G M, K, H) of the jump from fresh noise to tokens."""
        slots = step.slots
        count, device = len(slots.tokens) * self.num_draws, slots.tokens.device
        width = self.model.config.target_hidden_size
        noise = torch.randn(count, self.block_size, width, device=device)
        noise = noise.to(self.factor.dtype) @ self.factor.T
        inputs = self.model.mix_state(self.uniform, noise, 0.0, 1.0)
        positions = slots.positions.repeat_interleave(self.num_draws, dim=0)
        hidden: Tensor = self.model(
            inputs, self.model.time_conditioning(0.0, 1.0), positions, *self.context(step)
        )
        return hidden

    @abstractmethod
    def _judge(
        self, hidden: Tensor, tokens: Tensor, valid: Tensor, wanted: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Sums of the weighted losses and of the statistics of some blocks' outputs."""

    def in_chunks(
        self, hidden: Tensor, slots: Slots, wanted: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Sum `judge` over the blocks, `chunk` at a time; logits are made again for the gradient
        rather than kept."""
        if not self.chunk or self.chunk >= len(hidden):
            return self.judge(hidden, slots.tokens, slots.valid, wanted)
        size = self.chunk
        parts = [
            checkpoint(
                self.judge,
                hidden[i : i + size],
                slots.tokens[i : i + size],
                slots.valid[i : i + size],
                None if wanted is None else wanted[i : i + size],
                use_reentrant=False,
                preserve_rng_state=False,
            )
            for i in range(0, len(hidden), size)
        ]
        loss, stats = (torch.stack(part).sum(dim=0) for part in zip(*parts, strict=True))
        return loss, stats

    def weigh(
        self, losses_GK: Tensor, nll_GK: Tensor, valid_GK: Tensor, tv_GK: Tensor | None = None
    ) -> Tensor:
        """Sum of the slots' losses under the recipe's weights; `tv_GK` is the share of each slot
        that sampling rejects, where it is known."""
        recipe = self.recipe
        if recipe.slot_weights == "acceptance":
            assert tv_GK is not None  # the recipe sees to it
            weights = losses.acceptance_weights(1.0 - tv_GK, valid_GK)
        elif recipe.slot_weights == "d-pace":
            weights = losses.d_pace_weights(nll_GK, valid_GK, recipe.confidence)
        elif recipe.slot_weights == "exponential":
            slots = losses.exponential_weights(self.block_size, recipe.decay, nll_GK.device)
            weights = slots * valid_GK
        else:
            weights = valid_GK.float()
        return (losses_GK * weights).sum()


def statistics(nll_GK: Tensor, right_GK: Tensor, valid_GK: Tensor, tv_GK: Tensor | None) -> Tensor:
    """Sums over blocks of what `Result.stats` is made of."""
    accepted = (1.0 - tv_GK) * valid_GK if tv_GK is not None else None
    unknown = nll_GK.new_full((), -float(len(nll_GK)))
    sampled = unknown if accepted is None else losses.leading(accepted).sum()
    found = [(nll_GK * valid_GK).sum(), losses.leading(right_GK & valid_GK).sum(), sampled]
    return torch.stack([value.detach().float() for value in found])


class Product(Objective):
    """One jump, one proposal: cross-entropy and total variation of each slot."""

    def block_losses(self, step: Step) -> tuple[Tensor, Tensor]:
        """See `Objective`."""
        return self.in_chunks(self.one_jump(step), step.slots, step.wanted)

    def _judge(
        self, hidden: Tensor, tokens: Tensor, valid: Tensor, wanted: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        logits = self.target.head(hidden)
        nll = losses.cross_entropy(logits, tokens)
        tv = None if wanted is None else losses.total_variation(logits, wanted)
        loss = self.recipe.cross_entropy * nll
        if tv is not None:
            loss = loss + self.recipe.total_variation * tv
        right = logits.argmax(dim=-1) == tokens
        return self.weigh(loss, nll, valid, tv), statistics(nll, right, valid, tv)


class Mixture(Objective):
    """One jump, several noise draws, whose mixture is the proposal."""

    def __init__(
        self, recipe: LossRecipe, model: FlashMapDraftModel, target: Target, run: RunRecipe
    ) -> None:
        super().__init__(recipe, model, target, run)
        self.num_draws = recipe.num_draws

    def block_losses(self, step: Step) -> tuple[Tensor, Tensor]:
        """See `Objective`."""
        hidden = self.one_jump(step).unflatten(0, (-1, self.num_draws))
        return self.in_chunks(hidden, step.slots, step.wanted)

    def _judge(
        self, hidden: Tensor, tokens: Tensor, valid: Tensor, wanted: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        logits = self.target.head(hidden)
        flat = tokens[:, None].expand(-1, self.num_draws, -1).flatten(0, 1)
        log_q = -losses.cross_entropy(logits.flatten(0, 1), flat).unflatten(0, (-1, self.num_draws))
        nll, shares = losses.mixture_nll(log_q)
        q = losses.mixture_distribution(logits, shares)
        loss, tv = self.recipe.cross_entropy * nll, None
        if wanted is not None:
            tv = 0.5 * (torch.softmax(wanted.float(), dim=-1) - q).abs().sum(dim=-1)
            loss = loss + self.recipe.total_variation * tv
        right = q.argmax(dim=-1) == tokens
        return self.weigh(loss, nll, valid, tv), statistics(nll, right, valid, tv)
