"""What lies between two jumps, in plain PyTorch and in Triton, equals its float64 formula."""

import pytest
import torch
from support import exact

from flashmap.kernels.fused_flashmap import Stream, philox, seeded_normal, seeded_normal_at
from flashmap.kernels.reference_flashmap import EAGER_OPS
from flashmap.kernels.select_flashmap import TRITON_OPS

F32, BF16 = torch.float32, torch.bfloat16
# float32: exponentials of numbers up to 100 keep 100 2^-24 of themselves; bfloat16: one rounding.
TOLERANCES = {F32: 2e-5, BF16: 2.0**-8}
SEEDS, POSITIONS = torch.tensor([5, -(2**60)]), torch.tensor([[0, 1, 7], [2**20, 4, 9]])
DTYPES = pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])


@DTYPES
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 61), (2, 4096), (2, 9001)])
@pytest.mark.parametrize(("start", "end"), [(0.0, 0.82), (0.8, 0.83)])
def test_next_state(
    rows: int, width: int, start: float, end: float, dtype: torch.dtype, device: str
) -> None:
    generator = torch.Generator().manual_seed(0)
    state = torch.randn(rows, width, generator=generator)
    logits = (6 * torch.randn(rows, width, generator=generator)).to(dtype)
    prediction = logits.double().softmax(-1)
    moved = ((1 - end) * state.double() + (end - start) * prediction) / (1 - start)
    posterior = (moved * (end / (1 - end) ** 2)).softmax(-1)
    for ops in (EAGER_OPS, TRITON_OPS):
        found, projected = ops["next_state"](state.to(device), logits.to(device), start, end, dtype)
        assert found.dtype == F32 and projected.dtype == dtype
        assert (found.cpu() - moved).abs().max() <= 1e-6 * moved.abs().max()
        for part, right in zip(projected.cpu().split(rows), (posterior, moved), strict=True):
            assert (part - right).abs().max() <= TOLERANCES[dtype] * right.abs().max()


@pytest.mark.parametrize("size", [1, 50, 8192])
def test_rows_of_a_bank(size: int, device: str) -> None:
    expected = [
        philox(0, position, draw, int(Stream.BANK), seed)[0] % size
        for seed, positions in zip(SEEDS.tolist(), POSITIONS.tolist(), strict=True)
        for draw in range(2)
        for position in positions
    ]
    for ops in (EAGER_OPS, TRITON_OPS):
        found = ops["bank_rows"](SEEDS.to(device), POSITIONS.to(device), 2, size)
        assert found.dtype == torch.int64 and found.tolist() == expected


def test_numbers_of_single_columns() -> None:
    columns = torch.tensor([[0, 1, 2, 3, 10], [5, 5, 4, 6, 7]])
    for draw in (0, 2):
        whole = seeded_normal(SEEDS, POSITIONS[:, 2:], 12, draw)[:, 0]
        found = seeded_normal_at(SEEDS, POSITIONS[:, 2], torch.full((2,), draw), columns)
        assert (found - whole.gather(1, columns)).abs().max() < 1e-6


@DTYPES
@pytest.mark.parametrize(("named", "width"), [(1, 6), (5, 130), (16, 200), (33, 40)])
def test_projections_from_a_bank(named: int, width: int, dtype: torch.dtype, device: str) -> None:
    """Tokens are named more than once, and one of them with nothing."""
    vocab, size, time = 41, 7, 0.82
    generator = torch.Generator().manual_seed(named)
    z = torch.randn(size, vocab, generator=generator)
    embedding = torch.randn(vocab, width, generator=generator).to(dtype)
    scores = z.double() * time / (1 - time)
    mean = (scores.softmax(-1) @ embedding.double()).to(dtype)
    noise, log_total = (z.double() @ embedding.double()).to(dtype), scores.logsumexp(-1).float()
    tokens = torch.randint(0, vocab, (12, named), generator=generator)
    weights = torch.rand(12, named, generator=generator) / named
    weights[:, -1] = 0.0
    picked = torch.randint(0, size, (12,), generator=generator)
    arguments = (noise, mean, log_total), embedding, picked, (tokens, weights)
    seeded = seeded_normal(SEEDS, POSITIONS, vocab), seeded_normal(SEEDS, POSITIONS, vocab, 1)
    fresh = torch.stack(seeded, dim=1).flatten(0, 2)
    rights = []
    for row in range(12):
        delta = torch.zeros(vocab).index_add(0, tokens[row], weights[row])
        own, names = z[picked[row]], set(tokens[row].tolist())
        rights.append(exact.bank_projections(own, fresh[row], delta, names, embedding, time))
    expected = [torch.stack(parts) for parts in zip(*rights, strict=True)]
    for ops in (EAGER_OPS, TRITON_OPS):
        moved = [
            part.to(device) if isinstance(part, torch.Tensor) else [one.to(device) for one in part]
            for part in arguments
        ]
        counters = SEEDS.to(device), POSITIONS.to(device), 2
        results = ops["bank_inputs"](*moved, counters, time, dtype)
        for found, right in zip(results, expected, strict=True):
            assert found.dtype == dtype
            # the bank's own numbers are rounded before they are added up
            allowed = 2 * TOLERANCES[dtype] * right.abs().max()
            assert (found.cpu() - right).abs().max() <= allowed
