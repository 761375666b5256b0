"""Which drafts are accepted and which token follows them, for a batch and without a word of the
host: a sampler's decisions as tensors, token for token.

Legend: B sequences, K slots, V vocabulary of the target's head, T positions, a accepted drafts.
"""

import torch
from torch import Tensor

from .fused_flashmap import Stream, philox
from .sampling_flashmap import Sampling, draw, residual

STREAMS = (Stream.DRAFT, Stream.ACCEPT, Stream.BONUS)


def coin_table(seeds: Tensor, num_positions: int) -> Tensor:
    """`coin` of every seed (B), position below T and stream of `STREAMS`: float64 (3, B, T)."""
    device = seeds.device
    zero = torch.zeros((), dtype=torch.long, device=device)
    streams = torch.tensor([int(stream) for stream in STREAMS], device=device)
    x0, x1, _, _ = philox(
        zero, torch.arange(num_positions, device=device), zero, streams[:, None, None],
        seeds[:, None],
    )  # fmt: skip
    return (((x0 << 20) + (x1 >> 12)).double() + 0.5) * 2.0**-52


def judge_greedily(drafts: Tensor, logits: Tensor, depths: Tensor) -> tuple[Tensor, Tensor]:
    """Accepted drafts (B) and the token after them (B), where the likeliest tokens of `logits` (B,
    K + 1, V) are taken; of the drafts (B, K) the first `depths` (B) count."""
    best = logits.argmax(dim=-1)
    accepted = _run_length(best[:, :-1] == drafts, depths)
    return accepted, _pick(best, accepted)


def judge(
    sampling: Sampling, drafts: Tensor, q_BKV: Tensor, logits: Tensor, depths: Tensor, coins: Tensor
) -> tuple[Tensor, Tensor]:
    """The same where tokens are sampled and drafts were drawn from `q_BKV`; `coins` (2, B, K + 1)
    are those of ACCEPT and BONUS at the positions after the anchors."""
    p = sampling.probabilities(logits)
    places = drafts.unsqueeze(-1)
    chance_q, chance_p = q_BKV.gather(-1, places), p[:, :-1].gather(-1, places)
    better = coins[0, :, :-1] * chance_q.squeeze(-1).double() < chance_p.squeeze(-1).double()
    accepted = _run_length(better, depths)
    p_a = _pick(p, accepted)
    q_a = _pick(q_BKV, accepted.clamp(max=drafts.shape[1] - 1))
    weights = torch.where((accepted < depths).unsqueeze(-1), residual(p_a, q_a), p_a)
    return accepted, draw(weights, _pick(coins[1], accepted).unsqueeze(-1))


def _run_length(good: Tensor, depths: Tensor) -> Tensor:
    """How many slots (B, K) are good before the first that is not, or that lies too deep."""
    slots = torch.arange(good.shape[1], device=good.device)
    return (good & (slots < depths.unsqueeze(1))).int().cumprod(dim=1).sum(dim=1)


def _pick(rows: Tensor, places: Tensor) -> Tensor:
    """One of each sequence's `rows` (B, m, ...), at its place (B)."""
    return rows[torch.arange(len(rows), device=rows.device), places]
