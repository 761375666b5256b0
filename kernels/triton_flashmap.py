"""Norms, rotary embedding, context writes and noise of a drafting step as Triton kernels.

Each meets its namesake in the reference file: same arguments, same rounding order. Every shape
works: tiles are padded to powers of two and masked. Numbers are float32 inside a kernel, and
`.to(DTYPE).to(tl.float32)` is a rounding of the specification. LLVM turns a float32 product or sum
that rounds to half precision into an operation of half precision, which is the same number, and
would then fuse the two into one that skips the rounding between: `ROUNDED` forbids it.

Legend: B sequences, M draws, K slots, R rows, T context rows, L layers, A heads, d head width, C
columns.
"""

from types import SimpleNamespace

import torch
from torch import Tensor

from .fused_flashmap import Stream
from .reference_flashmap import FP8_MAX, KvLayout, Rope

try:
    import triton
    import triton.language as tl
except ImportError:  # the kernels below are then never launched: select_ops says why
    triton, tl = SimpleNamespace(jit=lambda function: function), SimpleNamespace(constexpr=float)

HAS_TRITON = hasattr(triton, "__version__")
INTERPRETED = HAS_TRITON and triton.knobs.runtime.interpret  # TRITON_INTERPRET=1: runs on a CPU
ROUNDED = {"enable_fp_fusion": False}  # at the launch of every kernel that owes roundings
_COUNTERS = 256  # Philox counters a program, four columns each
_NOISE = tl.constexpr(int(Stream.NOISE))
_UNIT = tl.constexpr(2.0**-32)
_HALF_UNIT = tl.constexpr(2.0**-33)
_BELOW_ONE = tl.constexpr(1.0 - 2.0**-24)
_FP8_MAX = tl.constexpr(FP8_MAX)
_FP8_UNIT = tl.constexpr(1.0 / FP8_MAX)


@triton.jit
def normed(x, weight, columns, eps, DTYPE: tl.constexpr):
    """rms_norm of the rows of a padded tile (rows, C'): c = round(w rsqrt(mean(x^2) + eps)),
    round(x c)."""
    inverse_rms = tl.rsqrt(tl.sum(x * x, axis=1) / columns + eps)
    factor = (weight * inverse_rms[:, None]).to(DTYPE).to(tl.float32)
    return (x * factor).to(DTYPE).to(tl.float32)


@triton.jit
def rotated(x, cos, sin, ROWS: tl.constexpr, DIM: tl.constexpr):
    """Interleaved pairs of a tile (ROWS, DIM) turned by (ROWS or 1, DIM / 2) angles, unrounded."""
    even, odd = tl.split(tl.reshape(x, (ROWS, DIM // 2, 2)))
    turned = tl.join(even * cos - odd * sin, odd * cos + even * sin)
    return tl.reshape(turned, (ROWS, DIM))


@triton.jit
def _rms_norm_kernel(
    x_ptr, weight_ptr, gate_ptr, base_ptr, out_ptr, columns, base_stride, eps,
    GATED: tl.constexpr, LATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row a program: rms_norm, or target_norm if LATE, and base + gate * that if GATED."""
    dtype = x_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(x_ptr + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if LATE:
        inverse_rms = tl.rsqrt(tl.sum(x * x, axis=0) / columns + eps)
        out = (x * inverse_rms).to(dtype).to(tl.float32) * weight
    else:
        out = tl.reshape(normed(x[None, :], weight[None, :], columns, eps, dtype), (BLOCK,))
    if GATED:
        gate = tl.load(gate_ptr).to(tl.float32)
        base = tl.load(base_ptr + row * base_stride + column, mask=inside, other=0.0)
        out = base.to(tl.float32) + (gate * out).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * columns + column, out.to(dtype), mask=inside)


@triton.jit
def _adaln_kernel(
    x_ptr, branch_ptr, gate_ptr, scale_ptr, shift_ptr, total_ptr, out_ptr, columns, eps,
    GATED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row a program: the residual sum if GATED, then layer norm, scale and shift."""
    dtype = x_ptr.dtype.element_ty
    start = tl.program_id(0).to(tl.int64) * columns
    column = tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(x_ptr + start + column, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        branch = tl.load(branch_ptr + start + column, mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(gate_ptr + column, mask=inside, other=0.0).to(tl.float32)
        x = (x + (gate * branch).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        tl.store(total_ptr + start + column, x.to(dtype), mask=inside)
    centred = tl.where(inside, x - tl.sum(x, axis=0) / columns, 0.0)
    inverse = tl.rsqrt(tl.sum(centred * centred, axis=0) / columns + eps)
    normal = (centred * inverse).to(dtype).to(tl.float32)
    scale = tl.load(scale_ptr + column, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(shift_ptr + column, mask=inside, other=0.0).to(tl.float32)
    out = (normal * scale).to(dtype).to(tl.float32) + shift
    tl.store(out_ptr + start + column, out.to(dtype), mask=inside)


@triton.jit
def _norm_rope_kernel(
    x_ptr, weight_ptr, cos_ptr, sin_ptr, positions_ptr, out_ptr, num_heads, head_dim, eps,
    HEADS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """All heads of one row a program; x is (R, A, d)."""
    dtype = x_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    head, column, pair = tl.arange(0, HEADS), tl.arange(0, DIM), tl.arange(0, DIM // 2)
    place = (row * num_heads + head)[:, None] * head_dim + column[None, :]
    inside = (head < num_heads)[:, None] & (column < head_dim)[None, :]
    angle = tl.load(positions_ptr + row).to(tl.int64) * (head_dim // 2) + pair
    cos = tl.load(cos_ptr + angle, mask=pair < head_dim // 2, other=0.0)[None, :]
    sin = tl.load(sin_ptr + angle, mask=pair < head_dim // 2, other=0.0)[None, :]
    weight = tl.load(weight_ptr + column, mask=column < head_dim, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    out = rotated(normed(x, weight[None, :], head_dim, eps, dtype), cos, sin, HEADS, DIM)
    tl.store(out_ptr + place, out.to(dtype), mask=inside)


@triton.jit
def _store_entry(x, scale, address, inside):
    """Store a tile in the dtype of its place; float8 divides by the scale and saturates."""
    if address.dtype.element_ty == tl.float8e4nv:
        x = tl.minimum(tl.maximum(tl.div_rn(x, scale), -_FP8_MAX), _FP8_MAX)
    tl.store(address, x.to(address.dtype.element_ty), mask=inside)


@triton.jit
def _write_context_kernel(
    kv_ptr, weight_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr, cache_ptr, offsets_ptr,
    scales_ptr, num_heads, head_dim, eps, page, key_block, key_row, key_head, value_block,
    value_row, value_head, SCALED: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Key and value of one row in one layer a program; kv is (T, L, 2, A, d)."""
    dtype = kv_ptr.dtype.element_ty
    row, layer = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    head, column, pair = tl.arange(0, HEADS), tl.arange(0, DIM), tl.arange(0, DIM // 2)
    kept = tl.where(slot >= 0, head_dim, 0)  # nothing of a skipped row
    inside = (head < num_heads)[:, None] & (column < kept)[None, :]
    entry = (row * tl.num_programs(1) + layer) * 2
    source = kv_ptr + (entry * num_heads + head)[:, None] * head_dim + column[None, :]
    key = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(source + num_heads * head_dim, mask=inside, other=0.0).to(tl.float32)

    angle = tl.load(positions_ptr + row).to(tl.int64) * (head_dim // 2) + pair
    cos = tl.load(cos_ptr + angle, mask=pair < kept // 2, other=0.0)[None, :]
    sin = tl.load(sin_ptr + angle, mask=pair < kept // 2, other=0.0)[None, :]
    weight = tl.load(weight_ptr + layer * head_dim + column, mask=column < head_dim, other=0.0)
    key = normed(key, weight.to(tl.float32)[None, :], head_dim, eps, dtype)
    key = rotated(key, cos, sin, HEADS, DIM)

    key_scale, value_scale = 1.0, 1.0
    if SCALED:
        key_scale = tl.load(scales_ptr + layer * 2)
        value_scale = tl.load(scales_ptr + layer * 2 + 1)
    block, within = slot // page, slot % page
    key_at = cache_ptr + tl.load(offsets_ptr + layer * 2) + block * key_block + within * key_row
    value_at = cache_ptr + tl.load(offsets_ptr + layer * 2 + 1)
    value_at += block * value_block + within * value_row
    _store_entry(key, key_scale, key_at + head[:, None] * key_head + column[None, :], inside)
    _store_entry(
        value, value_scale, value_at + head[:, None] * value_head + column[None, :], inside
    )


@triton.jit
def _quantize_rows_kernel(x_ptr, out_ptr, scale_ptr, columns, BLOCK: tl.constexpr):
    """One row a program."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    address = row * columns + column
    x = tl.load(x_ptr + address, mask=column < columns, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), axis=0), 1e-12) * _FP8_UNIT
    tl.store(scale_ptr + row, scale)
    _store_entry(x, scale, out_ptr + address, column < columns)


@triton.jit
def uniform(word):
    """Float32 in (0, 1) of a random uint32 word."""
    return tl.minimum(word.to(tl.float32) * _UNIT + _HALF_UNIT, _BELOW_ONE)


@triton.jit
def _box_muller(word_0, word_1):
    radius = tl.sqrt(-2.0 * tl.log(uniform(word_0)))
    angle = uniform(word_1) * 6.283185307179586
    return radius * tl.cos(angle), radius * tl.sin(angle)


@triton.jit
def _noise_kernel(
    seeds_ptr, positions_ptr, out_ptr, num_slots, num_draws, columns, COUNTERS: tl.constexpr
):
    """4 COUNTERS columns of one row (sequence, draw, slot) a program."""
    row = tl.program_id(0).to(tl.int64)
    sequence, slot = row // (num_slots * num_draws), row % num_slots
    draw = (row // num_slots % num_draws).to(tl.int32)
    position = tl.load(positions_ptr + sequence * num_slots + slot).to(tl.int32)
    index = tl.program_id(1) * COUNTERS + tl.arange(0, COUNTERS)
    zero = index * 0
    x0, x1, x2, x3 = tl.philox(
        tl.load(seeds_ptr + sequence), index, zero + position, zero + draw, zero + _NOISE
    )
    first, second = _box_muller(x0, x1)
    third, fourth = _box_muller(x2, x3)
    out = tl.reshape(tl.join(tl.join(first, third), tl.join(second, fourth)), (4 * COUNTERS,))
    column = tl.program_id(1) * 4 * COUNTERS + tl.arange(0, 4 * COUNTERS)
    address = out_ptr + row * columns + column
    tl.store(address, out.to(out_ptr.dtype.element_ty), mask=column < columns)


# Launches


def padded(size: int, least: int = 1) -> int:
    """The smallest power of two that is at least `size` and `least`."""
    return 1 << (max(size, least) - 1).bit_length()


def _warps(size: int) -> int:
    """Warps for a tile of this many numbers: about 16 numbers a thread, 4 to 16 warps."""
    return min(max(size // 512, 4), 16)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See the reference."""
    return _normed_rows(x, weight, eps, late=False)


def target_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See the reference."""
    return _normed_rows(x, weight, eps, late=True)


def _normed_rows(x: Tensor, weight: Tensor, eps: float, late: bool) -> Tensor:
    x = x.contiguous()
    out, columns = torch.empty_like(x), x.shape[-1]
    block = padded(columns)
    _rms_norm_kernel[(x.numel() // columns,)](
        x, weight, x, x, out, columns, 0, eps,
        GATED=False, LATE=late, BLOCK=block, num_warps=_warps(block), **ROUNDED,
    )  # fmt: skip
    return out


def gated_norm(x: Tensor, weight: Tensor, eps: float, gate: Tensor, base: Tensor) -> Tensor:
    """See the reference."""
    x, base = x.contiguous(), base.contiguous()
    out, columns = torch.empty_like(x), x.shape[-1]
    block = padded(columns)
    _rms_norm_kernel[(x.numel() // columns,)](
        x, weight, gate, base, out, columns, columns if base.numel() > columns else 0, eps,
        GATED=True, LATE=False, BLOCK=block, num_warps=_warps(block), **ROUNDED,
    )  # fmt: skip
    return out


def adaln(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    """See the reference."""
    x = x.contiguous()
    out, columns = torch.empty_like(x), x.shape[-1]
    block = padded(columns)
    _adaln_kernel[(x.numel() // columns,)](
        x, x, x, scale, shift, x, out, columns, eps,
        GATED=False, BLOCK=block, num_warps=_warps(block), **ROUNDED,
    )  # fmt: skip
    return out


def gated_adaln(
    x: Tensor, branch: Tensor, gate: Tensor, scale: Tensor, shift: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """See the reference."""
    x, branch = x.contiguous(), branch.contiguous()
    total, out, columns = torch.empty_like(x), torch.empty_like(x), x.shape[-1]
    block = padded(columns)
    _adaln_kernel[(x.numel() // columns,)](
        x, branch, gate, scale, shift, total, out, columns, eps,
        GATED=True, BLOCK=block, num_warps=_warps(block), **ROUNDED,
    )  # fmt: skip
    return total, out


def norm_rope(x: Tensor, weight: Tensor, eps: float, rope: Rope, positions: Tensor) -> Tensor:
    """See the reference."""
    x = x.contiguous()
    rows, num_heads, head_dim = x.shape
    out, heads, dim = torch.empty_like(x), padded(num_heads), padded(head_dim)
    _norm_rope_kernel[(rows,)](
        x, weight, *rope, positions, out, num_heads, head_dim, eps,
        HEADS=heads, DIM=dim, num_warps=_warps(heads * dim), **ROUNDED,
    )  # fmt: skip
    return out


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
    """See the reference."""
    kv = kv.contiguous()
    rows, num_layers, _, num_heads, head_dim = kv.shape
    key, value = layout.keys[0], layout.values[0]
    heads, dim = padded(num_heads), padded(head_dim)
    _write_context_kernel[(rows, num_layers)](
        kv, weight, *rope, positions, slots, key, layout.offsets,
        weight if scales is None else scales, num_heads, head_dim, eps, key.shape[1],
        *key.stride()[:3], *value.stride()[:3],
        SCALED=scales is not None, HEADS=heads, DIM=dim, num_warps=_warps(heads * dim), **ROUNDED,
    )  # fmt: skip


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """See the reference."""
    x = x.contiguous()
    rows, columns = x.shape
    out = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scale = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    block = padded(columns)
    _quantize_rows_kernel[(rows,)](x, out, scale, columns, BLOCK=block, num_warps=_warps(block))
    return out, scale


def block_noise(
    seeds: Tensor, positions: Tensor, num_columns: int, num_draws: int, dtype: torch.dtype
) -> Tensor:
    """See the reference."""
    sequences, num_slots = positions.shape
    shape = (sequences * num_draws, num_slots, num_columns)
    out = torch.empty(shape, dtype=dtype, device=positions.device)
    grid = (shape[0] * num_slots, -(-num_columns // (4 * _COUNTERS)))
    _noise_kernel[grid](
        seeds, positions.contiguous(), out, num_slots, num_draws, num_columns, COUNTERS=_COUNTERS
    )
    return out
