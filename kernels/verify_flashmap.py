"""What a target's pass over a few tokens is made of, as Triton kernels.

A product of a few rows with a large weight costs what reading the weight does, so a program reads
its part of a weight once, for all rows, and weights of the same rows share a launch. More rows than
a tile holds, float32 and odd widths go to PyTorch's own product.

Legend: B sequences, m tokens of a pass, R rows (B m), A heads, d head width, T room for entries.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .reference_flashmap import Rope
from .reference_flashmap import add_linear as eager_add_linear
from .reference_flashmap import gated_linear as eager_gated_linear
from .reference_flashmap import linears as eager_linears
from .triton_flashmap import ROUNDED, padded, tl, triton

_MOST_ROWS = 64
_MOST_WEIGHTS = 3
_WIDEST = 65536  # PyTorch's own product of a vocabulary head leaves nothing to gain
_DEPTHS = (128, 64)  # numbers of a row that are read at a time
_STAGES = {True: 3, False: 6}  # tiles on their way from memory, of two weights and of one
_ROW_TILE = 16  # fewest rows of a tile that tl.dot takes
_FULL = 120  # programs that keep a large GPU's memory busy


@triton.jit
def _linears_kernel(
    x_ptr, weight_ptr, bias_0_ptr, bias_1_ptr, bias_2_ptr, base_ptr, out_ptr, num_rows, width,
    depth, begin_1, begin_2, offset_1, offset_2, GATED: tl.constexpr, BIASED: tl.constexpr,
    ADDED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A tile of output columns, all rows, a program. Weight i covers the columns from begin_i on
    and lies offset_i numbers behind weight 0; gated, weight 1 is what weight 0 gates."""
    dtype = out_ptr.dtype.element_ty
    first = tl.program_id(0) * COLUMNS
    begin, offset = 0, tl.zeros((), tl.int64)
    if not GATED:
        begin = tl.where(first >= begin_2, begin_2, tl.where(first >= begin_1, begin_1, 0))
        offset = tl.where(first >= begin_2, offset_2, tl.where(first >= begin_1, offset_1, 0))
    row, column = tl.arange(0, ROWS), first + tl.arange(0, COLUMNS)
    step = tl.arange(0, DEPTH)
    x_at = x_ptr + row[:, None] * depth + step[None, :]
    weight_at = weight_ptr + tl.multiple_of(offset, 16)
    weight_at += (column - begin).to(tl.int64)[None, :] * depth + step[:, None]
    inside = (row < num_rows)[:, None]
    out = tl.zeros((ROWS, COLUMNS), tl.float32)
    up = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in tl.range(0, depth, DEPTH, num_stages=STAGES):
        x = tl.load(x_at + start, mask=inside, other=0.0)
        out = tl.dot(x, tl.load(weight_at + start), out)
        if GATED:
            up = tl.dot(x, tl.load(weight_at + tl.multiple_of(offset_1, 16) + start), up)
    if GATED:
        gate = out.to(dtype).to(tl.float32)
        gate = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
        out = gate * up.to(dtype).to(tl.float32)
    if BIASED:
        bias_ptr = bias_0_ptr
        if first >= begin_2:
            bias_ptr = bias_2_ptr
        elif first >= begin_1:
            bias_ptr = bias_1_ptr
        out += tl.load(bias_ptr + column - begin).to(tl.float32)[None, :]
    place = row[:, None] * width + column[None, :]
    if ADDED:
        base = tl.load(base_ptr + place, mask=inside, other=0.0).to(tl.float32)
        out = base + out.to(dtype).to(tl.float32)
    tl.store(out_ptr + place, out.to(dtype), mask=inside)


@triton.jit
def _rotate_into_kernel(
    query_ptr, key_ptr, value_ptr, query_norm_ptr, key_norm_ptr, cos_ptr, sin_ptr, places_ptr,
    out_ptr, keys_ptr, values_ptr, num_heads, num_tokens, eps, row_stride, cos_stride,
    sequence_stride, head_stride, entry_stride, NORMED: tl.constexpr, HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One head of one token a program: the queries' heads, then the keys', then the values'."""
    dtype = out_ptr.dtype.element_ty
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_keys = (tl.num_programs(1) - num_heads) // 2
    is_query = part < num_heads
    is_value = part >= num_heads + num_keys
    head = tl.where(is_value, part - num_heads - num_keys, part - num_heads)
    sequence, token = row // num_tokens, row % num_tokens
    place = tl.load(places_ptr + row)
    entry = sequence * sequence_stride + head * head_stride + place * entry_stride
    column = tl.arange(0, BLOCK)
    inside = column < HALF
    if is_value:
        source = value_ptr + row * row_stride + head * (2 * HALF) + column
        target = values_ptr + entry + column
        tl.store(target, tl.load(source, mask=inside), mask=inside)
        tl.store(target + HALF, tl.load(source + HALF, mask=inside), mask=inside)
    else:
        if is_query:
            source = query_ptr + row * row_stride + part * (2 * HALF) + column
            norm_at = query_norm_ptr + column
            target = out_ptr + (row * num_heads + part) * (2 * HALF) + column
        else:
            source = key_ptr + row * row_stride + head * (2 * HALF) + column
            norm_at = key_norm_ptr + column
            target = keys_ptr + entry + column
        low = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        high = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
        if NORMED:
            mean = (tl.sum(low * low, axis=0) + tl.sum(high * high, axis=0)) / (2 * HALF)
            inverse_rms = tl.rsqrt(mean + eps)
            low = (low * inverse_rms).to(dtype).to(tl.float32)
            high = (high * inverse_rms).to(dtype).to(tl.float32)
            low *= tl.load(norm_at, mask=inside, other=0.0).to(tl.float32)
            high *= tl.load(norm_at + HALF, mask=inside, other=0.0).to(tl.float32)
            low, high = low.to(dtype).to(tl.float32), high.to(dtype).to(tl.float32)
        angle = sequence * cos_stride + token * (2 * HALF) + column
        cos = tl.load(cos_ptr + angle, mask=inside, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + angle, mask=inside, other=0.0).to(tl.float32)
        turned = (low * cos).to(dtype).to(tl.float32) - (high * sin).to(dtype).to(tl.float32)
        tl.store(target, turned.to(dtype), mask=inside)
        cos = tl.load(cos_ptr + angle + HALF, mask=inside, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + angle + HALF, mask=inside, other=0.0).to(tl.float32)
        turned = (high * cos).to(dtype).to(tl.float32) + (low * sin).to(dtype).to(tl.float32)
        tl.store(target + HALF, turned.to(dtype), mask=inside)


# Launches


def _columns(width: int, each: int) -> int:
    """Output columns of a program: as many as still keep every memory channel busy."""
    fitting = [size for size in (64, 32, 16) if each % size == 0]
    return next((size for size in fitting if width // size >= _FULL), min(fitting, default=0))


def _takes(x: Tensor, weights: Sequence[Tensor]) -> bool:
    """Whether one launch computes the products of `x` with `weights`."""
    depth = x.shape[-1]
    return (
        x.dtype in (torch.bfloat16, torch.float16)
        and x.numel() <= _MOST_ROWS * depth
        and depth % _DEPTHS[-1] == 0
        and len(weights) <= _MOST_WEIGHTS
        and all(
            weight.dtype == x.dtype
            and weight.is_contiguous()
            and weight.shape[0] % 16 == 0
            and weight.shape[0] < _WIDEST
            for weight in weights
        )
        and not any(offset % 16 for offset in _offsets(weights))
    )


def _offsets(weights: Sequence[Tensor]) -> list[int]:
    """How many numbers each weight lies behind the first."""
    first, *others = weights  # one alone is not looked at: torch.compile could not follow
    size = first.element_size()
    return [0, *((weight.data_ptr() - first.data_ptr()) // size for weight in others)]


def _launch(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    is_gated: bool = False,
    base: Tensor | None = None,
) -> Tensor:
    """The products side by side (..., width of all of them), or one gated by the other, or added to
    `base`."""
    shape, x = x.shape[:-1], x.contiguous()
    depth = x.shape[-1]
    num_rows, widths = x.numel() // depth, [weight.shape[0] for weight in weights]
    width = widths[0] if is_gated else sum(widths)
    begins = [sum(widths[:index]) for index in range(len(widths))]
    begins, offsets = begins + [width] * 2, _offsets(weights) + [0] * 2  # some are not there
    columns = _columns(width, math.gcd(*widths))
    is_biased = biases[0] is not None
    bias = [*biases, *biases, *biases] if is_biased else [x] * 3
    out = x.new_empty(num_rows, width)
    _linears_kernel[(width // columns,)](
        x, weights[0], *bias[:3], out if base is None else base.contiguous(), out, num_rows, width,
        depth, begins[1], begins[2], offsets[1], offsets[2],
        GATED=is_gated, BIASED=is_biased, ADDED=base is not None,
        ROWS=padded(num_rows, _ROW_TILE), COLUMNS=columns,
        DEPTH=next(step for step in _DEPTHS if depth % step == 0), STAGES=_STAGES[is_gated],
        num_warps=4, **ROUNDED,
    )  # fmt: skip
    return out.view(*shape, width)


def linears(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    """See the reference."""
    if not _takes(x, weights) or len({bias is None for bias in biases}) > 1:
        return eager_linears(x, weights, biases)
    out = _launch(x, weights, biases)
    return list(out.split([weight.shape[0] for weight in weights], dim=-1))


def add_linear(base: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See the reference."""
    if not _takes(x, (weight,)):
        return eager_add_linear(base, x, weight, bias)
    return _launch(x, (weight,), (bias,), base=base)


def gated_linear(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """See the reference."""
    if not _takes(x, (gate, up)) or gate.shape != up.shape:
        return eager_gated_linear(x, gate, up)
    return _launch(x, (gate, up), (None, None), is_gated=True)


def rotate_into(
    qkv: Sequence[Tensor],
    norms: Sequence[Tensor] | None,
    eps: float,
    rope: Rope,
    places: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """See the reference."""
    query, key, value = qkv
    if query.stride() != key.stride() or query.stride() != value.stride():
        query, key, value = (torch.cat(tuple(qkv), dim=-1)).split(
            [part.shape[-1] for part in qkv], dim=-1
        )
    num_sequences, num_tokens, width = query.shape
    num_keys, dim = keys.shape[1], keys.shape[3]
    num_heads = width // dim
    cos, sin = (table.contiguous() for table in rope)
    out = query.new_empty(num_sequences, num_tokens, num_heads, dim)
    query_norm, key_norm = norms if norms is not None else (query, query)
    _rotate_into_kernel[(num_sequences * num_tokens, num_heads + 2 * num_keys)](
        query, key, value, query_norm, key_norm, cos, sin, places, out, keys, values,
        num_heads, num_tokens, eps, query.stride(1), cos.stride(0) if cos.shape[0] > 1 else 0,
        *keys.stride()[:3], NORMED=norms is not None, HALF=dim // 2, BLOCK=padded(dim // 2),
        num_warps=1, **ROUNDED,
    )  # fmt: skip
    return out
