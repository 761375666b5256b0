"""The diffusion transformer (DiT) of the drafter: time conditioning, adaptive layer norms,
attention and MLP.

A layer runs self-attention inside the block, cross-attention onto the context, and an MLP, each
under an adaptive layer norm (Peebles and Xie, "Scalable Diffusion Models with Transformers", 2023).
Roundings follow the order in which the weights were trained; the golden tests hold them in place.

Legend: G blocks, K slots of a block, D drafter width, A heads, d head width, T context entries, S
context rows (the G blocks share S context rows evenly, G / S neighbouring blocks a row), C width of
the time conditioning.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .configuration_flashmap import FlashMapConfig
from .fused_flashmap import apply_rope, rms_norm
from .reference_flashmap import adaln

Rope = tuple[Tensor, Tensor]


class Modulation(NamedTuple):
    """What an adaptive layer norm does at one pair of times: each (1, 1, D), or (G, 1, D) with
    times of its own a block.
    """

    scale: Tensor
    shift: Tensor
    gate: Tensor


class RMSNorm(nn.Module):
    """Root-mean-square norm with a weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of `x`."""
        return rms_norm(x, self.weight, self.eps)


class TimeEmbedding(nn.Module):
    """Sinusoids of a time in [0, 1], followed by a two-layer perceptron."""

    def __init__(self, config: FlashMapConfig) -> None:
        super().__init__()
        self.num_features = config.time_embed_dim
        self.time_scale = config.time_scale
        self.linear_1 = nn.Linear(config.time_embed_dim, config.cond_dim)
        self.linear_2 = nn.Linear(config.cond_dim, config.cond_dim)

    def forward(self, time: Tensor) -> Tensor:
        """Embed float32 times (...) as (..., C)."""
        half = self.num_features // 2
        exponents = torch.arange(half, device=time.device, dtype=torch.float32) / half
        angles = (time.unsqueeze(-1) * self.time_scale) * torch.exp(-math.log(10000.0) * exponents)
        features = torch.cat((angles.cos(), angles.sin()), dim=-1).to(self.linear_1.weight.dtype)
        embedded: Tensor = self.linear_2(F.silu(self.linear_1(features)))
        return embedded


class ZeroLinear(nn.Linear):
    """Linear layer that training starts at zero, so that a new DiT layer starts as the identity."""


class AdaLN(nn.Module):
    """Adaptive layer norm: a layer norm without weights of its own, scaled and shifted by the time
    conditioning.
    """

    def __init__(self, config: FlashMapConfig) -> None:
        super().__init__()
        self.linear = ZeroLinear(config.cond_dim, 3 * config.hidden_size)
        self.eps = config.layer_norm_eps

    def modulation(self, condition: Tensor) -> Modulation:
        """Scale, shift and gate for a time conditioning (..., C)."""
        return Modulation(*self.linear(F.silu(condition)).chunk(3, dim=-1))

    def forward(self, x: Tensor, modulation: Modulation) -> Tensor:
        """Norm `x` (G, K, D), then scale by 1 + scale and shift."""
        return adaln(x, 1 + modulation.scale, modulation.shift, self.eps)


class Attention(nn.Module):
    """Multi-head attention with normed, rotated queries and keys; the block's own and the context's
    differ only in keys.
    """

    def __init__(self, config: FlashMapConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.q_proj = nn.Linear(size, size, bias=False)
        self.k_proj = nn.Linear(size, size, bias=False)
        self.v_proj = nn.Linear(size, size, bias=False)
        self.o_proj = nn.Linear(size, size, bias=False)
        self.q_norm = RMSNorm(config.head_size, config.qk_norm_eps)
        self.k_norm = RMSNorm(config.head_size, config.qk_norm_eps)

    def query(self, x: Tensor, rope: Rope) -> Tensor:
        """Queries (G, A, K, d) of `x` (G, K, D)."""
        return apply_rope(self.q_norm(self._split(self.q_proj(x))), *rope).transpose(1, 2)

    def key_value(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Keys and values, each (..., A, T, d), of `x` (..., T, D)."""
        key = apply_rope(self.k_norm(self._split(self.k_proj(x))), *rope)
        return key.transpose(1, 2), self._split(self.v_proj(x)).transpose(1, 2)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """Attend from `query` (G, A, K, d) to `key` and `value` (S, A, T, d), S dividing G.

        `mask` is boolean, (S, 1, G / S * K, T), True where a query may look. The result is
        projected, (G, K, D).
        """
        num_blocks, num_heads, block_size, head_size = query.shape
        rows = key.shape[0]
        if rows != num_blocks:  # neighbouring blocks share a context row: one longer query each
            query = query.unflatten(0, (rows, -1)).transpose(1, 2).flatten(2, 3)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        if rows != num_blocks:
            out = out.unflatten(2, (-1, block_size)).transpose(1, 2).flatten(0, 1)
        out = out.transpose(1, 2).reshape(num_blocks, block_size, num_heads * head_size)
        projected: Tensor = self.o_proj(out)
        return projected

    def _split(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (self.num_heads, -1))
        return heads


class Mlp(nn.Module):
    """Two linear layers around the exact (erf) GELU."""

    def __init__(self, config: FlashMapConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Transform the last dimension of `x`."""
        transformed: Tensor = self.fc2(F.gelu(self.fc1(x)))
        return transformed


class FlashMapLayer(nn.Module):
    """One DiT layer: self-attention, cross-attention, MLP, each gated by the time conditioning."""

    def __init__(self, config: FlashMapConfig) -> None:
        super().__init__()
        self.self_attn_adaln = AdaLN(config)
        self.self_attn = Attention(config)
        self.cross_attn_adaln = AdaLN(config)
        self.cross_attn = Attention(config)
        self.mlp_adaln = AdaLN(config)
        self.mlp = Mlp(config)

    def modulations(self, condition: Tensor) -> tuple[Modulation, Modulation, Modulation]:
        """Modulations of the layer's three norms, in the order they are applied."""
        return (
            self.self_attn_adaln.modulation(condition),
            self.cross_attn_adaln.modulation(condition),
            self.mlp_adaln.modulation(condition),
        )

    def forward(
        self,
        x: Tensor,
        modulations: tuple[Modulation, Modulation, Modulation],
        rope: Rope,
        context: tuple[Tensor, Tensor],
        context_mask: Tensor | None = None,
    ) -> Tensor:
        """Transform blocks `x` (G, K, D), given the layer's context keys and values, each (S, A, T,
        d).
        """
        for_self, for_cross, for_mlp = modulations
        h = self.self_attn_adaln(x, for_self)
        query, (key, value) = self.self_attn.query(h, rope), self.self_attn.key_value(h, rope)
        x = x + for_self.gate * self.self_attn.attend(query, key, value)
        h = self.cross_attn_adaln(x, for_cross)
        query = self.cross_attn.query(h, rope)
        x = x + for_cross.gate * self.cross_attn.attend(query, *context, context_mask)
        transformed: Tensor = x + for_mlp.gate * self.mlp(self.mlp_adaln(x, for_mlp))
        return transformed
