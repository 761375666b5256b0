"""What a draft is held against: small functions of logits, each a value a slot, and the weights
that join slots.

Losses are computed in float32 whatever the logits' dtype. Sources: D-PACE (arXiv:2605.18810) for
confidence weights, LK losses (arXiv:2602.23881) and DSpark (arXiv:2607.05147) for the total
variation, which is the chance that sampling rejects a slot.

Legend: G blocks, M noise draws, K slots, V vocabulary.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


def cross_entropy(logits_GKV: Tensor, tokens_GK: Tensor) -> Tensor:
    """-log q(token) of each slot, float32 (G, K)."""
    losses = F.cross_entropy(
        logits_GKV.flatten(0, 1).float(), tokens_GK.flatten(), reduction="none"
    )
    return losses.view(tokens_GK.shape)


def soft_cross_entropy(logits_GKV: Tensor, target_GKV: Tensor) -> Tensor:
    """-sum_v p_v log q_v of each slot against distributions `target_GKV`, float32 (G, K)."""
    log_q = torch.log_softmax(logits_GKV.float(), dim=-1)
    return -(target_GKV.float() * log_q).sum(dim=-1)


def total_variation(logits_GKV: Tensor, target_logits_GKV: Tensor) -> Tensor:
    """Half the sum of |p - q| of each slot, float32 (G, K), in [0, 1]: the share that verification
    at temperature 1 rejects."""
    q = torch.softmax(logits_GKV.float(), dim=-1)
    p = torch.softmax(target_logits_GKV.float(), dim=-1)
    return 0.5 * (p - q).abs().sum(dim=-1)


def exponential_weights(num_slots: int, decay: float, device: torch.device) -> Tensor:
    """exp(-(k - 1) / decay) for the slots k = 1, ..., K, float32 (K)."""
    slots = torch.arange(num_slots, device=device, dtype=torch.float32)
    return torch.exp(-slots / decay)


def d_pace_weights(nll_GK: Tensor, valid_GK: Tensor, confidence: float) -> Tensor:
    """Weights (G, K) by how likely a slot is to be reached: w_j = sum over m >= j of the product of
    c_i over i <= m, with c_i = confidence q_i + 1 - confidence and q_i = exp(-nll_i).

    They carry no gradient. Slots that are not valid end the sum.
    """
    chance = confidence * torch.exp(-nll_GK.detach()) + (1.0 - confidence)
    reached = (chance * valid_GK).cumprod(dim=-1)
    return reached.flip(-1).cumsum(dim=-1).flip(-1) * valid_GK


def acceptance_weights(accepted_GK: Tensor, valid_GK: Tensor) -> Tensor:
    """Weights (G, K) of each slot's rejection under which a sum of slots falls as the expected
    accepted length rises: w_j = sum over m >= j of the product of a_i over i <= m, i != j, the
    derivative of `leading` by the chance a_j.

    They carry no gradient. Slots that are not valid end the sum.
    """
    chance = accepted_GK.detach().clamp(min=1e-3)
    reached = (chance * valid_GK).cumprod(dim=-1)
    return reached.flip(-1).cumsum(dim=-1).flip(-1) / chance * valid_GK


class Mixture(NamedTuple):
    """A mixture of the proposals of several noise draws, slot after slot.

    Attributes:
        nll: -log Q(y_k | y_<k) of the tokens, (G, K).
        shares: weight of each draw at each slot given the tokens before it, (G, M, K).
    """

    nll: Tensor
    shares: Tensor


def mixture_nll(log_q_GMK: Tensor) -> Mixture:
    """Conditionals of Q(y) = mean over m of the product over k of q_m,k(y_k), given log q_m,k(y_k).

    Summed over slots the nll is -log Q(y); one draw gives the cross-entropy.
    """
    before = log_q_GMK.cumsum(dim=-1) - log_q_GMK
    shares = torch.softmax(before, dim=1)
    nll = -torch.logsumexp(before + log_q_GMK, dim=1) + torch.logsumexp(before, dim=1)
    return Mixture(nll, shares)


def mixture_distribution(logits_GMKV: Tensor, shares_GMK: Tensor) -> Tensor:
    """Q(. | y_<k) of each slot, float32 (G, K, V)."""
    total = torch.zeros((), device=logits_GMKV.device)
    for draw in range(logits_GMKV.shape[1]):  # one V-sized distribution alive at a time
        q = torch.softmax(logits_GMKV[:, draw].float(), dim=-1)
        total = total + shares_GMK[:, draw, :, None] * q
    return total


def leading(accepted_GK: Tensor) -> Tensor:
    """Expected number of slots accepted before the first that is not, (G), for chances in
    [0, 1]."""
    return accepted_GK.float().cumprod(dim=-1).sum(dim=-1)


def semigroup_share(s: Tensor, u: Tensor, t: Tensor) -> Tensor:
    """Share g of the semigroup rule for s < u < t: delta_s,t = g delta_s,u + (1 - g) delta_u,t; 0
    at t = 1 (equation 22 of the flow map language model paper)."""
    below = (1.0 - u) * (t - s)
    return ((1.0 - t) * (u - s) / below.clamp(min=1e-6)).clamp(0.0, 1.0)


def move(state: Tensor, delta: Tensor, s: Tensor, t: Tensor) -> Tensor:
    """The state after a jump from s to t: ((1 - t) x + (t - s) delta) / (1 - s) (equation 19)."""
    return ((1.0 - t) * state + (t - s) * delta) / (1.0 - s).clamp(min=1e-6)


def sharpness(s: Tensor) -> Tensor:
    """e(s) = s / (1 - s)^2: a state times e(s) is the logarithm of a slot's posterior."""
    return s / (1.0 - s).clamp(min=1e-3).square()
