"""Attention onto a context whose entries lie anywhere in an engine's pool, one table row a request:
its reference and its Triton version.

Legend: B sequences, G blocks (M noise draws a sequence: G = B M), K slots, A heads, d head width, P
rows of the pool, Q requests that the table knows, C entries of a table row.
"""

from torch import Tensor

from .attention_flashmap import attend
from .reference_flashmap import context_attention


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


def triton_paged_attention(
    query: Tensor, key: Tensor, value: Tensor, table: Tensor, requests: Tensor, lengths: Tensor
) -> Tensor:
    """See `paged_attention`; `key` and `value` have the same strides, and nothing is copied."""
    room, strides = (key.shape[1], table.shape[1]), (0, key.stride(1), key.stride(0))
    return attend(query, key, value, lengths, room, strides, rows=(table, requests))
