"""What a drafting step computes once from the weights: fewer and smaller products at run time.

A fold is a snapshot: it does not follow weights that are edited, moved or trained afterwards.

Legend: V vocabulary, S draft vocabulary, H target hidden width, D drafter width, L layers, d head
width.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .constants_flashmap import gram_matrix
from .linear_flashmap import Linear
from .target_flashmap import weight_dtype

_HEAD_ROWS = 8192
MakeLinear = Callable[[Tensor, Tensor | None], Linear]


class LayerFold(NamedTuple):
    """One DiT layer: its linear layers (`qkv` gives (3, A, d)) and the weights (d) of its norms."""

    qkv: Linear
    self_o: Linear
    cross_q: Linear
    cross_o: Linear
    fc1: Linear
    fc2: Linear
    q_norm: Tensor
    k_norm: Tensor
    cross_q_norm: Tensor


class JumpFold(NamedTuple):
    """One jump's constants: (1 + scale, shift) of all 3 L + 1 norms and the 3 L gates between them,
    in the order they are applied, each (D); and the noise's gate (1)."""

    start: float
    end: float
    norms: list[tuple[Tensor, Tensor]]
    gates: list[Tensor]
    noise_gate: Tensor


class NoiseFold(NamedTuple):
    """The first jump's input straight from z ~ N(0, 1) in the target's hidden width: see
    `noise_fold`."""

    matrix: Linear
    spread: Tensor
    base: Tensor


def layer_fold(layer: Any, linear: MakeLinear) -> LayerFold:
    """The fold of one DiT layer, its query, key and value products joined."""
    own, cross, mlp = layer.self_attn, layer.cross_attn, layer.mlp
    qkv = torch.cat((own.q_proj.weight, own.k_proj.weight, own.v_proj.weight))
    return LayerFold(
        qkv=linear(qkv, None),
        self_o=linear(own.o_proj.weight, None),
        cross_q=linear(cross.q_proj.weight, None),
        cross_o=linear(cross.o_proj.weight, None),
        fc1=linear(mlp.fc1.weight, mlp.fc1.bias),
        fc2=linear(mlp.fc2.weight, mlp.fc2.bias),
        q_norm=own.q_norm.weight,
        k_norm=own.k_norm.weight,
        cross_q_norm=cross.q_norm.weight,
    )


def context_fold(layers: Any) -> tuple[Tensor, Tensor]:
    """Key and value weights of every layer's cross-attention in one matrix (L 2 D, D), and the
    weights (L, d) of their key norms."""
    attentions = [layer.cross_attn for layer in layers]
    weights = [
        projection.weight for cross in attentions for projection in (cross.k_proj, cross.v_proj)
    ]
    return torch.cat(weights), torch.stack([cross.k_norm.weight for cross in attentions])


def draft_tokens(token_ids: Tensor | None, config: Any, device: torch.device) -> Tensor:
    """The tokens (S) that may be drafted, int64 on `device`: those given, or all.

    Raises:
        ValueError: they are not increasing ids of the drafter's vocabulary.
    """
    everything = torch.arange(config.vocab_size, device=device)
    if token_ids is None:
        return everything
    tokens = token_ids.to(device)
    if tokens.dim() != 1 or len(tokens) == 0 or tokens.is_floating_point():
        raise ValueError(
            f"token_ids is {tokens.dtype} of shape {tuple(tokens.shape)}, expected the ids of the"
            " tokens that may be drafted, shape (number,)."
        )
    inside = int(tokens[0]) >= 0 and int(tokens[-1]) < config.vocab_size
    if not inside or not bool((tokens[1:] > tokens[:-1]).all()):
        raise ValueError(
            f"token_ids must increase and lie in 0 .. {config.vocab_size - 1}, the drafter's"
            " vocabulary: sort them and drop what is beyond."
        )
    return tokens.long()


def head_fold(head: nn.Linear, lm_head: nn.Module, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Weight (S, D) and bias (S) of the drafter's `head` followed by rows `token_ids` (S) of the
    target's `lm_head`: nothing lies between the two.

    Products are float32 and round once to the dtype of `lm_head`, which moves bfloat16 logits by a
    rounding step.

    Raises:
        ValueError: the target's head is no linear layer with plain numbers, or lacks a token.
    """
    if not isinstance(lm_head, nn.Linear) or weight_dtype(lm_head) is None:
        raise ValueError(
            f"The target's vocabulary head ({type(lm_head).__name__}) is not a linear layer with"
            " unquantised weights, so it cannot be folded into the drafter's: draft without the"
            " fused step, or load the target with its head unquantised."
        )
    if lm_head.out_features <= int(token_ids[-1]):
        raise ValueError(
            f"The target's vocabulary head gives {lm_head.out_features} logits and the drafter"
            f" drafts tokens up to {int(token_ids[-1])}: it was trained for another target."
        )
    weights, biases = [], []
    for rows in token_ids.split(_HEAD_ROWS):
        chunk = lm_head.weight[rows].float()
        bias = chunk @ head.bias.float()
        if lm_head.bias is not None:
            bias = bias + lm_head.bias[rows].float()
        weights.append((chunk @ head.weight.float()).to(lm_head.weight.dtype))
        biases.append(bias.to(lm_head.weight.dtype))
    return torch.cat(weights), torch.cat(biases)


def jump_folds(model: Any, grid: list[float]) -> list[JumpFold]:
    """The constants of each jump of a grid, rounded as the model rounds them."""
    folds = []
    for start, end in pairwise(grid):
        per_layer, final = model.time_conditioning(start, end)
        modulations = [modulation for layer in per_layer for modulation in layer]
        norms = [((1 + one.scale).flatten(), one.shift.flatten()) for one in (*modulations, final)]
        gates = [one.gate.flatten() for one in modulations]
        folds.append(JumpFold(start, end, norms, gates, model.jump_gate(start, end)))
    return folds


def noise_fold(model: Any, embedding: Tensor, base: Tensor, linear: MakeLinear) -> NoiseFold:
    """The first input of a one-jump draft as a function of z (H), without its noise's factor.

    With E^T E = Q diag(lambda) Q^T, y = z diag(sqrt(lambda)) Q^T has covariance E^T E and
    |y|^2 = sum lambda_i z_i^2, so x_embed(noise_norm(y)) = r M z + bias with
    M = W_x diag(w) Q diag(sqrt(lambda)) and r = (sum lambda_i z_i^2 / H + eps)^-1/2.
    `matrix` is M (D, H), `spread` lambda / H (H), float32, and `base` (D) what does not depend on
    z, from `base` (1, H), the normed mean row.
    """
    values, vectors = torch.linalg.eigh(gram_matrix(embedding))
    values = values.clamp(min=0.0)
    weight = model.x_embed.weight.double().cpu() * model.noise_norm.weight.double().cpu()
    matrix = (weight @ (vectors * values.sqrt())).to(base.device, base.dtype)
    spread = (values / len(values)).to(base.device, torch.float32)
    return NoiseFold(linear(matrix, None), spread, model.x_embed(base).flatten())
