"""Attention onto scattered rows, against attention onto a dense context in float64."""

import pytest
import torch
from torch import Tensor

from flashmap.kernels.paged_attention import paged_attention, triton_paged_attention
from flashmap.kernels.triton_flashmap import HAS_TRITON

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs triton (make test installs it)")
VERSIONS = [paged_attention, pytest.param(triton_paged_attention, marks=needs_triton)]


def exact(
    query: Tensor, key: Tensor, value: Tensor, table: Tensor, requests: Tensor, lengths: Tensor
) -> Tensor:
    """One query and one head at a time."""
    out = torch.zeros(query.shape, dtype=torch.float64)
    draws = len(query) // len(requests)
    for block in range(len(query)):
        sequence = block // draws
        slots = table[requests[sequence], : int(lengths[sequence]) + 1].long()
        for slot in range(query.shape[1]):
            for head in range(query.shape[2]):
                keys, values = (pool.double()[slots, head] for pool in (key, value))
                score = keys @ query[block, slot, head].double() * query.shape[-1] ** -0.5
                out[block, slot, head] = torch.softmax(score, dim=0) @ values
    return out


def case(draws: int, slots: int, heads: int, dim: int, lengths: list[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    width, requests = 160, len(lengths)
    pool = torch.randn(2, 400, heads, dim, generator=generator)
    table = torch.randint(400, (requests + 2, width), generator=generator).int()
    query = torch.randn(requests * draws, slots, heads, dim, generator=generator)
    rows = torch.randperm(requests + 2, generator=generator)[:requests]
    return [query, pool[0], pool[1], table, rows, torch.tensor(lengths)]


@pytest.mark.parametrize("attend", VERSIONS)
@pytest.mark.parametrize("shape", [(1, 4, 2, 16), (3, 7, 1, 20), (1, 1, 3, 64)])
def test_it_is_attention_to_the_rows_that_the_table_names(attend, shape) -> None:  # type: ignore[no-untyped-def]
    inputs = case(*shape, lengths=[0, 130, 17])
    out = attend(*inputs)
    assert (out.double() - exact(*inputs)).abs().max() < 1e-5


@pytest.mark.parametrize("attend", VERSIONS)
def test_rows_in_eight_bits_are_read_in_the_querys_dtype(attend) -> None:  # type: ignore[no-untyped-def]
    query, key, value, *rest = case(1, 4, 2, 16, lengths=[40, 3])
    key, value = key.to(torch.float8_e4m3fn), value.to(torch.float8_e4m3fn)
    out = attend(query, key, value, *rest)
    expected = exact(query, key.float(), value.float(), *rest)
    assert (out.double() - expected).abs().max() < 1e-5


@needs_triton
def test_the_table_is_read_up_to_the_length_only() -> None:
    query, key, value, table, rows, lengths = case(1, 4, 2, 16, lengths=[40, 3])
    inputs = (query, key, value, table, rows, lengths)
    before = triton_paged_attention(*inputs)
    table[rows[0], 41:] = 2**30
    assert triton_paged_attention(*inputs).equal(before)
