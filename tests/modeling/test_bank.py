"""Jumps from a bank of noise: the stated sums in float64, exact jumps where nothing is approximate,
and the same block in any batch."""

import json
from itertools import pairwise
from typing import Any

import pytest
import torch
from support import exact, golden, toys
from support.golden import assert_matches
from support.steps import Toy, anchored
from torch import Tensor

from flashmap.modeling.fused_flashmap import Stream, philox, seeded_normal
from flashmap.modeling.select_flashmap import select_ops
from flashmap.modeling.states_flashmap import BankState, NoiseBank, noise_bank
from flashmap.modeling.step_flashmap import FusedStep

EAGER = select_ops("cpu", torch.float32, "eager")
SEEDS, POSITIONS = torch.tensor([3, -(2**40)]), torch.tensor([[5, 6, 7], [2**20, 9, 10]])
GRID = [0.0, 0.6, 0.8, 1.0]
ROWS = [(seed, draw, slot) for seed in range(2) for draw in range(2) for slot in range(3)]


@pytest.fixture(scope="module")
def toy() -> Toy:
    return Toy()


@pytest.mark.parametrize("steps", ["2", "3", "4"])
def test_predictions_weigh_what_the_golden_coefficients_say(steps: str) -> None:
    expected = json.loads((golden.FOLDER / "jump_coefficients.json").read_text())[steps]
    grid, embedding = toys.FlashMapConfig().jump_grids[steps], torch.ones(1, 1)
    bank = noise_bank(embedding, grid, 1)
    state = BankState(bank, embedding, EAGER, SEEDS, POSITIONS, 1, torch.zeros(1).long())
    for start, (end, (kept, weights)) in zip(
        grid[:-2], zip(grid[1:-1], expected[1:], strict=True), strict=True
    ):
        state.advance(torch.zeros(6, 1), start, end)  # the only token, with certainty
        assert state._weights[0].tolist() == pytest.approx(weights, abs=1e-6)
        linear = state.projections(torch.float32)[1]
        noise = bank.noise[0, 0]
        assert linear[0, 0].item() == pytest.approx(kept * noise.item() + sum(weights), abs=1e-5)


@pytest.mark.parametrize("tokens", [list(range(13)), [1, 4, 5, 11]], ids=["all", "some"])
def test_projections_are_the_sums_over_the_vocabulary(tokens: list[int]) -> None:
    vocab, size, top = 13, 5, 3
    generator = torch.Generator().manual_seed(1)
    embedding = torch.randn(vocab, 6, generator=generator)
    bank = noise_bank(embedding, GRID, size)
    z = torch.randn(size, vocab, generator=torch.Generator().manual_seed(0))
    state = BankState(bank, embedding, EAGER, SEEDS, POSITIONS, 2, torch.tensor(tokens), top)
    deltas = torch.zeros(len(ROWS), vocab, dtype=torch.float64)
    named: list[set[int]] = [set() for _ in ROWS]
    for start, end in pairwise(GRID[:-1]):
        logits = 2 * torch.randn(len(ROWS), len(tokens), generator=generator)
        state.advance(logits, start, end)
        mean, linear = state.projections(torch.float64)
        for row, (sequence, draw, slot) in enumerate(ROWS):
            seed, position = int(SEEDS[sequence]), int(POSITIONS[sequence, slot])
            own = z[philox(0, position, draw, int(Stream.BANK), seed)[0] % size]
            place = torch.tensor([[position]])
            fresh = seeded_normal(torch.tensor([seed]), place, vocab, draw)[0, 0]
            chances = logits[row].double().softmax(0)
            deltas[row] *= (1 - end) / (1 - start)
            for best in chances.argsort(descending=True)[:top].tolist():
                deltas[row, tokens[best]] += (end - start) / (1 - start) * chances[best]
                named[row].add(tokens[best])
            right = exact.bank_projections(own, fresh, deltas[row], named[row], embedding, end)
            assert mean is not None
            for found, sums in zip((mean[row], linear[row]), right, strict=True):
                assert (found - sums).abs().max() < 2e-5 * sums.abs().max()


@torch.no_grad()
def with_own_noise(toy: Toy, step: FusedStep) -> Tensor:
    """Make the bank's draws those of the exact jumps; returns them, (G, K, V)."""
    slots = 9 + 1 + torch.arange(toy.model.config.block_size).expand(3, -1)
    state = EAGER.block_noise(toy.seeds, slots, toys.VOCAB, 1, torch.float32)
    size = 5000
    picked = EAGER.bank_rows(toy.seeds, slots, 1, size)
    assert len(set(picked.tolist())) == len(picked)
    z, embedding = torch.zeros(size, toys.VOCAB), step.embedding
    z[picked] = state.flatten(0, 1)
    scores = {jump.start: z * jump.start / (1 - jump.start) for jump in step.jumps[1:]}
    step._bank = NoiseBank(
        z @ embedding,
        {time: score.softmax(-1) @ embedding for time, score in scores.items()},
        {time: score.logsumexp(-1) for time, score in scores.items()},
    )
    return state


@torch.no_grad()
@pytest.mark.parametrize("num_steps", [2, 3])
def test_drafts_are_the_exact_ones_where_nothing_is_approximate(num_steps: int, toy: Toy) -> None:
    """Every token goes on, and the bank holds the noise that the tokens have."""
    step = toy.step(num_steps=num_steps, jump_bank_size=1, jump_topk=toys.VOCAB)
    other = toy.found(step)
    state = with_own_noise(toy, step)
    found = toy.found(step)
    assert_matches(found, toy.expected(num_steps))
    context = anchored(step, toy.features, toy.anchors)
    assert_matches(found, step.logits(step.hidden(context, context.lengths, noise=state)))
    assert (found - other).abs().max() > 1e-3 * found.abs().max()


def test_a_bank_of_one_jump_is_none(toy: Toy) -> None:
    step = toy.step(num_steps=1, jump_bank_size=7)
    assert step._bank is None
    assert toy.found(step).equal(toy.found(toy.step(num_steps=1)))


@pytest.mark.parametrize("num_steps", [2, 3])
def test_a_row_drafts_the_same_alone(num_steps: int, toy: Toy) -> None:
    step = toy.step(num_steps=num_steps, jump_bank_size=40)
    together = toy.found(step, num_draws=2)
    for row in range(3):
        alone = toy.found(step, slice(row, row + 1), num_draws=2)
        assert_matches(together[2 * row : 2 * row + 2], alone)
    assert_matches(together[::2], toy.found(step))
    assert (together[0] - together[1]).abs().max() > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("num_draws", [1, 2])
def test_the_model_drafts_as_the_step(num_draws: int, toy: Toy) -> None:
    cache = toy.model.new_cache(3, 10)
    toy.model.extend_context(cache, toy.features)
    expected = toy.model.draft(
        toy.anchor_ids, cache, toy.embed_tokens, toy.lm_head, 2, seed=toy.seeds.tolist(),
        num_draws=num_draws, jump_bank_size=40,
    ).flatten(0, -3)  # fmt: skip
    found = toy.found(toy.step(num_steps=2, jump_bank_size=40), num_draws=num_draws)
    assert_matches(found, expected)
    assert (expected - toy.expected(2, num_draws=num_draws)).abs().max() > 1e-3


def test_a_bank_is_the_same_every_time_and_holds_no_draw_twice() -> None:
    embedding = torch.randn(11, 6, generator=torch.Generator().manual_seed(2))
    one, other = (noise_bank(embedding, GRID, 300) for _ in range(2))
    assert one.noise.shape == (300, 6) and one.noise.equal(other.noise)
    assert one.means.keys() == one.log_totals.keys() == {0.6, 0.8}
    assert torch.cdist(one.noise, one.noise).fill_diagonal_(1.0).min() > 1e-3


@pytest.mark.parametrize("size", [-1, 2**20 + 1, 1.5, True, "8"])
def test_what_is_no_size(size: Any, toy: Toy) -> None:
    with pytest.raises(ValueError, match=r"jump_bank_size=.* is not valid"):
        toy.step(num_steps=2, jump_bank_size=size)
    with pytest.raises(ValueError, match=r"jump_bank_size=.* is not valid"):
        toys.drafter().spec_generate(toys.llama(), toys.prompt(4), jump_bank_size=size)


@pytest.mark.parametrize("top", [0, 2.0])
def test_what_is_no_number_of_tokens(top: Any, toy: Toy) -> None:
    with pytest.raises(ValueError, match=r"jump_topk=.* is not valid: .* from 1 to"):
        toy.step(num_steps=2, jump_bank_size=4, jump_topk=top)
