"""Drafts in several jumps without a tensor of vocabulary size: the noise comes from a bank of draws
that were projected beforehand, and each jump's prediction is its likeliest tokens.

The state that enters jump n is x_n = alpha_n z + sum_m beta_nm delta_m, with noise z and the
predictions delta_m of the jumps before. Its two projections are sums over the vocabulary that
differ from those of the noise alone only at the tokens of the predictions (at time t, with
e = t / (1 - t)^2 and a = t / (1 - t), so that e alpha_n = a):

    softmax(e x_n) E = (W + sum_v rho_v E_v) / (Z + sum_v rho_v),   rho_v = e^(a z_v) (e^(c_v) - 1)
    x_n E            = alpha_n z E + sum_m beta_nm delta_m E,       c_v = e sum_m beta_nm delta_mv

where W and Z are sums of e^(a z_v) E_v and e^(a z_v), which the bank holds with z E. Three things
are approximate: predictions are cut to their likeliest tokens, z at those is drawn anew, the bank
is finite.

Legend: R rows (one a slot), P draws in the bank, V vocabulary, H target hidden width, D drafter
width, L tokens that predictions name.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flashmap.modeling.flow_flashmap import sharpness
from flashmap.modeling.fused_flashmap import Stream, as_uniform, philox
from flashmap.modeling.step_flashmap import Context, FusedStep

_ROWS = 128  # of the bank that are drawn at once


class Bank(NamedTuple):
    """P draws of the noise: z E (P, H), and for each jump after the first W / Z (P, H) and log Z
    (P), float32."""

    noise: Tensor
    means: list[Tensor]
    log_totals: list[Tensor]


def build_bank(embedding: Tensor, times: Sequence[float], size: int) -> Bank:
    """The bank of `embedding` E (V, H) for jumps that begin at `times`, of which the first is 0."""
    generator = torch.Generator(embedding.device).manual_seed(0)
    noise = list[Tensor]()
    means, totals = ([list[Tensor]() for _ in times[1:]] for _ in range(2))
    for begin in range(0, size, _ROWS):
        shape = (min(_ROWS, size - begin), len(embedding))
        z = torch.randn(shape, generator=generator, device=embedding.device)
        noise.append(z.to(embedding.dtype) @ embedding)
        for time, mean, total in zip(times[1:], means, totals, strict=True):
            scores = z * (time / (1.0 - time))
            mean.append(torch.softmax(scores, dim=-1).to(embedding.dtype) @ embedding)
            total.append(torch.logsumexp(scores, dim=-1))
    return Bank(torch.cat(noise), [*map(torch.cat, means)], [*map(torch.cat, totals)])


def coefficients(grid: Sequence[float]) -> list[tuple[float, list[float]]]:
    """alpha_n and beta_nm of the state that enters each jump of a grid."""
    alpha, betas = 1.0, list[float]()
    found = [(alpha, betas)]
    for start, end in pairwise(grid[:-1]):
        kept = (1.0 - end) / (1.0 - start)
        alpha, betas = alpha * kept, [beta * kept for beta in betas]
        betas.append((end - start) / (1.0 - start))
        found.append((alpha, betas))
    return found


def token_noise(seeds: Tensor, positions: Tensor, draws: Tensor, token_ids: Tensor) -> Tensor:
    """The noise of tokens (R, L), float32: columns `token_ids` of `seeded_normal` for `seeds`,
    `positions` and `draws` (R)."""
    zero = torch.zeros_like(positions)
    words = philox(
        token_ids // 4,
        positions.unsqueeze(1),
        draws.unsqueeze(1),
        (zero + int(Stream.NOISE)).unsqueeze(1),
        seeds.unsqueeze(1),
    )
    second = token_ids % 4 >= 2
    radius = torch.sqrt(-2.0 * torch.log(as_uniform(words[0].where(~second, words[2]))))
    angle = as_uniform(words[1].where(~second, words[3])) * (2.0 * math.pi)
    return radius * torch.where(token_ids % 2 == 0, angle.cos(), angle.sin())


class BankedStep(FusedStep):
    """A fused step whose drafts in several jumps take their noise from a bank of `bank_size` draws
    and keep `top` tokens of each prediction; otherwise as `FusedStep`."""

    @torch.no_grad()
    def __init__(
        self,
        model: Any,
        embedding: Tensor,
        lm_head: nn.Module,
        max_length: int,
        *,
        bank_size: int,
        top: int,
        **options: Any,
    ) -> None:
        super().__init__(model, embedding, lm_head, max_length, **options)
        times = [jump.start for jump in self.jumps]
        self._bank = build_bank(embedding, times, bank_size)
        self._coefficients = coefficients([*times, 1.0])
        self._top = min(top, len(self.token_ids))

    @torch.no_grad()
    def hidden(
        self,
        context: Context,
        positions: Tensor,
        *,
        seeds: Tensor | None = None,
        noise: Tensor | None = None,
        num_draws: int = 1,
    ) -> Tensor:
        """See `FusedStep.hidden`; given states instead of seeds are followed exactly."""
        if noise is not None or len(self.jumps) == 1:
            return super().hidden(context, positions, seeds=seeds, noise=noise, num_draws=num_draws)
        assert seeds is not None
        slots = (positions.unsqueeze(1) + self._block).repeat_interleave(num_draws, dim=0)
        rows = slots.flatten()
        block = slots.shape[1]
        seed = seeds.repeat_interleave(num_draws * block)
        draw = torch.arange(num_draws, device=rows.device).repeat_interleave(block)
        draw = draw.repeat(len(positions))
        zero = torch.zeros_like(rows)
        picked = philox(zero, rows, draw, zero + int(Stream.BANK), seed)[0] % len(self._bank.noise)
        embeds = self._bank.noise[picked].to(self._dtype)
        first, *others = self.jumps
        x = self._x_embed(self._gated(embeds, first, self._base))
        hidden = self._transform(x, first, rows, context)
        named, chances = list[Tensor](), list[Tensor]()
        for number, jump in enumerate(others, 1):
            best = torch.softmax(self.logits(hidden).float(), -1).flatten(0, 1).topk(self._top, -1)
            named.append(self.token_ids[best.indices])
            chances.append(best.values)
            tokens = torch.cat(named, dim=1)
            fresh = token_noise(seed, rows, draw, tokens)
            mean, noisy = self.projections(number, picked, tokens, chances, fresh)
            base = self.ops.rms_norm(mean.to(self._dtype), self._state_norm, self._eps)
            x = self._x_embed(self._gated(noisy.to(self._dtype), jump, base))
            hidden = self._transform(x, jump, rows, context)
        return hidden

    def projections(
        self, number: int, picked: Tensor, tokens: Tensor, chances: list[Tensor], noise: Tensor
    ) -> tuple[Tensor, Tensor]:
        """softmax(e x) E and x E, float32 (R, H), of the states that enter jump `number` (from 0).

        `picked` (R) are the bank's draws, `tokens` (R, L) and `chances` (each R, top) the
        predictions so far, `noise` (R, L) is z of those tokens.
        """
        time = self.jumps[number].start
        alpha, betas = self._coefficients[number]
        weights = torch.cat([beta * part for beta, part in zip(betas, chances, strict=True)], 1)
        same = tokens.unsqueeze(2) == tokens.unsqueeze(1)
        place = torch.arange(tokens.shape[1], device=tokens.device)
        listed_before = same.int().argmax(dim=2) < place  # counted where it is listed first
        raised = sharpness(time) * (same * weights.unsqueeze(1)).sum(dim=2)
        # In logarithms, since e^c overflows: rho / Z, and 1 for the bank's own sum.
        score = noise * (time / (1.0 - time)) - self._bank.log_totals[number - 1][picked, None]
        score = score + raised + torch.log(-torch.expm1(-raised))
        score = score.masked_fill(listed_before, -math.inf)
        top = score.amax(dim=1, keepdim=True).clamp(min=0.0)
        added, own = torch.exp(score - top), torch.exp(-top)
        vectors = self.embedding[tokens].float()
        sums = torch.stack((added, weights), dim=1) @ vectors
        mean = own * self._bank.means[number - 1][picked].float() + sums[:, 0]
        mean = mean / (own + added.sum(dim=1, keepdim=True))
        return mean, alpha * self._bank.noise[picked].float() + sums[:, 1]
