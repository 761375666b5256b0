"""Adaptive drafting: fewer drafts where they are wasted, plain decoding where none helps, and the
same text or distribution as ever."""

import random
import statistics
from typing import Any

import pytest
from decoding.test_distribution import BLOCK, NUM_TOKENS, PROMPT, VOCAB, p_values, sample
from support import toys
from support.oracle import alone, oracle, together
from support.table_models import TableDrafter, TableTarget, reasonable, wrong
from torch import Tensor

from flashmap.modeling.pace_flashmap import Costs, Pace, default_costs

COSTS = Costs(0.3, 0.02)


class Useless(toys.FlashMapDraftModel):
    """A drafter that thinks likeliest what it should think least likely; counts its drafts."""

    calls = 0

    def draft(self, *args: Any, **kwargs: Any) -> Tensor:
        """The network's logits, the wrong way round."""
        self.calls += 1
        return -super().draft(*args, **kwargs)


def pace(costs: Costs = COSTS, block_size: int = 8) -> Pace:
    return Pace({depth: costs.round(depth) for depth in range(block_size + 1)})


def run(one: Pace, chances: list[float], num_rounds: int, seed: int = 0) -> tuple[float, int]:
    """Cost and tokens of so many rounds, slot k accepted with chance k of `chances`."""
    draw, cost, tokens = random.Random(seed), 0.0, 0
    for _ in range(num_rounds):
        depth = one.choose()
        accepted = next((slot for slot in range(depth) if draw.random() >= chances[slot]), depth)
        one.note(accepted)
        cost, tokens = cost + one.costs[depth], tokens + accepted + 1
    return cost, tokens


@pytest.mark.parametrize("costs", [COSTS, Costs(0.5, 0.1), Costs(0.1, 0.0), Costs(3.0, 0.5)])
def test_a_run_never_costs_more_than_plain_decoding_allows(costs: Costs) -> None:
    draw = random.Random(1)
    for number in range(60):
        one, cost, tokens = pace(costs), 0.0, 0
        luck = draw.choice((0.0, 0.1, 0.5, 0.9))
        for _ in range(draw.randint(1, 300)):
            luck = draw.choice((0.0, 0.1, 0.5, 0.9)) if draw.random() < 0.05 else luck
            depth = one.choose()
            accepted = sum(draw.random() < luck for _ in range(depth))
            one.note(accepted)
            cost, tokens = cost + costs.round(depth), tokens + accepted + 1
            assert cost <= 1.03 * tokens + max(1.5, costs.round(8) - 1.0) + 1e-9, number


def test_a_drafter_that_is_never_right_costs_less_than_five_per_cent() -> None:
    for costs in (COSTS, Costs(0.5, 0.1), Costs(0.1, 0.0)):
        cost, tokens = run(pace(costs), [0.0] * 8, 128)
        assert tokens == 128
        assert cost < 128 / 0.95


def test_a_drafter_that_is_right_always_drafts_whole_blocks() -> None:
    one = pace()
    for number in range(30):
        depth = one.choose()
        assert depth == 8 or number == 0
        one.note(depth)


def test_the_tail_is_cut_where_a_token_costs_more_than_it_brings() -> None:
    one = pace(Costs(0.2, 0.1))
    depths = []
    for seed in range(100):
        run(one, [0.75] * 8, 1, seed)
        depths.append(one.choose())
    # (1 - 0.75^(n+1)) / 0.25 tokens for 1.2 + 0.1 n passes: 1.93 at 5, 1.35 at 1, 1.85 at 8.
    assert 3 <= statistics.median(depths) <= 7


def test_drafting_comes_back_with_the_luck() -> None:
    one = pace()
    run(one, [0.0] * 8, 200)
    cost, tokens = run(one, [0.9] * 8, 40)
    assert tokens > 1.8 * cost


def test_text_is_the_targets_own_though_the_drafter_is_useless() -> None:
    drafter, target, ids = toys.drafter(cls=Useless), toys.llama(), toys.prompt(6)
    out = drafter.spec_generate(target, ids, 120, adaptive=(0.3, 0.02))
    assert toys.text_of(out, ids) == toys.greedy(target, ids, 120)
    assert drafter.calls < 16  # at 0.36 each more than a plain pass
    assert sum(out.acceptance_lengths) == 119
    drafter.calls = 0
    whole = drafter.spec_generate(target, ids, 40)
    assert drafter.calls == len(whole.acceptance_lengths)  # every round, unless asked


def test_passes_are_as_short_as_the_choice() -> None:
    drafter, target, ids = toys.drafter(cls=Useless), toys.llama(), toys.prompt(6)
    sizes: list[int] = []
    target.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    drafter.spec_generate(target, ids, 80, adaptive=(0.3, 0.3))
    assert sizes.count(1) > 60


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_sequence_is_what_it_is_alone(temperature: float) -> None:
    target, seeds = toys.llama(), [3, 4, 5]
    prompts = [toys.prompt(length, length) for length in (3, 8, 5)]
    drafter = oracle(4)
    drafter.texts = {
        seed: ids[0].tolist() + toys.greedy(target, ids, 40) * (seed != 4)
        for seed, ids in zip(seeds, prompts, strict=True)
    }
    arguments: dict[str, Any] = {
        "max_new_tokens": 40, "temperature": temperature, "adaptive": (0.4, 0.1)
    }  # fmt: skip
    batch = together(drafter, target, prompts, seeds, "left", **arguments)
    assert batch == alone(drafter, target, prompts, seeds, **arguments)
    lengths = [row[1] for row in batch]
    assert max(lengths[0]) > 1 or temperature > 0.0  # drafts were verified
    assert batch == together(drafter, target, prompts, seeds, "right", **arguments)


@pytest.mark.parametrize("quality", [reasonable, wrong])
def test_continuations_have_the_targets_joint_distribution(quality: Any) -> None:
    target = TableTarget(VOCAB)
    drafter = TableDrafter(quality(target, BLOCK, VOCAB))
    samples = sample(drafter, target, 0.8, 1_000, adaptive=(0.6, 0.2))
    values = p_values(samples, target.joint(PROMPT, 0.8, NUM_TOKENS))
    assert min(values) > 0.001, values


def test_costs_are_the_weights_that_are_read() -> None:
    drafter, target = toys.drafter(), toys.llama()
    head = sum(weight.numel() for weight in target.lm_head.parameters())
    own, whole = drafter.num_parameters(), target.num_parameters()
    reading = 2 * (own + head) / whole
    assert default_costs(drafter, target, 2) == pytest.approx((1.3 * reading, 0.1))  # 3 slots
    drafter.config.block_size = 64
    assert default_costs(drafter, target, 2) == pytest.approx((2.0 * reading, 0.1))
    assert default_costs(drafter, target.bfloat16(), 1).token == 0.01
    assert Costs(0.3, 0.1).round(0) == 1.0
    assert Costs(0.3, 0.1).round(2) == pytest.approx(1.5)
    assert Costs(0.3, 0.1).round(64) == pytest.approx(2.3)


@pytest.mark.parametrize("value", [(0.1,), (-0.1, 0.1), "often", 0.5, (float("nan"), 0.1)])
def test_costs_that_are_none(value: object) -> None:
    with pytest.raises(ValueError, match=r"adaptive=.* pass True, False, or two costs"):
        toys.drafter().spec_generate(toys.llama(), toys.prompt(3), adaptive=value)
