"""The bank's projections are exact where its approximations are none, and its drafts are those of
the states that it stands for."""

import json

import pytest
import torch
from support import golden
from torch import Tensor

from flashmap import FlashMapConfig
from flashmap.modeling.flow_flashmap import advance, sharpness
from flashmap.modeling.fused_flashmap import seeded_normal
from flashmap.modeling.step_flashmap import DenseContext
from flashmap.serving import bank
from flashmap.serving.bank import BankedStep, build_bank, coefficients, token_noise

SIZE = 5


@pytest.mark.parametrize("steps", ["1", "2", "3", "4"])
def test_coefficients_are_the_golden_ones(steps: str) -> None:
    expected = json.loads((golden.FOLDER / "jump_coefficients.json").read_text())
    grids = FlashMapConfig().jump_grids
    for found, right in zip(coefficients(grids[steps]), expected[steps], strict=True):
        assert [found[0], *found[1]] == pytest.approx([right[0], *right[1]], abs=1e-12)


def test_tokens_have_the_noise_of_their_columns() -> None:
    seeds, positions = torch.tensor([3, -(2**40)]), torch.tensor([7, 2**20])
    tokens = torch.tensor([[0, 1, 2, 3, 10], [5, 5, 4, 6, 7]])
    for draw in (0, 2):
        dense = seeded_normal(seeds, positions.unsqueeze(1), 12, draw)[:, 0]
        found = token_noise(seeds, positions, torch.full((2,), draw), tokens)
        assert found.equal(dense.gather(1, tokens))


def step(num_steps: int, top: int) -> tuple[golden.Golden, BankedStep]:
    case = golden.load("tiny-fp32")
    made = BankedStep(
        case.model, case.embedding, case.lm_head, 64, num_steps=num_steps, kernels="eager",
        bank_size=SIZE, top=top,
    )  # fmt: skip
    return case, made


@torch.no_grad()
@pytest.mark.parametrize("jump", [1, 2])
def test_projections_are_those_of_the_whole_state(jump: int) -> None:
    """With every token named and the bank's own noise, nothing is approximate."""
    case, made = step(3, top=10**6)
    vocab, embedding = case.model.config.vocab_size, case.embedding
    z = torch.randn(SIZE, vocab, generator=torch.Generator().manual_seed(0))
    predictions = [torch.softmax(3 * torch.randn(SIZE, vocab), dim=-1) for _ in range(jump)]
    state = z
    for own, prediction in zip(made.jumps, predictions, strict=False):
        state = advance(state, prediction, own.start, own.end)
    tokens = torch.stack([torch.randperm(vocab) for _ in range(SIZE)])
    mean, noisy = made.projections(
        jump,
        torch.arange(SIZE),
        tokens.repeat(1, jump),
        [prediction.gather(1, tokens) for prediction in predictions],
        z.gather(1, tokens).repeat(1, jump),
    )
    expected = torch.softmax(state * sharpness(made.jumps[jump].start), dim=-1) @ embedding
    assert (mean - expected).abs().max() < 1e-4 * expected.abs().max()
    expected = state @ embedding
    assert (noisy - expected).abs().max() < 1e-5 * expected.abs().max()


@torch.no_grad()
def test_drafts_are_those_of_the_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two jumps from the bank's noise equal two jumps from the states themselves."""
    case, made = step(2, top=10**6)
    config, cache = case.model.config, case.filled_cache()
    lengths = torch.tensor(cache.lengths)
    batch = len(lengths)
    z = torch.randn(SIZE, config.vocab_size, generator=torch.Generator().manual_seed(0))
    picked: list[Tensor] = []
    philox = bank.philox

    def noted(*words: Tensor) -> tuple[Tensor, ...]:
        found = philox(*words)
        if not picked:
            picked.append(found[0] % SIZE)
        return found

    monkeypatch.setattr(bank, "philox", noted)
    monkeypatch.setattr(bank, "token_noise", lambda *given: z[picked[0]].gather(1, given[3]))
    context = DenseContext(made, cache.kv, lengths)
    found = made.hidden(context, lengths, seeds=torch.arange(batch))
    state = z[picked[0]].view(batch, config.block_size, -1)
    expected = made.hidden(context, lengths, noise=state)
    assert (found - expected).abs().max() < 1e-3 * expected.abs().max()
    other = made.hidden(context, lengths, noise=state.flip(0))
    assert (found - other).abs().max() > 1e-2 * expected.abs().max()


def test_a_bank_is_the_same_every_time() -> None:
    embedding = torch.randn(11, 6)
    one, other = (build_bank(embedding, [0.0, 0.6], 300) for _ in range(2))
    assert one.noise.shape == (300, 6)
    assert one.noise.equal(other.noise)
    assert not one.noise[:128].equal(one.noise[128:256])
