"""Every fused operation, in plain PyTorch and in Triton, equals its float64 formula; in half
precision Triton rounds as the specification does."""

from typing import Any

import pytest
import torch
from support import exact
from torch import Tensor

from flashmap.kernels.fused_flashmap import rope_table, seeded_normal
from flashmap.kernels.reference_flashmap import EAGER_OPS, kv_layout
from flashmap.kernels.select_flashmap import TRITON_OPS

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
THETA = 10000.0
# Largest error relative to the largest number. float32: sums of up to 4096 terms and the device's
# rsqrt; half precision: three roundings of 2^-11 (float16) or 2^-8 (bfloat16) one after another.
NORMS = {F32: 2e-6, F16: 3 * 2.0**-11, BF16: 3 * 2.0**-8}
# Scores sum d products of rounded queries and keys, weights round once more before the values.
ATTENTION = {F32: 1e-5, BF16: 8 * 2.0**-8}
# float32 angles of positions up to 200 are off by 200 * 2^-24.
ROTATED = {F32: 2e-5, F16: 3 * 2.0**-11, BF16: 3 * 2.0**-8}
DTYPES = pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=["f32", "bf16", "f16"])
# An attention kernel takes seconds to compile, and float16 goes the way of bfloat16.
FEWER_DTYPES = pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])


def on_gpu(*values: Any) -> Any:
    """A case that the interpreter takes too long for."""
    return pytest.param(*values, marks=pytest.mark.gpu)


class Numbers:
    """Random tensors of one dtype on one device."""

    def __init__(self, device: str, dtype: torch.dtype, seed: int = 0) -> None:
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, mean: float = 0.0) -> Tensor:
        drawn = torch.randn(shape, generator=self.generator) + mean
        return drawn.to(self.device, self.dtype)

    def positions(self, count: int) -> Tensor:
        return torch.randint(0, 200, (count,), generator=self.generator).to(self.device)


def check(found: Tensor, exact_value: Tensor, tolerance: float) -> None:
    assert found.shape == exact_value.shape
    assert not found.isnan().any()
    assert (found.double() - exact_value).abs().max() <= tolerance * exact_value.abs().max()


def check_rounding(found: Tensor, reference: Tensor) -> None:
    """Half precision: equal bits, but where float32 sums in another order lie on the other side of
    a rounding boundary; two roundings may part there, and a difference of nearly equal numbers
    keeps the roundings of those."""
    assert found.dtype == reference.dtype
    if found.dtype == F32:
        return
    assert (found != reference).sum() <= max(1, 5e-3 * found.numel())
    units = (found.view(torch.int16).int() - reference.view(torch.int16).int()).abs()
    of_terms = (found - reference).abs() <= torch.finfo(found.dtype).eps * reference.abs().max()
    assert ((units <= 2) | of_terms).all()


ROWS = [(1, 1), (3, 24), (2, 576), (5, 1000), on_gpu(64, 4096), on_gpu(3, 8191)]


@DTYPES
@pytest.mark.parametrize(("rows", "columns"), ROWS)
def test_norms(rows: int, columns: int, dtype: torch.dtype, device: str) -> None:
    numbers = Numbers(device, dtype)
    x, weight, gate, base = numbers(rows, columns), numbers(columns, mean=1.0), numbers(1), None
    for base in (numbers(1, columns), numbers(rows, columns)):
        for ops in (EAGER_OPS, TRITON_OPS):
            norm = exact.norm(x, weight, 1e-6)
            for name in ("rms_norm", "target_norm"):
                check(ops[name](x, weight, 1e-6), norm, NORMS[dtype])
            gated = base.double() + gate.double() * norm
            check(ops["gated_norm"](x, weight, 1e-6, gate, base), gated, NORMS[dtype])
        arguments = (x, weight, 1e-6, gate, base)
        check_rounding(TRITON_OPS["gated_norm"](*arguments), EAGER_OPS["gated_norm"](*arguments))
    for name in ("rms_norm", "target_norm"):
        check_rounding(TRITON_OPS[name](*arguments[:3]), EAGER_OPS[name](*arguments[:3]))


@DTYPES
@pytest.mark.parametrize(("rows", "columns"), ROWS[1:])
def test_adaptive_norms(rows: int, columns: int, dtype: torch.dtype, device: str) -> None:
    numbers = Numbers(device, dtype)
    x, branch = numbers(rows, columns, mean=0.5), numbers(rows, columns)
    gate, scale, shift = numbers(columns), numbers(columns, mean=1.0), numbers(columns)
    exact_total = x.double() + gate.double() * branch.double()
    for ops in (EAGER_OPS, TRITON_OPS):
        plain = ops["adaln"](x, scale, shift, 1e-6)
        check(plain, exact.layer_norm(x, scale, shift, 1e-6), NORMS[dtype])
        total, out = ops["gated_adaln"](x, branch, gate, scale, shift, 1e-6)
        check(total, exact_total, NORMS[dtype])
        check(out, exact.layer_norm(total, scale, shift, 1e-6), NORMS[dtype])
    arguments = (x, branch, gate, scale, shift, 1e-6)
    pairs = zip(TRITON_OPS["gated_adaln"](*arguments), EAGER_OPS["gated_adaln"](*arguments))  # noqa: B905
    for found, reference in pairs:
        check_rounding(found, reference)


HEADS = [(1, 16), (9, 64), (3, 20), (2, 96), on_gpu(32, 256), on_gpu(16, 128), on_gpu(5, 250)]


@DTYPES
@pytest.mark.parametrize(("heads", "width"), HEADS)
def test_norm_and_rotation(heads: int, width: int, dtype: torch.dtype, device: str) -> None:
    numbers = Numbers(device, dtype)
    x, weight, positions = numbers(3, heads, width), numbers(width, mean=1.0), numbers.positions(3)
    rope = rope_table(torch.arange(200, device=device), width, THETA)
    expected = exact.rotate(exact.norm(x, weight, 1e-5), positions, THETA)
    results = [
        ops["norm_rope"](x, weight, 1e-5, rope, positions) for ops in (EAGER_OPS, TRITON_OPS)
    ]
    for found in results:
        check(found, expected, ROTATED[dtype])
    check_rounding(results[1], results[0])


BLOCKS = [
    (1, 1, 1, 16), (2, 5, 3, 20), (1, 7, 1, 64), (1, 8, 9, 10), (1, 16, 2, 32), (1, 33, 1, 24),
    on_gpu(2, 64, 32, 256), on_gpu(3, 12, 9, 96), on_gpu(1, 16, 16, 128), on_gpu(4, 24, 2, 80),
]  # fmt: skip


@FEWER_DTYPES
@pytest.mark.parametrize(("blocks", "slots", "heads", "width"), BLOCKS)
def test_block_attention(
    blocks: int, slots: int, heads: int, width: int, dtype: torch.dtype, device: str
) -> None:
    numbers = Numbers(device, dtype)
    qkv, positions = numbers(blocks, slots, 3, heads, width), numbers.positions(blocks * slots)
    q_weight, k_weight = numbers(width, mean=1.0), numbers(width, mean=1.0)
    rope = rope_table(torch.arange(200, device=device), width, THETA)
    expected = torch.empty(blocks, slots, heads, width, dtype=torch.float64, device=device)
    for block, places in enumerate(positions.view(blocks, slots)):
        query, key, value = qkv[block].unbind(dim=1)
        query = exact.rotate(exact.norm(query, q_weight, 1e-5), places, THETA)
        key = exact.rotate(exact.norm(key, k_weight, 1e-5), places, THETA)
        expected[block] = exact.attend(query, key, value)
    for ops in (EAGER_OPS, TRITON_OPS):
        found = ops["block_attention"](qkv, q_weight, k_weight, 1e-5, rope, positions)
        check(found, expected, 2 * ATTENTION[dtype])


CONTEXTS = [
    (1, 1, 1, 1, 16, 1), (2, 2, 5, 3, 20, 40), (1, 3, 8, 2, 64, 300), (2, 1, 33, 1, 24, 129),
    on_gpu(1, 1, 16, 16, 128, 16384), on_gpu(8, 4, 16, 9, 64, 2048), on_gpu(2, 1, 64, 2, 256, 999),
]  # fmt: skip


@FEWER_DTYPES
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize(("sequences", "draws", "slots", "heads", "width", "room"), CONTEXTS)
def test_context_attention(
    sequences: int, draws: int, slots: int, heads: int, width: int, room: int, causal: bool,
    dtype: torch.dtype, device: str,
) -> None:  # fmt: skip
    numbers = Numbers(device, dtype)
    query = numbers(sequences * draws, slots, heads, width)
    more = slots - 1 if causal else 0
    caches = numbers(2, sequences, heads, room + more, width)
    lengths = torch.tensor([room - 1, 0, room // 2] * 3, device=device)[:sequences]
    expected = torch.empty(query.shape, dtype=torch.float64, device=device)
    for block, rows in enumerate(query):
        first = int(lengths[block // draws]) + 1
        ends = range(first, first + slots) if causal else [first]
        parts = rows.split(1) if causal else [rows]
        for slot, (end, part) in enumerate(zip(ends, parts, strict=True)):
            key, value = caches[:, block // draws, :, :end].transpose(1, 2)
            expected[block, slot : slot + len(part)] = exact.attend(part, key, value)
    for sequence, length in enumerate(lengths.tolist()):
        caches[:, sequence, :, length + 1 + more :] = 1e4  # what lies beyond must not be seen
    for ops in (EAGER_OPS, TRITON_OPS):
        found = ops["context_attention"](query, *caches, lengths, causal)
        check(found, expected, ATTENTION[dtype])


@FEWER_DTYPES
@pytest.mark.parametrize("group", [2, 3])
def test_neighbouring_heads_share_keys(group: int, dtype: torch.dtype, device: str) -> None:
    """As if every head had a copy of them."""
    numbers = Numbers(device, dtype)
    query, caches = numbers(4, 5, 2 * group, 16), numbers(2, 2, 2, 70, 16)
    lengths = torch.tensor([60, 3], device=device)
    copied = caches.repeat_interleave(group, dim=2)
    expected = EAGER_OPS["context_attention"](query, *copied, lengths, True)
    for ops in (EAGER_OPS, TRITON_OPS):
        found = ops["context_attention"](query, *caches, lengths, True)
        check(found, expected.double(), ATTENTION[dtype])


def test_a_layout_refuses_layers_that_differ() -> None:
    views = [torch.zeros(2, 4, 3, 16), torch.zeros(2, 4, 3, 16).transpose(1, 2).contiguous()]
    with pytest.raises(ValueError, match="share one layout"):
        kv_layout(views, views)
    with pytest.raises(ValueError, match="side by side"):
        kv_layout([views[0].transpose(2, 3)], [views[0].transpose(2, 3)])


@pytest.mark.parametrize(("columns", "dtype"), [(1, F32), (3, BF16), (1030, F32), (64, F16)])
def test_noise_is_the_seeded_noise(columns: int, dtype: torch.dtype, device: str) -> None:
    seeds = torch.tensor([5, -(2**60)], device=device)
    positions = torch.tensor([[0, 1, 7], [2**20, 4, 9]], device=device)
    for ops in (EAGER_OPS, TRITON_OPS):
        found = ops["block_noise"](seeds, positions, columns, 2, dtype)
        assert found.shape == (4, 3, columns) and found.dtype == dtype
        for draw in range(2):
            drawn = seeded_normal(seeds.cpu(), positions.cpu(), columns, draw)
            error = (found.view(2, 2, 3, columns)[:, draw].cpu().float() - drawn).abs()
            assert (error <= 5e-6 + drawn.abs() * torch.finfo(dtype).eps).all()


def test_noise_does_not_depend_on_the_batch(device: str) -> None:
    seeds = torch.tensor([5, 11, -3], device=device)
    positions = torch.tensor([[4, 5], [7, 8], [5, 6]], device=device)
    together = TRITON_OPS["block_noise"](seeds, positions, 33, 2, F32).view(3, 2, 2, 33)
    for row in range(3):
        alone = TRITON_OPS["block_noise"](
            seeds[row : row + 1], positions[row : row + 1], 33, 1, F32
        )
        assert alone[0].equal(together[row, 0])
        assert not together[row, 0].equal(together[row, 1])
