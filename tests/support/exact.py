"""The fused operations as float64 formulas, written from the equations alone."""

import torch
from torch import Tensor


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """X / rms(x), times the weight."""
    x = x.double()
    return x / (x.square().mean(dim=-1, keepdim=True) + eps).sqrt() * weight.double()


def layer_norm(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    """(x - mean) / deviation, scaled and shifted."""
    x = x.double()
    x = x - x.mean(dim=-1, keepdim=True)
    x = x / (x.square().mean(dim=-1, keepdim=True) + eps).sqrt()
    return x * scale.double() + shift.double()


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Pairs of the heads of x (R, A, d) as complex numbers, turned by position times frequency."""
    width = x.shape[-1]
    frequency = theta ** (-torch.arange(0, width, 2, device=x.device).double() / width)
    angle = positions.double()[:, None, None] * frequency
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """softmax(q k / sqrt(d)) v for q (N, A, d) and k, v (T, A, d)."""
    score = torch.einsum("nad,tad->ant", query.double(), key.double()) / query.shape[-1] ** 0.5
    return torch.einsum("ant,tad->nad", score.softmax(dim=-1), value.double())


def bank_projections(
    own: Tensor, fresh: Tensor, delta: Tensor, named: set[int], embedding: Tensor, time: float
) -> tuple[Tensor, Tensor]:
    """softmax(e x) E and x E of one state x = (1 - t) z + delta that begins a jump at time t.

    `own` (V) is the z of the bank's sums, `fresh` (V) that of the tokens `named`, one term a token.
    """
    own, fresh, delta, embedding = (x.double() for x in (own, fresh, delta, embedding))
    odds, sharp = time / (1 - time), time / (1 - time) ** 2
    terms = (odds * own).exp()
    above, below = terms @ embedding, terms.sum()
    for token in named:
        more = (odds * fresh[token]).exp() * ((sharp * delta[token]).exp() - 1)
        above, below = above + more * embedding[token], below + more
    return above / below, ((1 - time) * own + delta) @ embedding
