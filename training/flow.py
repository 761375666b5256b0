"""Objectives of a flow map, in the two stages of flow map language models.

- Flow: the denoiser of a noisy state at a random time, by cross-entropy.
- Distillation: the map itself. A jump must equal the two jumps it is made of (the semigroup rule,
  equations 19 and 22), and on the diagonal, where it has no length, the denoiser of stage 1.

Times are drawn evenly in the accuracy of the schedule, where a state becomes readable, not in
physical time; the network is told physical times.

Legend: B documents, N anchors of a document, G = B N blocks, K slots, H target hidden width, V
vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from flashmap import schedule
from flashmap.modeling.modeling_flashmap import FlashMapDraftModel

from . import losses
from .blocks import Context, Target
from .objectives import Objective, Step, statistics
from .recipe import LossRecipe, RunRecipe

TIME_ENTRIES = 4097


class Flow(Objective):
    """Stage 1: the denoiser, by cross-entropy at random times on the diagonal s = t."""

    def __init__(
        self, recipe: LossRecipe, model: FlashMapDraftModel, target: Target, run: RunRecipe
    ) -> None:
        super().__init__(recipe, model, target, run)
        table = schedule.time_table(model.config.vocab_size, TIME_ENTRIES)
        self.times = table.to(target.embedding.device)

    def block_losses(self, step: Step) -> tuple[Tensor, Tensor]:
        """See `Objective`."""
        s = self.time(self.accuracies(len(step.slots.tokens)))
        state = self.noisy(step.slots.tokens, s)
        hidden = self.jump(self.model, state, s, s, step.slots.positions, self.context(step))
        return self.in_chunks(hidden, step.slots, step.wanted)

    def accuracies(self, count: int) -> Tensor:
        """Stratified draws from [0, 1] in random order, (count)."""
        device = self.times.device
        places = torch.arange(count, device=device) + torch.rand(1, device=device)
        return (places / count % 1.0)[torch.rand(count, device=device).argsort()]

    def time(self, accuracies: Tensor) -> Tensor:
        """Times of accuracies, some of the way towards even ones so that the ends are seen too."""
        share = self.recipe.uniform_times
        return (1.0 - share) * schedule.interpolate(self.times, accuracies) + share * accuracies

    def noisy(self, tokens: Tensor, s: Tensor) -> Tensor:
        """States x_s = (1 - s) noise + s onehot(tokens), float32 (G, K, V), for times (G)."""
        rest, share = (1.0 - s)[:, None, None], s[:, None, None]
        shape = (*tokens.shape, self.model.config.vocab_size)
        state = torch.randn(shape, device=tokens.device) * rest
        return state.scatter_add(2, tokens[..., None], share.expand(*tokens.shape, 1))

    def jump(
        self,
        model: FlashMapDraftModel,
        state: Tensor,
        s: Tensor,
        t: Tensor,
        positions: Tensor,
        context: Context,
    ) -> Tensor:
        """Outputs (G, K, H) of the jumps from `s` to `t` (G) of states (G, K, V)."""
        embedding = self.target.embedding
        start, end = s[:, None, None], t[:, None, None]
        posterior = torch.softmax(state * losses.sharpness(start), dim=-1).to(embedding.dtype)
        inputs = model.mix_state(
            posterior @ embedding, state.to(embedding.dtype) @ embedding, start, end
        )
        hidden: Tensor = model(inputs, model.time_conditioning(s, t), positions, *context)
        return hidden

    def _judge(
        self, hidden: Tensor, tokens: Tensor, valid: Tensor, wanted: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        logits = self.target.head(hidden)
        nll = losses.cross_entropy(logits, tokens)
        right = logits.argmax(dim=-1) == tokens
        tv = None if wanted is None else losses.total_variation(logits, wanted)
        return self.weigh(nll, nll, valid), statistics(nll, right, valid, tv)


class Jump(NamedTuple):
    """Jumps of blocks, each (G): start, middle and end time, and whether start and end are one."""

    s: Tensor
    u: Tensor
    t: Tensor
    diagonal: Tensor


class Distillation(Flow):
    """Stage 2: a jump from s to t must equal the jumps s to u and u to t one after the other."""

    def __init__(
        self,
        recipe: LossRecipe,
        model: FlashMapDraftModel,
        target: Target,
        run: RunRecipe,
        teacher: FlashMapDraftModel,
    ) -> None:
        super().__init__(recipe, model, target, run)
        self.teacher = teacher

    def block_losses(self, step: Step) -> tuple[Tensor, Tensor]:
        """See `Objective`."""
        slots, context = step.slots, self.context(step)
        jump = self.times_of(step.blocks.anchors.shape)
        state = self.noisy(slots.tokens, jump.s)
        goal = self.goal(state, jump, step, context)
        hidden = self.jump(self.model, state, jump.s, jump.t, slots.positions, context)
        return self.in_chunks(hidden, slots, goal)

    def _judge(
        self, hidden: Tensor, tokens: Tensor, valid: Tensor, wanted: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        assert wanted is not None
        logits = self.target.head(hidden)
        nll = losses.cross_entropy(logits, tokens)
        loss = losses.soft_cross_entropy(logits, wanted)
        right = logits.argmax(dim=-1) == tokens
        return self.weigh(loss, nll, valid), statistics(nll, right, valid, None)

    def times_of(self, shape: torch.Size) -> Jump:
        """The jump of each block.

        Fixed shares of every document's blocks lie on the diagonal and jump all the way.
        """
        batch, num_anchors = shape
        device, count = self.times.device, batch * num_anchors
        index = torch.arange(num_anchors, device=device).repeat(batch)
        num_diagonal = round(self.recipe.diagonal_share * num_anchors)
        num_boundary = round(self.recipe.boundary_share * num_anchors)
        diagonal = index < num_diagonal
        boundary = (index >= num_diagonal) & (index < num_diagonal + num_boundary)
        length = self.accuracies(count)
        start = torch.rand(count, device=device) * (1.0 - length)
        length = torch.where(diagonal, 0.0, torch.where(boundary, 1.0, length))
        start = torch.where(diagonal, self.accuracies(count), torch.where(boundary, 0.0, start))
        s, u, t = (self.time(start + part * length) for part in (0.0, 0.5, 1.0))
        return Jump(s, u, torch.where(diagonal, s, t), diagonal)

    @torch.no_grad()
    def goal(self, state: Tensor, jump: Jump, step: Step, context: Context) -> Tensor:
        """Distributions (G, K, V) that the jumps should give: the drafter's own two half jumps, or
        the teacher's denoiser on the diagonal."""

        def delta(
            model: FlashMapDraftModel, x: Tensor, start: Tensor, end: Tensor, seen: Context
        ) -> Tensor:
            hidden = self.jump(model, x, start, end, step.slots.positions, seen)
            return torch.softmax(self.target.head(hidden).float(), dim=-1)

        s, u, t, diagonal = (time[:, None, None] for time in jump)
        first = delta(self.model, state, jump.s, jump.u, context)
        middle = losses.move(state, first, s, u)
        second = delta(self.model, middle, jump.u, jump.t, context)
        share = losses.semigroup_share(s, u, t)
        taught = delta(self.teacher, state, jump.s, jump.s, self.context(step, self.teacher))
        return torch.where(diagonal, taught, share * first + (1.0 - share) * second)
