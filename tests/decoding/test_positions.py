"""Targets whose positions, or whose own masks, end: the text is theirs up to there, or one message
says why not."""

from typing import Any

import pytest
from support import toys
from support.oracle import alone, oracle, together
from support.toys import greedy, prompt

from flashmap.modeling import positions_flashmap, runner_flashmap

PROMPTS = [prompt(20, seed=1), prompt(4)]
SEEDS = range(2, 32, 3)  # the first row has most drafts accepted


def gpt2(positions: int) -> Any:
    target = toys.gpt2(positions=positions)
    target.set_attn_implementation("eager")
    return target


def gpt_neo(positions: int) -> Any:
    return toys.gpt_neo(positions=positions, local=0)


def check_batches(target: Any, num_tokens: int, **drafts: Any) -> None:
    """Rows of every luck are the target's own texts, and what they are alone."""
    texts = [greedy(target, ids, num_tokens) for ids in PROMPTS]
    for seed in SEEDS:
        drafter, seeds = oracle(8), [seed, seed + 1]
        for one, ids, text in zip(seeds, PROMPTS, texts, strict=True):
            drafter.texts[one] = ids[0].tolist() + text
        arguments = {"max_new_tokens": num_tokens, **drafts}
        found = together(drafter, target, PROMPTS, seeds, "left", **arguments)
        assert [row[0] for row in found] == texts
        singly = alone(drafter, target, PROMPTS, seeds, **arguments)
        assert [row[0] for row in singly] == texts
        assert drafts or found == singly  # trees are as large as there is room in the cache


@pytest.mark.parametrize("make", [toys.gptj, toys.codegen])
def test_a_table_of_sines_is_a_position_table(make: Any) -> None:
    target, ids = make(), prompt(9)
    text = greedy(target, ids, 23)
    for script in ({}, dict(enumerate(text, 9))):
        out = toys.scripted(script, block_size=7).spec_generate(target, ids, 23)
        assert toys.text_of(out, ids) == text
    check_batches(target, 12)
    with pytest.raises(ValueError, match=r"9 prompt tokens .*max_new_tokens=24 .* 32 positions"):
        toys.drafter().spec_generate(target, ids, 24)


@pytest.mark.parametrize("drafts", [{}, {"num_candidates": 3}])
@pytest.mark.parametrize("make", [gpt2, gpt_neo])
class TestMasksOfItsOwn:
    """Both families keep them, GPT-2 until transformers 5."""

    def test_a_batch_that_may_outgrow_them_is_refused(
        self, make: Any, drafts: dict[str, Any]
    ) -> None:
        target = make(32)
        if make is gpt2 and toys.IS_V5:
            check_batches(target, 12, **drafts)
            return
        message = r"holds 2 prompts, whose cache .* 105 entries .* has masks for 32: pass one"
        with pytest.raises(ValueError, match=message):
            together(oracle(8), target, PROMPTS, [0, 1], "left", max_new_tokens=12, **drafts)

    def test_one_prompt_goes_on_to_the_end(self, make: Any, drafts: dict[str, Any]) -> None:
        target, ids, drafter = make(32), PROMPTS[0], oracle(8)
        for seed in SEEDS:
            drafter.texts = {seed: ids[0].tolist() + greedy(target, ids, 12)}
            out = drafter.spec_generate(target, ids, 12, seed=seed, **drafts)
            assert toys.text_of(out, ids) == drafter.texts[seed][20:]

    def test_a_batch_that_they_are_long_enough_for(
        self, make: Any, drafts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(positions_flashmap, "MOST_HOLES", 9)
        monkeypatch.setattr(runner_flashmap, "MOST_HOLES", 9)
        check_batches(make(20 + 12 + 9 + 8 + 1), 12, **drafts)


def test_windows_behind_masks_of_its_own_are_windows() -> None:
    target, drafter = toys.gpt_neo(positions=256), oracle(8)
    for seed in SEEDS:
        for ids in PROMPTS:
            drafter.texts = {seed: ids[0].tolist() + greedy(target, ids, 60)}
            out = drafter.spec_generate(target, ids, 60, seed=seed)
            assert out.sequences[0].tolist() == drafter.texts[seed]
    with pytest.raises(ValueError, match=r"holds 2 prompts, and GPTNeo.*do not see all tokens"):
        together(drafter, target, PROMPTS, [0, 1], "left", max_new_tokens=9)
    with pytest.raises(ValueError, match=r"num_candidates .*do not see all tokens"):
        drafter.spec_generate(target, PROMPTS[0], 9, seed=seed, num_candidates=2)
