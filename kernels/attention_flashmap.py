"""Attention inside a block and onto a context as Triton kernels, for any block size, number of
heads and even head width.

Legend: B sequences, G blocks, K slots, A heads, d head width, T context entries.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .reference_flashmap import Rope
from .reference_flashmap import block_attention as eager_block_attention
from .triton_flashmap import ROUNDED, normed, padded, rotated, tl, triton

_LOWEST = tl.constexpr(-1e30)  # below every score, and finite
_DOT_SIDE = 16  # shortest side of a tile that tl.dot takes
_PROGRAMS = 256  # programs that fill a large GPU; fewer heads than that split the context
_MOST_SPLITS = 32
_TILE_BYTES = 32768  # of one operand; three of them fit into 99 KiB of shared memory


@triton.jit
def _block_attention_kernel(
    qkv_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, positions_ptr, out_ptr, num_slots,
    num_heads, head_dim, eps, scale, SLOTS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """One head of one block a program; qkv is (G, K, 3, A, d)."""
    dtype = qkv_ptr.dtype.element_ty
    slot, column, pair = tl.arange(0, SLOTS), tl.arange(0, DIM), tl.arange(0, DIM // 2)
    row = tl.program_id(0).to(tl.int64) * num_slots + slot
    inside = (slot < num_slots)[:, None] & (column < head_dim)[None, :]
    width = num_heads * head_dim
    query_at = qkv_ptr + row[:, None] * (3 * width) + tl.program_id(1) * head_dim + column[None, :]
    query = tl.load(query_at, mask=inside, other=0.0).to(tl.float32)
    key = tl.load(query_at + width, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(query_at + 2 * width, mask=inside, other=0.0)

    position = tl.load(positions_ptr + row, mask=slot < num_slots, other=0).to(tl.int64)
    angle = position[:, None] * (head_dim // 2) + pair[None, :]
    turns = (slot < num_slots)[:, None] & (pair < head_dim // 2)[None, :]
    cos = tl.load(cos_ptr + angle, mask=turns, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=turns, other=0.0)
    q_weight = tl.load(q_weight_ptr + column, mask=column < head_dim, other=0.0).to(tl.float32)
    k_weight = tl.load(k_weight_ptr + column, mask=column < head_dim, other=0.0).to(tl.float32)
    query = normed(query, q_weight[None, :], head_dim, eps, dtype)
    key = normed(key, k_weight[None, :], head_dim, eps, dtype)
    query = rotated(query, cos, sin, SLOTS, DIM).to(dtype)
    key = rotated(key, cos, sin, SLOTS, DIM).to(dtype)

    score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    score = tl.where((slot < num_slots)[None, :], score, -float("inf"))
    weight = tl.exp(score - tl.max(score, axis=1)[:, None])
    out = tl.dot(weight.to(dtype), value, input_precision="ieee")
    out = out / tl.sum(weight, axis=1)[:, None]
    out_at = out_ptr + row[:, None] * width + tl.program_id(1) * head_dim + column[None, :]
    tl.store(out_at, out.to(dtype), mask=inside)


@triton.jit
def _context_attention_kernel(
    query_ptr, key_ptr, value_ptr, lengths_ptr, table_ptr, requests_ptr, out_ptr, log_sum_ptr,
    num_queries, num_heads, head_dim, scale, sequence_stride, head_stride, entry_stride,
    table_stride, slots, group, ROWS: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr,
    CAUSAL: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    """A tile of the queries that share one head of keys onto one split of its context a program:
    its weighted mean of the values, and the logarithm of its sum of exponentials. Queries are
    counted block by block, in it head by head, in it slot by slot. Paged, an entry lies in the row
    that the table names."""
    split, num_splits = tl.program_id(2), tl.num_programs(2)
    sequence, head = tl.program_id(0) // num_heads, tl.program_id(0) % num_heads
    row, column = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, DIM)
    within = (column < head_dim)[None, :]
    inside = (row < num_queries)[:, None] & within
    block, lane, slot = row // (slots * group), row // slots % group, row % slots
    place = sequence.to(tl.int64) * (num_queries // group) + block * slots + slot
    place = (place * num_heads + head) * group + lane
    query_at = query_ptr + place[:, None] * head_dim + column[None, :]
    query = tl.load(query_at, mask=inside, other=0.0)

    first_length = tl.load(lengths_ptr + sequence).to(tl.int32) + 1
    seen_by_row = first_length + (slot if CAUSAL else 0 * slot)
    length = first_length + (slots - 1 if CAUSAL else 0)
    chunk = tl.cdiv(tl.cdiv(length, num_splits), TILE) * TILE
    end = tl.minimum(split * chunk + chunk, length)
    start = sequence.to(tl.int64) * sequence_stride + head * head_stride
    if PAGED:
        row_at = table_ptr + tl.load(requests_ptr + sequence).to(tl.int64) * table_stride
    largest = tl.full((ROWS,), _LOWEST, tl.float32)  # infinity could meet itself in a difference
    total = tl.zeros((ROWS,), tl.float32)
    mean = tl.zeros((ROWS, DIM), tl.float32)
    for first in range(split * chunk, end, TILE):
        entry = first + tl.arange(0, TILE)
        seen = (entry < end)[:, None] & within
        place_of = entry
        if PAGED:
            place_of = tl.load(row_at + entry, mask=entry < end, other=0)
        address = start + place_of.to(tl.int64)[:, None] * entry_stride + column[None, :]
        key = tl.load(key_ptr + address, mask=seen, other=0.0).to(query.dtype)
        value = tl.load(value_ptr + address, mask=seen, other=0.0).to(query.dtype)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        visible = (entry < end)[None, :] & (entry[None, :] < seen_by_row[:, None])
        score = tl.where(visible, score, -float("inf"))
        top = tl.maximum(largest, tl.max(score, axis=1))
        weight = tl.exp(score - top[:, None])
        kept = tl.exp(largest - top)
        total = total * kept + tl.sum(weight, axis=1)
        mean = mean * kept[:, None]
        mean += tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        largest = top
    # A split past the end of its context has seen nothing: mean 0, weight exp(-inf).
    divisor = tl.where(total > 0.0, total, 1.0)
    mean = mean / divisor[:, None]
    log_sum = tl.where(total > 0.0, largest + tl.log(divisor), -float("inf"))
    place += split * tl.num_programs(0).to(tl.int64) * num_queries
    out_at = out_ptr + place[:, None] * head_dim + column[None, :]
    tl.store(out_at, mean.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(log_sum_ptr + place, log_sum, mask=row < num_queries)


@triton.jit
def _merge_kernel(
    mean_ptr, log_sum_ptr, out_ptr, num_splits, head_dim, SPLITS: tl.constexpr, DIM: tl.constexpr
):
    """Merge one query's splits, weighted by their sums of exponentials."""
    row, num_rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    split, column = tl.arange(0, SPLITS), tl.arange(0, DIM)
    place = split.to(tl.int64) * num_rows + row
    log_sum = tl.load(log_sum_ptr + place, mask=split < num_splits, other=-float("inf"))
    weight = tl.exp(log_sum - tl.max(log_sum, axis=0))
    inside = (split < num_splits)[:, None] & (column < head_dim)[None, :]
    mean_at = mean_ptr + place[:, None] * head_dim + column[None, :]
    mean = tl.load(mean_at, mask=inside, other=0.0)
    out = tl.sum(mean * weight[:, None], axis=0) / tl.sum(weight, axis=0)
    out_at = out_ptr + row * head_dim + column
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=column < head_dim)


# Launches


def block_attention(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, rope: Rope, positions: Tensor
) -> Tensor:
    """See the reference, which also takes the float32 blocks that are too large for one tile."""
    qkv = qkv.contiguous()
    num_blocks, num_slots, _, num_heads, head_dim = qkv.shape
    slots, dim = padded(num_slots, _DOT_SIDE), padded(head_dim, _DOT_SIDE)
    if slots * dim * qkv.element_size() > _TILE_BYTES:
        return eager_block_attention(qkv, q_weight, k_weight, eps, rope, positions)
    out = qkv.new_empty(num_blocks, num_slots, num_heads, head_dim)
    _block_attention_kernel[(num_blocks, num_heads)](
        qkv, q_weight, k_weight, *rope, positions, out, num_slots, num_heads, head_dim, eps,
        head_dim**-0.5, SLOTS=slots, DIM=dim, num_warps=8 if slots * dim > 4096 else 4, **ROUNDED,
    )  # fmt: skip
    return out


def context_attention(
    query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, causal: bool = False
) -> Tensor:
    """See the reference; `key` and `value` have the same strides."""
    return attend(query, key, value, lengths, key.shape[1:3], key.stride(), causal)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    room: Sequence[int],
    strides: Sequence[int],
    causal: bool = False,
    rows: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """`context_attention` onto `room`, heads of keys and entries of a sequence, that lie `strides`
    of a sequence, a head and an entry apart; or in the `rows` that a table (Q, entries) has for
    every sequence's request (B)."""
    query = query.contiguous()
    num_heads, capacity = room
    slots, group, head_dim = query.shape[1], query.shape[2] // num_heads, query.shape[3]
    num_queries = query.shape[0] // len(lengths) * slots * group
    dim = padded(head_dim, _DOT_SIDE)
    most = _TILE_BYTES // (dim * query.element_size())
    size, tile = min(padded(num_queries, _DOT_SIDE), most, 64), min(most // 2, 64)
    grid = (len(lengths) * num_heads, -(-num_queries // size))
    splits = min(_PROGRAMS // (grid[0] * grid[1]), -(-capacity // (2 * tile)), _MOST_SPLITS)
    splits = max(splits, 1)
    partial_dtype = query.dtype if splits == 1 else torch.float32
    mean = torch.empty((splits, *query.shape), dtype=partial_dtype, device=query.device)
    log_sum = torch.empty(mean.shape[:-1], dtype=torch.float32, device=query.device)
    table, requests = rows or (lengths, lengths)
    _context_attention_kernel[(*grid, splits)](
        query, key, value, lengths, table, requests, mean, log_sum, num_queries, num_heads,
        head_dim, head_dim**-0.5, *strides[:3], table.stride(0), slots, group,
        ROWS=size, DIM=dim, TILE=tile, CAUSAL=causal, PAGED=rows is not None, num_stages=2,
    )  # fmt: skip
    if splits == 1:
        return mean[0]
    out = torch.empty_like(query)
    _merge_kernel[(log_sum[0].numel(),)](
        mean, log_sum, out, splits, head_dim, SPLITS=padded(splits), DIM=dim
    )
    return out
