"""Sampled text has the target's exact joint distribution: chi-square at fixed seeds."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import toys
from support.chi_square import joint_counts, p_value
from support.table_models import TableDrafter, TableTarget, reasonable, wrong
from torch import Tensor

from flashmap import FlashMapDraftModel
from flashmap.modeling import sampling_flashmap
from flashmap.modeling.decoding_flashmap import spec_generate

VOCAB, BLOCK = 20, 3
NUM_TOKENS = BLOCK + 2  # the first token, a whole block and its bonus token
PROMPT = torch.tensor([[4, 7]])
Quality = Callable[[TableTarget, int, int], Tensor]


def sample(drafter: Any, target: Any, temperature: float, count: int, **arguments: Any) -> Tensor:
    """Continuations (count, NUM_TOKENS) of PROMPT, seeds 0, 1, 2, ..."""
    arguments = {"max_new_tokens": NUM_TOKENS, "stop_token_ids": [], **arguments}
    rows = []
    for seed in range(count):
        out = spec_generate(
            drafter, target, PROMPT, temperature=temperature, seed=seed, **arguments
        )
        rows.append(out.sequences[0, PROMPT.shape[1] :].tolist())
    return torch.tensor(rows)


def p_values(samples: Tensor, joint: Tensor) -> list[float]:
    """Of the first three tokens together, each later pair of neighbours, and each token alone."""
    size, axes = joint.shape[0], joint.dim()
    values = []
    pairs, singles = [(i, i + 1) for i in range(2, axes - 1)], [(i,) for i in range(axes)]
    for columns in ((0, 1, 2), *pairs, *singles):
        others = tuple(axis for axis in range(axes) if axis not in columns)
        exact = joint.sum(others) if others else joint
        counts = joint_counts(samples[:, list(columns)].tolist(), size)
        values.append(p_value(counts, exact))
    return values


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize(("quality", "num_tokens"), [(reasonable, NUM_TOKENS), (wrong, 4)])
def test_20000_continuations_have_the_targets_joint_distribution(
    quality: Quality, num_tokens: int, temperature: float
) -> None:
    target = TableTarget(VOCAB)
    drafter = TableDrafter(quality(target, BLOCK, VOCAB))
    samples = sample(drafter, target, temperature, 20_000, max_new_tokens=num_tokens)
    values = p_values(samples, target.joint(PROMPT, temperature, num_tokens))
    assert min(values) > 0.001, values
    exact = target.joint(PROMPT, temperature, 1)
    neighbours = joint_counts(samples[:, 0].reshape(-1, 2).tolist(), VOCAB)  # seeds 2i, 2i + 1
    assert p_value(neighbours, exact[:, None] * exact) > 0.001


def test_tokens_beyond_the_drafters_vocabulary_come_as_often_as_the_target_says() -> None:
    target = TableTarget(VOCAB + 4, seed=3)
    drafter = TableDrafter(reasonable(target, BLOCK, VOCAB))
    samples = sample(drafter, target, 0.8, 4_000)
    assert (samples >= VOCAB).any(dim=0).all()
    values = p_values(samples, target.joint(PROMPT, 0.8, NUM_TOKENS))
    assert min(values) > 0.001, values


class TestTheTestRejects:
    """Each wrong rule is one that an implementation could plausibly have."""

    def values(self, quality: Quality = reasonable) -> list[float]:
        target = TableTarget(VOCAB)
        drafter = TableDrafter(quality(target, BLOCK, VOCAB))
        samples = sample(drafter, target, 1.0, 2_000)
        return p_values(samples, target.joint(PROMPT, 1.0, NUM_TOKENS))

    def patch_coin(self, monkeypatch: pytest.MonkeyPatch, stream: str, rule: Any) -> None:
        honest = sampling_flashmap.coin

        def coin(seed: int, position: int, kind: Any) -> float:
            value = honest(seed, position, kind)
            return float(rule(value, seed, position)) if kind.name == stream else value

        monkeypatch.setattr(sampling_flashmap, "coin", coin)

    def test_accepting_every_draft(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.patch_coin(monkeypatch, "ACCEPT", lambda u, seed, position: 0.0)
        assert min(self.values()) < 1e-6

    def test_rejecting_too_many_drafts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.patch_coin(monkeypatch, "ACCEPT", lambda u, seed, position: u**0.25)
        assert min(self.values()) < 1e-6

    def test_a_coin_that_is_shared_with_the_draft(self, monkeypatch: pytest.MonkeyPatch) -> None:
        honest = sampling_flashmap.coin
        draft = sampling_flashmap.Stream.DRAFT
        self.patch_coin(
            monkeypatch, "ACCEPT", lambda u, seed, position: honest(seed, position, draft)
        )
        assert min(self.values()) < 1e-6


def test_a_rejection_where_target_and_drafter_agree_draws_from_the_target(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    honest = sampling_flashmap.coin

    def coin(seed: int, position: int, kind: Any) -> float:
        # Rounding can reject a draft although p = q; a coin above 1 does it every time.
        return 2.0 if kind.name == "ACCEPT" else honest(seed, position, kind)

    monkeypatch.setattr(sampling_flashmap, "coin", coin)
    target = TableTarget(VOCAB)
    target.table[:] = target.table[0]  # one distribution for every last token, as the drafter has
    logits = target.table[0][:, None].repeat(1, BLOCK, 1)
    drafter = TableDrafter(logits, noise=0.0)
    # The first slot agrees exactly; its replacement is the second new token.
    drafter.logits[:, 0] = target.table[0]
    samples = sample(drafter, target, 1.0, 2_500, max_new_tokens=2)
    joint = target.joint(PROMPT, 1.0, 2)
    assert p_value(joint_counts(samples.tolist(), VOCAB), joint) > 0.001


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    target = TableTarget(VOCAB)
    target.table[..., ::2] = float("-inf")
    drafter = TableDrafter(torch.zeros(VOCAB, BLOCK, VOCAB))
    assert (sample(drafter, target, 1.0, 300) % 2 == 1).all()


@torch.no_grad()
def exact_joint(target: Any, temperature: float, num_tokens: int, vocab: int) -> Tensor:
    """The joint distribution of the tokens after PROMPT, by forward passes over every prefix."""
    joint = torch.ones(1, dtype=torch.float64)
    for length in range(num_tokens):
        powers = vocab ** torch.arange(length).flip(0)
        tails = torch.arange(vocab**length)[:, None] // powers % vocab
        ids = torch.cat((PROMPT.expand(vocab**length, -1), tails), dim=1)
        logits = target(ids).logits[:, -1].double()
        joint = joint[:, None] * torch.softmax(logits / temperature, dim=-1)
        joint = joint.flatten()
    return joint.reshape((vocab,) * num_tokens)


def check_real_models(count: int, temperature: float, num_steps: int, seed: int) -> None:
    target = toys.llama(2, vocab_size=VOCAB, num_hidden_layers=1)
    drafter: FlashMapDraftModel = toys.drafter(
        seed, vocab_size=VOCAB, target_layer_ids=[0], num_hidden_layers=1
    )
    samples = sample(drafter, target, temperature, count, num_steps=num_steps, max_new_tokens=3)
    values = p_values(samples, exact_joint(target, temperature, 3, VOCAB))
    assert min(values) > 0.001, values


def test_a_transformer_and_a_flow_map_give_the_targets_joint_distribution() -> None:
    check_real_models(1_500, temperature=1.0, num_steps=1, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize(("temperature", "num_steps"), [(0.7, 1), (1.0, 1), (1.0, 2), (0.7, 4)])
def test_20000_continuations_of_a_transformer_and_a_flow_map(
    temperature: float, num_steps: int
) -> None:
    check_real_models(20_000, temperature, num_steps, seed=4)
