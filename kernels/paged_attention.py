"""Attention onto a context whose entries lie anywhere in an engine's pool, one table row a request:
its reference and its Triton version, which splits long contexts over many programs.

Legend: B sequences, G blocks (M noise draws a sequence: G = B M), K slots, A heads, d head width, P
rows of the pool, Q requests that the table knows, C entries of a table row.
"""

import torch
from torch import Tensor

from .attention_flashmap import _DOT_SIDE, _LOWEST, _MOST_SPLITS, _PROGRAMS, _TILE_BYTES
from .attention_flashmap import _merge_kernel as merge_kernel
from .reference_flashmap import context_attention
from .triton_flashmap import padded, tl, triton


def paged_attention(
    query: Tensor, key: Tensor, value: Tensor, table: Tensor, requests: Tensor, lengths: Tensor
) -> Tensor:
    """Attention of `query` (G, K, A, d) onto entries 0 .. lengths[b] of each sequence.

    Entry e of sequence b is row table[requests[b], e] of `key` and `value` (P, A, d), whose numbers
    are read in the dtype of `query`; neighbouring blocks share a sequence. `table` is int32 (Q, C),
    `requests` and `lengths` are (B). This version copies the C entries of every sequence. Rounds as
    `context_attention` does.
    """
    rows = table[requests].long()
    key, value = (
        pool[rows.flatten()].view(*rows.shape, *pool.shape[1:]).transpose(1, 2).to(query.dtype)
        for pool in (_indexable(key), _indexable(value))
    )
    out: Tensor = context_attention(query, key, value, lengths)
    return out


def _indexable(pool: Tensor) -> Tensor:
    """PyTorch cannot index float8 on every device."""
    return pool if pool.itemsize > 1 else pool.float()


@triton.jit
def _paged_attention_kernel(
    query_ptr, key_ptr, value_ptr, table_ptr, requests_ptr, lengths_ptr, out_ptr, log_sum_ptr,
    num_queries, num_heads, head_dim, scale, row_stride, head_stride, table_stride,
    ROWS: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A tile of queries of one head onto one split of its context a program: its weighted mean of
    the values, and the logarithm of its sum of exponentials."""
    split, num_splits = tl.program_id(2), tl.num_programs(2)
    sequence, head = tl.program_id(0) // num_heads, tl.program_id(0) % num_heads
    row, column = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, DIM)
    within = (column < head_dim)[None, :]
    inside = (row < num_queries)[:, None] & within
    place = (sequence.to(tl.int64) * num_queries + row) * num_heads + head
    query_at = query_ptr + place[:, None] * head_dim + column[None, :]
    query = tl.load(query_at, mask=inside, other=0.0)

    length = tl.load(lengths_ptr + sequence).to(tl.int32) + 1
    chunk = tl.cdiv(tl.cdiv(length, num_splits), TILE) * TILE
    end = tl.minimum(split * chunk + chunk, length)
    slot_at = table_ptr + tl.load(requests_ptr + sequence).to(tl.int64) * table_stride
    largest = tl.full((ROWS,), _LOWEST, tl.float32)  # infinity could meet itself in a difference
    total = tl.zeros((ROWS,), tl.float32)
    mean = tl.zeros((ROWS, DIM), tl.float32)
    for first in range(split * chunk, end, TILE):
        entry = first + tl.arange(0, TILE)
        slot = tl.load(slot_at + entry, mask=entry < end, other=0).to(tl.int64)
        seen = (entry < end)[:, None] & within
        address = slot[:, None] * row_stride + head * head_stride + column[None, :]
        key = tl.load(key_ptr + address, mask=seen, other=0.0).to(query.dtype)
        value = tl.load(value_ptr + address, mask=seen, other=0.0).to(query.dtype)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        score = tl.where((entry < end)[None, :], score, -float("inf"))
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


def triton_paged_attention(
    query: Tensor, key: Tensor, value: Tensor, table: Tensor, requests: Tensor, lengths: Tensor
) -> Tensor:
    """See `paged_attention`; `key` and `value` have the same strides, and nothing is copied."""
    query = query.contiguous()
    num_sequences, (num_heads, head_dim) = len(requests), key.shape[1:]
    num_queries = query.shape[0] // num_sequences * query.shape[1]
    dim = padded(head_dim, _DOT_SIDE)
    most = _TILE_BYTES // (dim * query.element_size())
    rows, tile = min(padded(num_queries, _DOT_SIDE), most, 64), min(most // 2, 64)
    grid = (num_sequences * num_heads, -(-num_queries // rows))
    splits = min(_PROGRAMS // (grid[0] * grid[1]), -(-table.shape[1] // (2 * tile)), _MOST_SPLITS)
    splits = max(splits, 1)
    partial_dtype = query.dtype if splits == 1 else torch.float32
    mean = torch.empty((splits, *query.shape), dtype=partial_dtype, device=query.device)
    log_sum = torch.empty(mean.shape[:-1], dtype=torch.float32, device=query.device)
    _paged_attention_kernel[(*grid, splits)](
        query, key, value, table, requests, lengths, mean, log_sum, num_queries, num_heads,
        head_dim, head_dim**-0.5, key.stride(0), key.stride(1), table.stride(0),
        ROWS=rows, DIM=dim, TILE=tile, num_stages=2,
    )  # fmt: skip
    if splits == 1:
        return mean[0]
    out = torch.empty_like(query)
    merge_kernel[(log_sum[0].numel(),)](
        mean, log_sum, out, splits, head_dim, SPLITS=padded(splits), DIM=dim
    )
    return out
