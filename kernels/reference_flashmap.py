"""The fused operations of a round in plain PyTorch: what each one computes and in which order it
rounds. The Triton versions are held to these, and these to float64.

None of them waits for the device, so a step made of them can be captured in a CUDA graph. A rotary
table is a pair (cosines, sines), float32 (P, d / 2), a row a position.

Legend: B sequences, G blocks (M noise draws a sequence: G = B M), K slots, m tokens of a target's
pass, R rows of a step, T context entries, L layers, A heads, d head width, C columns, V vocabulary,
H target hidden width, P draws in a bank of noise, N tokens that predictions name.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .flow_flashmap import advance, sharpness
from .fused_flashmap import Stream, apply_rope, philox, rms_norm, seeded_normal, seeded_normal_at

Rope = tuple[Tensor, Tensor]
FP8_MAX = 448.0  # largest number of float8_e4m3fn


class KvLayout(NamedTuple):
    """Where a context keeps its keys and values; entries are addressed by slot.

    `keys[l]` and `values[l]` are views (blocks, page, A, d) of layer l's cache: slot s is row
    s % page of block s // page. `offsets` (L, 2) is how many elements keys and values of each layer
    begin after `keys[0]`, so that one pointer and one launch reach every layer.
    """

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    offsets: Tensor


def kv_layout(keys: Sequence[Tensor], values: Sequence[Tensor]) -> KvLayout:
    """The layout of caches with one key and one value view (blocks, page, A, d) a layer.

    It waits for the device, so make it before a graph is captured; make it anew when a cache moves.

    Raises:
        ValueError: the layers differ in shape, strides, dtype or device, or a head's numbers are
            not side by side.
    """
    for views in (keys, values):
        kinds = {(view.shape, view.stride(), view.dtype, view.device) for view in views}
        if len(kinds) != 1 or views[0].dim() != 4 or views[0].stride(3) != 1:
            raise ValueError(
                f"A context's layers must share one layout (blocks, page, heads, head width) with"
                f" the head's numbers side by side, found {sorted(map(str, kinds))}."
            )
    start, size = keys[0].data_ptr(), keys[0].element_size()
    offsets = [
        [(view.data_ptr() - start) // size for view in layer]
        for layer in zip(keys, values, strict=True)
    ]
    return KvLayout(keys, values, torch.tensor(offsets, device=keys[0].device))


def target_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` in the rounding order of transformers' targets: x rsqrt(mean(x^2) + eps) rounds to
    the dtype of `x` before it meets `weight`, and the product rounds once more."""
    numbers = x.float()
    normal = numbers * torch.rsqrt(numbers.square().mean(dim=-1, keepdim=True) + eps)
    return weight * normal.to(x.dtype)


def gated_norm(x: Tensor, weight: Tensor, eps: float, gate: Tensor, base: Tensor) -> Tensor:
    """The drafter's input from noise `x` (R, C): base + gate * rms_norm(x), with `base` (1, C) or
    (R, C) and one number `gate`. Norm, product and sum each round to the dtype of `x`."""
    return base + gate * rms_norm(x, weight, eps)


def adaln(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    """Layer norm of `x` (..., C) without weights, times `scale` (which holds 1 + scale), plus
    `shift`. Norm (float32 inside), product and sum each round to the dtype of `x`."""
    return F.layer_norm(x, x.shape[-1:], eps=eps) * scale + shift


def gated_adaln(
    x: Tensor, branch: Tensor, gate: Tensor, scale: Tensor, shift: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The residual sum y = x + gate * branch of (R, C), and `adaln` of it for the next branch.
    Product and sum each round to the dtype of `x`."""
    total = x + gate * branch
    return total, adaln(total, scale, shift, eps)


def norm_rope(x: Tensor, weight: Tensor, eps: float, rope: Rope, positions: Tensor) -> Tensor:
    """`rms_norm` of each head of `x` (R, A, d), rotated to its row's position (R). The norm rounds
    as `rms_norm` does; the rotation is float32 and rounds once."""
    cos, sin = rope
    return apply_rope(rms_norm(x, weight, eps), cos[positions], sin[positions])


def block_attention(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, rope: Rope, positions: Tensor
) -> Tensor:
    """Self-attention inside each block, every slot onto every slot: (G, K, A, d).

    `qkv` is (G, K, 3, A, d); queries and keys go through `norm_rope` at `positions` (G K). Scores
    are float32, times d^-1/2; p = exp(score - largest) is float32 and rounds to the dtype of `qkv`
    before it meets the values; the product is divided by the float32 sum of p and rounds once.
    """
    heads = qkv.flatten(0, 1)
    query = norm_rope(heads[:, 0], q_weight, eps, rope, positions).view_as(qkv[:, :, 0])
    key = norm_rope(heads[:, 1], k_weight, eps, rope, positions).view_as(qkv[:, :, 1])
    out = F.scaled_dot_product_attention(
        query.transpose(1, 2), key.transpose(1, 2), qkv[:, :, 2].transpose(1, 2)
    )
    return out.transpose(1, 2)


def context_attention(
    query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, causal: bool = False
) -> Tensor:
    """Attention of `query` (G, K, A, d) onto the entries 0 .. lengths[b] of the context: the
    committed ones and the anchor's, (G, K, A, d).

    `key` and `value` are (B, A or a divisor of it, T, d), `lengths` (B); neighbouring blocks share
    a sequence, and neighbouring heads share keys. With `causal`, slot k = 0, 1, ... sees the
    entries 0 .. lengths[b] + k. Rounds as `block_attention` does.
    """
    split = query.unflatten(0, (key.shape[0], -1)).unflatten(3, (key.shape[1], -1))
    rows = split.permute(0, 3, 1, 4, 2, 5)  # (B, heads of keys, blocks, heads of one key, K, d)
    places = torch.arange(key.shape[2], device=key.device)
    last = lengths.unsqueeze(1)
    if causal:
        last = last + torch.arange(query.shape[1], device=key.device)
    num_rows = rows[0, 0, ..., 0].numel()
    visible = places <= last.repeat(1, num_rows // last.shape[1])[:, None, :, None]
    out = F.scaled_dot_product_attention(rows.flatten(2, 4), key, value, attn_mask=visible)
    return out.view(rows.shape).permute(0, 2, 4, 1, 3, 5).reshape(query.shape)


def write_context(
    kv: Tensor,
    positions: Tensor,
    slots: Tensor,
    weight: Tensor,
    eps: float,
    rope: Rope,
    layout: KvLayout,
    scales: Tensor | None = None,
) -> None:
    """Write keys and values of context rows into the cache of every layer, in place.

    `kv` is (T, L, 2, A, d): projected, neither normed nor rotated. Keys go through `norm_rope` with
    `weight` (L, d) at `positions` (T); the rotated float32 number is stored in the cache's dtype
    without a rounding between. In a float8_e4m3fn cache both are divided by `scales` (L, 2;
    None: 1) first. Rows with a slot below 0 are skipped.
    """
    if len(slots) == 0:
        return
    # A skipped row repeats a kept one, as dropping it would make the host wait for its number.
    kept = slots >= 0
    rows = torch.where(kept, torch.arange(len(slots), device=slots.device), kept.int().argmax())
    kv, places, kept = kv[rows], slots[rows].clamp(min=0), kept[rows, None, None]
    cos, sin = (table[positions[rows]] for table in rope)
    page = layout.keys[0].shape[1]
    for layer, caches in enumerate(zip(layout.keys, layout.values, strict=True)):
        key = apply_rope(rms_norm(kv[:, layer, 0], weight[layer], eps).float(), cos, sin)
        for part, (new, cache) in enumerate(zip((key, kv[:, layer, 1]), caches, strict=True)):
            if cache.dtype == torch.float8_e4m3fn:
                scale = 1.0 if scales is None else scales[layer, part]
                new = (new.float() / scale).clamp(-FP8_MAX, FP8_MAX)
                # Bytes, because PyTorch cannot index float8 on every device.
                new, cache = new.to(cache.dtype).view(torch.uint8), cache.view(torch.uint8)
            block, row = places // page, places % page
            cache[block, row] = torch.where(kept, new.to(cache.dtype), cache[block, row])


def linears(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    """Products x W^T + b of `x` (..., in) with several weights (out, in), each rounded once. Their
    rows may lie apart in memory, the numbers of one do not."""
    return [F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]


def add_linear(base: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`base` (..., out) plus the product of `x` with a weight; the product rounds, then the sum."""
    return base + F.linear(x, weight, bias)


def gated_linear(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """silu(x G^T) * (x U^T) of `x` (..., in) and two weights (out, in). Both products, the silu and
    the last product round to the dtype of `x`."""
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def _quarter_turn(x: Tensor) -> Tensor:
    """Numbers of the second half, negated, then those of the first."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat((-high, low), dim=-1)


def rotate_into(
    qkv: Sequence[Tensor],
    norms: Sequence[Tensor] | None,
    eps: float,
    rope: Rope,
    places: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """Queries (B, m, A, d) of a target's pass, rotated, its rotated keys and its values written
    into a cache.

    `qkv` is (B, m, A d), (B, m, A' d) and again, as `linears` gives them; `keys` and `values`
    (B, A', T, d) are written at `places` (B, m). `norms` are the weights (d) of a `target_norm` of
    queries and one of keys; None: there is none. `rope`, cosines and sines (B or 1, m, d) in the
    dtype of the numbers, turns number i with number i + d / 2; each product and their sum rounds.
    """
    dim = keys.shape[3]
    parts: list[Tensor] = [part.unflatten(2, (-1, dim)) for part in qkv]
    query, key, value = parts
    if norms is not None:
        query, key = (
            target_norm(x, norm, eps) for x, norm in zip((query, key), norms, strict=True)
        )
    cos, sin = (table.unsqueeze(2) for table in rope)
    query, key = (x * cos + _quarter_turn(x) * sin for x in (query, key))
    for cache, new in ((keys, key), (values, value)):
        entry = new.transpose(1, 2)
        cache.scatter_(2, places[:, None, :, None].expand_as(entry), entry)
    return query


def block_noise(
    seeds: Tensor, positions: Tensor, num_columns: int, num_draws: int, dtype: torch.dtype
) -> Tensor:
    """`seeded_normal` noise of M draws a sequence, side by side: (B M, K, C), drawn in float32 and
    rounded to `dtype`, for `seeds` (B) and `positions` (B, K)."""
    draws = [seeded_normal(seeds, positions, num_columns, draw) for draw in range(num_draws)]
    return torch.stack(draws, dim=1).flatten(0, 1).to(dtype)


def next_state(
    state: Tensor, logits: Tensor, start: float, end: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The float32 `state` (R, V) after a jump that predicted softmax(logits), and what the next one
    projects, (2 R, V): its posterior softmax(e x), then the state, both rounded to `dtype` once."""
    state = advance(state, torch.softmax(logits.float(), dim=-1), start, end)
    posterior = torch.softmax(state * sharpness(end), dim=-1)
    return state, torch.cat((posterior.to(dtype), state.to(dtype)))


def bank_rows(seeds: Tensor, positions: Tensor, num_draws: int, size: int) -> Tensor:
    """Which of a bank's `size` draws each row (R = B M K) of `block_noise` takes, int64: the first
    word of its seed, position and draw in the BANK stream, modulo `size`."""
    seed, position, draw = _row_counters(seeds, positions, num_draws)
    zero = torch.zeros_like(position)
    return philox(zero, position, draw, zero + int(Stream.BANK), seed)[0] % size


def bank_inputs(
    draws: tuple[Tensor, Tensor, Tensor],
    embedding: Tensor,
    picked: Tensor,
    named: tuple[Tensor, Tensor],
    counters: tuple[Tensor, Tensor, int],
    start: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """softmax(e x) E and x E, each (R, H), of states x = (1 - t) z + delta that begin a jump at the
    time t = `start`, where z is a bank's and delta is 0 but at a few tokens.

    `draws` are the bank's z E (P, H), W / Z (P, H) and log Z (P), see `NoiseBank`, of which each
    row has `picked` (R) one; `named` are tokens (R, N) and the weights (R, N) that add up to delta.
    At those tokens the noise is that of `block_noise` for `counters`: seeds (B), positions (B, K)
    and number of draws. With a = t / (1 - t), c = e delta and rho = e^(a z) (e^c - 1), each token
    once, the results are (W + sum rho E) / (Z + sum rho) and (1 - t) z E + sum delta E: float32,
    in units of Z and of the largest weight, rounded once to `dtype`.
    """
    noise, mean, log_total = (values[picked] for values in draws)
    tokens, weights = named
    same = tokens.unsqueeze(2) == tokens.unsqueeze(1)
    place = torch.arange(tokens.shape[1], device=tokens.device)
    is_first = same.int().argmax(dim=2) == place
    raised = sharpness(start) * (same * weights.unsqueeze(1)).sum(dim=2)
    fresh = seeded_normal_at(*_row_counters(*counters), tokens)
    score = fresh * (start / (1.0 - start)) - log_total.unsqueeze(1) + raised
    score = score.where(is_first, -float("inf"))
    largest = score.amax(dim=1, keepdim=True).clamp(min=0.0)
    own = torch.exp(-largest)
    added = -torch.exp(score - largest) * torch.expm1(-raised)
    sums = torch.stack((added, weights), dim=1) @ embedding[tokens].float()
    posterior = (own * mean.float() + sums[:, 0]) / (own + added.sum(dim=1, keepdim=True))
    state = (1.0 - start) * noise.float() + sums[:, 1]
    return posterior.to(dtype), state.to(dtype)


def _row_counters(
    seeds: Tensor, positions: Tensor, num_draws: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Seed, position and draw of every row (B M K) of `block_noise`."""
    shape = (len(seeds), num_draws, positions.shape[1])
    draw = torch.arange(num_draws, device=positions.device)
    parts = (seeds[:, None, None], positions.unsqueeze(1), draw[:, None])
    seed, position, draw = (part.expand(shape).flatten() for part in parts)
    return seed, position, draw


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x` (R, C) as float8_e4m3fn and a float32 scale a row (R, 1): scale = max(largest, 1e-12)
    times 1 / 448, x / scale clamped to 448 and rounded to nearest even."""
    numbers = x.float()
    scale = numbers.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) * (1.0 / FP8_MAX)
    return (numbers / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale


EAGER_OPS = {
    operation.__name__: operation
    for operation in (
        rms_norm, target_norm, gated_norm, adaln, gated_adaln, norm_rope, block_attention,
        context_attention, write_context, linears, add_linear, gated_linear, rotate_into,
        block_noise, next_state, bank_rows, bank_inputs, quantize_rows,
    )
}  # fmt: skip
