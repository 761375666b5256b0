"""Draft tokens: the stated draw, in Triton the same tokens as in the reference, in any batch."""

import pytest
import torch
from support.chi_square import p_value
from torch import Tensor

from flashmap.kernels.fused_flashmap import Stream, seeded_uniform
from flashmap.kernels.sampling import (
    gumbel_noise,
    sample_tokens,
    scatter_rows,
    triton_argmax_tokens,
    triton_sample_tokens,
    triton_scatter_rows,
)

WIDTH = 4099  # more than a tile, and no multiple of four
EVERYTHING = torch.arange(WIDTH)
SOME = torch.randperm(WIDTH, generator=torch.Generator().manual_seed(1))[:257].sort().values


def logits(rows: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (2 * torch.randn(rows, width, generator=torch.Generator().manual_seed(0))).to(dtype)


def test_gumbel_noise_is_that_of_the_stream() -> None:
    seeds, positions = torch.tensor([7, -3]), torch.tensor([12, 2**20])
    found = gumbel_noise(seeds, positions, SOME)
    for row in range(2):
        place = positions[row : row + 1, None]
        uniforms = seeded_uniform(seeds[row : row + 1], place, WIDTH, Stream.GUMBEL)[0, 0, SOME]
        exact = -(-uniforms.double().log()).log()
        assert (found[row] - exact).abs().max() < 1e-5


def test_draws_follow_the_softmax_at_the_temperature() -> None:
    rows, scores = 20_000, torch.tensor([1.0, 0.0, -2.0, 0.5, 0.3, 2.0])
    tokens = torch.tensor([3, 4, 9, 17, 18, 40])
    drawn = sample_tokens(
        scores.expand(rows, -1),
        torch.full((rows,), 1.5),
        torch.arange(rows),
        torch.full((rows,), 9),
        tokens,
    )
    counts = torch.tensor([(drawn == token).sum() for token in tokens])
    assert p_value(counts, (scores.double() / 1.5).softmax(0)) > 1e-3
    assert p_value(counts, scores.double().softmax(0)) < 1e-3


@pytest.mark.parametrize("tokens", [EVERYTHING, SOME], ids=["all", "some"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triton_draws_the_same_tokens(tokens: Tensor, dtype: torch.dtype, device: str) -> None:
    scores, temperatures = logits(6, len(tokens), dtype), torch.tensor([0.0, 0.3, 1, 1, 2, 0])
    seeds, positions = torch.tensor([1, 2, 3, -4, 5, 6]), torch.tensor([1, 5, 5, 9, 2**20, 3])
    arguments = (scores, temperatures, seeds, positions, tokens)
    expected = sample_tokens(*arguments)
    found = triton_sample_tokens(*(argument.to(device) for argument in arguments))
    assert found.tolist() == expected.tolist()
    assert set(expected.tolist()) <= set(tokens.tolist())
    alone = triton_sample_tokens(
        *(argument[2:3].to(device) for argument in arguments[:-1]), tokens.to(device)
    )
    assert alone.tolist() == expected[2:3].tolist()


def test_a_draft_vocabulary_draws_as_the_whole_one_without_the_rest() -> None:
    scores = logits(8, WIDTH)
    rest = (torch.ones(8), torch.arange(8), torch.arange(8))
    masked = torch.full_like(scores, -float("inf"))
    masked[:, SOME] = scores[:, SOME]
    narrow = sample_tokens(scores[:, SOME], *rest, SOME)
    assert narrow.equal(sample_tokens(masked, *rest, EVERYTHING))


def test_the_largest_logit_and_the_first_of_equal_ones(device: str) -> None:
    scores = logits(4, WIDTH)
    scores[0, [4098, 4096, 20]] = 50.0  # ties within and across tiles
    scores[1, [4095, 4096]] = 50.0
    scores[2] = -7.0
    expected = [20, 4095, 0, int(scores[3].argmax())]
    zeros = torch.zeros(4, dtype=torch.int64)
    assert sample_tokens(scores, torch.zeros(4), zeros, zeros, EVERYTHING).tolist() == expected
    assert triton_argmax_tokens(scores.to(device), EVERYTHING.to(device)).tolist() == expected
    narrow = triton_argmax_tokens(scores[:, SOME].to(device), SOME.to(device))
    assert narrow.tolist() == SOME[scores[:, SOME].argmax(dim=1)].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scatter(dtype: torch.dtype, device: str) -> None:
    source, requests = logits(5, 257), torch.tensor([1, -1, 0, 2, 1])
    columns = torch.tensor([0, 0, 2, 1, 1])
    expected = torch.full((3, 3, WIDTH), -float("inf"), dtype=dtype)
    for row in (0, 2, 3, 4):
        for j, token in enumerate(SOME.tolist()):
            expected[requests[row], columns[row], token] = source[row, j].to(dtype)
    for scatter, where in ((scatter_rows, "cpu"), (triton_scatter_rows, device)):
        out = torch.full((3, 3, WIDTH), -float("inf"), dtype=dtype, device=where)
        scatter(*(part.to(where) for part in (source, requests, columns, SOME)), out)
        assert out.cpu().equal(expected)
