"""What a target's pass is made of, in plain PyTorch and in Triton, equals its float64 formula, and
in half precision rounds where transformers does."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from flashmap.kernels import verify_flashmap
from flashmap.kernels.reference_flashmap import EAGER_OPS
from flashmap.kernels.select_flashmap import TRITON_OPS

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=["f32", "f16", "bf16"])
# Largest error relative to the largest number: float32 sums of up to 4096 products and one rounding
# (2^-11, 2^-8), or four of them behind a gate.
PRODUCT = {F32: 1e-5, F16: 2.0**-11, BF16: 2.0**-8}
VERSIONS = (EAGER_OPS, TRITON_OPS)


def on_gpu(*values: Any) -> Any:
    """A case that the interpreter takes too long for."""
    return pytest.param(*values, marks=pytest.mark.gpu)


@pytest.fixture
def numbers(device: str) -> Any:
    """Draws normal numbers in half precision's range, on the device."""
    generator = torch.Generator().manual_seed(0)

    def draw(dtype: torch.dtype, *shape: int, size: float = 1.0) -> Tensor:
        drawn = torch.randn(shape, generator=generator) * size
        return drawn.to(device, dtype)

    return draw


def check(found: Tensor, exact: Tensor, tolerance: float) -> None:
    assert found.shape == exact.shape and not found.isnan().any()
    assert (found.double() - exact).abs().max() <= tolerance * exact.abs().max()


@DTYPES
@pytest.mark.parametrize(
    ("rows", "depth", "widths"),
    [
        (1, 128, [16]), (9, 256, [48, 16, 32]), (64, 128, [32, 32]), (65, 128, [16]),
        (3, 192, [16, 16]), (3, 100, [16, 16]), (3, 128, [5]), on_gpu(17, 4096, [4096, 1024, 1024]),
        on_gpu(9, 576, [576, 192, 192]), on_gpu(17, 12288, [4096]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("biased", [False, True], ids=["", "biased"])
def test_linears(
    rows: int, depth: int, widths: list[int], biased: bool, dtype: torch.dtype, numbers: Any
) -> None:
    x = numbers(dtype, 1, rows, depth)
    weights = [numbers(dtype, width, depth, size=depth**-0.5) for width in widths]
    biases = [numbers(dtype, width) if biased else None for width in widths]
    for ops in VERSIONS:
        found = ops["linears"](x, weights, biases)
        for one, weight, bias in zip(found, weights, biases, strict=True):
            exact = x.double() @ weight.double().T
            exact = exact if bias is None else exact + bias.double()
            check(one, exact, PRODUCT[dtype])
        base = numbers(dtype, 1, rows, widths[-1])
        added = ops["add_linear"](base, x, weights[-1], biases[-1])
        check(added, base.double() + exact, 2 * PRODUCT[dtype])
        assert dtype == F32 or added.equal(base + one)


@DTYPES
@pytest.mark.parametrize(
    ("rows", "depth", "width"),
    [(1, 128, 16), (17, 256, 48), (65, 128, 16), (2, 24, 10), on_gpu(17, 4096, 12288)],
)
def test_gated_linear(rows: int, depth: int, width: int, dtype: torch.dtype, numbers: Any) -> None:
    x = numbers(dtype, rows, depth)
    gate, up = (numbers(dtype, width, depth, size=depth**-0.5) for _ in range(2))
    products = [x.double() @ weight.double().T for weight in (gate, up)]
    exact = nn.functional.silu(products[0]) * products[1]
    for ops in VERSIONS:
        check(ops["gated_linear"](x, gate, up), exact, 4 * PRODUCT[dtype])


def test_a_product_takes_weights_that_lie_anywhere(numbers: Any) -> None:
    """Also before the first one, and as rows of a larger weight."""
    x, whole = numbers(BF16, 3, 128), numbers(BF16, 96, 128)
    for first in (whole[64:], whole[:32]):
        weights = [first, whole[32:64]]
        assert verify_flashmap._takes(x, weights)
        for found, weight in zip(
            TRITON_OPS["linears"](x, weights, [None] * 2), weights, strict=True
        ):
            check(found, x.double() @ weight.double().T, PRODUCT[BF16])


@DTYPES
@pytest.mark.parametrize("normed", [False, True], ids=["", "normed"])
@pytest.mark.parametrize(
    ("sequences", "tokens", "heads", "shared", "dim"),
    [(1, 1, 1, 1, 16), (2, 3, 4, 2, 24), (3, 5, 9, 3, 64), on_gpu(8, 17, 32, 8, 128)],
)
@pytest.mark.parametrize("apart", [False, True], ids=["", "apart"])
def test_rotate_into(
    sequences: int, tokens: int, heads: int, shared: int, dim: int, normed: bool, apart: bool,
    dtype: torch.dtype, device: str, numbers: Any,
) -> None:  # fmt: skip
    """In half precision, queries and cache are bit for bit what transformers makes of them."""
    widths = [heads * dim, shared * dim, shared * dim]
    qkv = numbers(dtype, sequences, tokens, sum(widths)).split(widths, dim=-1)
    qkv = [part.contiguous() for part in qkv] if apart else qkv
    norms = [numbers(dtype, dim) + 1 for _ in range(2)] if normed else None
    rope = numbers(dtype, 2, 1 if apart else sequences, tokens, dim).unbind()
    starts = torch.tensor([7, 0, 12, 3, 1, 2, 9, 4], device=device)[:sequences, None]
    places = starts + torch.arange(tokens, device=device)

    query, key, value = (part.unflatten(2, (-1, dim)).transpose(1, 2) for part in qkv)
    if norms is not None:
        query, key = (
            EAGER_OPS["target_norm"](x, norm, 1e-6)
            for x, norm in zip((query, key), norms, strict=True)
        )
    query, key = apply_rotary_pos_emb(query, key, *rope)
    expected = numbers(dtype, 2, sequences, shared, 40, dim)
    before = expected.clone()
    for sequence, row in enumerate(places):
        for cache, new in zip(expected, (key, value), strict=True):
            cache[sequence, :, row] = new[sequence]
    for ops in VERSIONS:
        caches = before.clone()
        found = ops["rotate_into"](qkv, norms, 1e-6, rope, places, *caches)
        assert found.shape == (sequences, tokens, heads, dim)
        for one, right in ((found, query.transpose(1, 2)), (caches, expected)):
            if dtype != F32:  # a sum in another order may part a norm by one rounding
                assert (one == right).sum() >= one.numel() * (1.0 if norms is None else 0.99)
            check(one, right.double(), 2 * PRODUCT[dtype])
