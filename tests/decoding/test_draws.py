"""Several noise draws a block: their mixture is what is drawn from and tested against."""

import itertools
from typing import Any

import pytest
import torch
from decoding.test_distribution import BLOCK, NUM_TOKENS, PROMPT, VOCAB, p_values, sample
from support import toys
from support.oracle import alone, together
from support.table_models import TableDrafter, TableTarget, reasonable

from flashmap.modeling import sampling_flashmap
from flashmap.modeling.draws_flashmap import MOST_DRAWS, DrawChoice
from flashmap.modeling.pace_flashmap import Costs
from flashmap.modeling.sampling_flashmap import Sampler, Sampling


def loud_drafter() -> object:
    """A drafter whose drafts depend on the noise."""
    drafter = toys.drafter()
    with torch.no_grad():
        drafter.noise_gate.fill_(3.0)
    return drafter


@pytest.mark.parametrize("num_steps", [1, 2])
def test_a_draw_is_the_same_whatever_is_drawn_beside_it(num_steps: int) -> None:
    drafter, target = loud_drafter(), toys.llama()
    modules = target.get_input_embeddings(), target.get_output_embeddings()
    features = torch.randn(2, 5, drafter.fc.in_features, generator=torch.Generator().manual_seed(0))

    def draft(num_draws: int, counts: list[int]) -> torch.Tensor:
        cache = drafter.new_cache(2, 16)
        drafter.extend_context(cache, features, counts)
        anchors = torch.tensor([3, 9])
        with torch.no_grad():
            found: torch.Tensor = drafter.draft(
                anchors, cache, *modules, num_steps, seed=[1, 2], num_draws=num_draws
            )
        return found

    for counts in ([5, 5], [5, 2]):
        one, three = draft(1, counts), draft(3, counts)
        assert three.shape == (2, 3, *one.shape[1:])
        torch.testing.assert_close(three[:, 0], one)
        assert (three[:, 1] - one).abs().max() > 0.01
        assert (three[:, 1] - three[:, 2]).abs().max() > 0.01


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_what_is_drawn_from_is_the_mixtures_conditional(temperature: float) -> None:
    draws, slots, vocab = 4, 3, 5
    logits = torch.randn(draws, slots, vocab, generator=torch.Generator().manual_seed(3)) * 2
    drafts, rows = Sampler(Sampling(temperature), 7, [1, 2]).propose(logits, 2)
    q = torch.softmax(logits.double() / (temperature or 1.0), dim=-1)
    joint = torch.zeros((vocab,) * slots, dtype=torch.float64)
    for text in itertools.product(range(vocab), repeat=slots):
        chances = [q[m, torch.arange(slots), torch.tensor(text)].prod() for m in range(draws)]
        joint[text] = sum(chances) / draws
    for slot in range(slots):
        marginal = joint.sum(tuple(range(slot + 1, slots))) if slot + 1 < slots else joint
        conditional = marginal[tuple(drafts[:slot])]
        torch.testing.assert_close(
            rows[slot].double(), conditional / conditional.sum(), rtol=1e-5, atol=1e-6
        )
        if temperature == 0.0:
            assert drafts[slot] == int(conditional.argmax())


def test_a_mixture_that_rules_every_draft_out_starts_anew() -> None:
    logits = torch.full((2, 2, 3), float("-inf"))
    logits[0, :, 0] = logits[1, :, 1] = 0.0
    _, rows = Sampler(Sampling(1.0), 0, [1]).propose(logits, 1)
    assert torch.isfinite(rows).all()
    torch.testing.assert_close(rows.sum(dim=-1), torch.ones(2))


@pytest.mark.parametrize("num_draws", [3])
def test_continuations_have_the_targets_joint_distribution(num_draws: int) -> None:
    target = TableTarget(VOCAB)
    drafter = TableDrafter(reasonable(target, BLOCK, VOCAB), noise=2.0)
    samples = sample(drafter, target, 0.8, 2_000, num_draws=num_draws)
    values = p_values(samples, target.joint(PROMPT, 0.8, NUM_TOKENS))
    assert min(values) > 0.001, values


def test_testing_against_the_chosen_draw_alone_would_be_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def first_draw(self: Sampler, logits: torch.Tensor, position: int) -> object:
        drafts, _ = Sampler._propose_mixture(self, logits, position)
        return drafts, self._probabilities(logits[0])

    honest = Sampler.propose

    def propose(self: Sampler, logits: torch.Tensor, position: int) -> object:
        return (
            first_draw(self, logits, position)
            if logits.dim() == 3
            else honest(self, logits, position)
        )

    monkeypatch.setattr(sampling_flashmap.Sampler, "propose", propose)
    target = TableTarget(VOCAB)
    drafter = TableDrafter(reasonable(target, BLOCK, VOCAB), noise=2.0)
    samples = sample(drafter, target, 0.8, 1_000, num_draws=4)
    assert min(p_values(samples, target.joint(PROMPT, 0.8, NUM_TOKENS))) < 1e-6


@pytest.mark.parametrize("num_draws", [2, 5])
def test_greedy_text_is_the_targets_own(num_draws: int) -> None:
    drafter, target, ids = loud_drafter(), toys.llama(), toys.prompt(7)
    out = drafter.spec_generate(target, ids, max_new_tokens=30, num_draws=num_draws, seed=0)
    assert toys.text_of(out, ids) == toys.greedy(target, ids, 30)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_agreement_is_the_chance_that_a_first_draft_is_accepted(temperature: float) -> None:
    generator = torch.Generator().manual_seed(2)
    logits_MV = torch.randn(4, 6, generator=generator) * 2
    logits = torch.randn(1, 8, generator=generator) * 2
    logits[0, 2] = 4.0 + logits.max()
    alone_, mixed = Sampler(Sampling(temperature), 0, [1]).agreement(logits_MV, logits)
    q = torch.softmax(logits_MV.double() / (temperature or 1.0), dim=-1)
    p = torch.softmax(logits[0].double() / (temperature or 1.0), dim=-1)
    if temperature == 0.0:
        assert alone_ == sum(int(row.argmax()) == 2 for row in q) / 4
        assert mixed == (int(q.mean(dim=0).argmax()) == 2)
    else:
        each = [sum(min(float(row[v]), float(p[v])) for v in range(6)) for row in q]
        both = sum(min(float(q[:, v].mean()), float(p[v])) for v in range(6))
        assert (alone_, mixed) == pytest.approx((sum(each) / 4, both), rel=1e-5)


@pytest.mark.parametrize(("mixed", "several"), [(0.9, True), (0.61, False), (0.5, False)])
def test_several_draws_are_made_where_they_pay(mixed: float, several: bool) -> None:
    choice, chosen = DrawChoice(Costs(0.3, 0.0), 8), []
    for _ in range(100):
        chosen.append(choice.choose())
        if chosen[-1] > 1:
            choice.note(0.6, mixed)
    # One draw: 2.48 tokens for 1.3. Several, for 1.48: 6.1 tokens at 0.9, 2.53 at 0.61.
    assert set(chosen) == {1, MOST_DRAWS} or several
    assert chosen.count(MOST_DRAWS) == 100 if several else chosen.count(MOST_DRAWS) <= 10


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_auto_is_one_draw_where_the_noise_is_not_heeded(temperature: float) -> None:
    drafter, target, ids = toys.drafter(), toys.llama(), toys.prompt(7)
    with torch.no_grad():
        drafter.noise_gate.zero_()
    arguments: dict[str, Any] = {"temperature": temperature, "seed": 3}
    one = drafter.spec_generate(target, ids, 20, **arguments)
    auto = drafter.spec_generate(target, ids, 20, num_draws="auto", **arguments)
    assert auto.sequences.equal(one.sequences)
    assert auto.acceptance_lengths == one.acceptance_lengths


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_auto_is_the_same_alone_and_in_a_batch(temperature: float) -> None:
    drafter, target, seeds = loud_drafter(), toys.llama(), [3, 4]
    prompts = [toys.prompt(3), toys.prompt(7, 1)]
    arguments: dict[str, Any] = {
        "max_new_tokens": 25, "temperature": temperature, "num_draws": "auto",
        "adaptive": (0.2, 0.0),
    }  # fmt: skip
    batch = together(drafter, target, prompts, seeds, "left", **arguments)
    assert batch == alone(drafter, target, prompts, seeds, **arguments)
    if temperature == 0.0:
        assert [row[0] for row in batch] == [toys.greedy(target, ids, 25) for ids in prompts]


@pytest.mark.parametrize("num_draws", [0, -1, 1.5, True, "2"])
def test_a_number_of_draws_that_is_none(num_draws: object) -> None:
    with pytest.raises(ValueError, match=r"num_draws=.* at least 1, at most 4096, or .auto"):
        toys.drafter().spec_generate(toys.llama(), toys.prompt(3), num_draws=num_draws)
