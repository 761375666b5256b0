"""Decoding with trees: the text is the target's own greedy one, and more drafts are accepted."""

import random
from typing import Any

import pytest
import torch
from support import toys
from support.oracle import alone, oracle, padded, texts_of, together
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from flashmap.modeling import drafting_flashmap, runner_flashmap
from flashmap.modeling.target_flashmap import FeatureTap
from flashmap.modeling.treerunner_flashmap import TreeRunner

TARGETS: dict[str, Any] = {
    "llama": toys.llama,
    "llama-four-heads": lambda: toys.llama(5, num_attention_heads=4, num_key_value_heads=2),
    "qwen3": toys.qwen3,
    "gpt2": lambda: toys.gpt2(positions=128),
}
NUM_TOKENS = 20


def repetition() -> LogitsProcessorList:
    return LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.3)])


def own_text(target: Any, ids: torch.Tensor, processors: Any = None) -> list[int]:
    """The target's own greedy continuation."""
    out = target.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_TOKENS,
        logits_processor=processors or [], pad_token_id=0,
    )  # fmt: skip
    new: list[int] = out[0, ids.shape[1] :].tolist()
    return new


def hesitant(texts: dict[int, list[int]], loud: float, block_size: int = 4) -> Any:
    """A drafter that thinks the right tokens likely, seldom likeliest."""
    drafter = oracle(block_size)
    drafter.texts, drafter.loud = texts, loud
    return drafter


@pytest.mark.parametrize(
    ("name", "implementation"),
    [*((name, "sdpa") for name in TARGETS), ("llama", "eager"), ("gpt2", "eager")],
)
def test_greedy_text_is_the_targets_own(
    name: str, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = TARGETS[name]()
    target.set_attn_implementation(implementation)
    for number in range(5):
        draw = random.Random(f"{name} {number}")
        monkeypatch.setattr(runner_flashmap, "MOST_HOLES", draw.choice((0, 5, 64)))
        prompts = [toys.prompt(draw.randint(1, 12), seed) for seed in range(draw.randint(1, 3))]
        seeds = draw.sample(range(100), len(prompts))
        processors = repetition() if draw.random() < 0.3 else None
        right = [own_text(target, ids, processors) for ids in prompts]
        texts = {
            seed: ids[0].tolist() + text
            for seed, ids, text in zip(seeds, prompts, right, strict=True)
        }
        drafter = hesitant(texts, draw.choice((2.0, 4.0, 30.0)), draw.randint(1, 5))
        if draw.random() < 0.5:
            with torch.no_grad():
                drafter.noise_gate.zero_()
        out = together(
            drafter, target, prompts, seeds, draw.choice(("left", "right")),
            max_new_tokens=NUM_TOKENS, num_candidates=draw.choice((2, 3, 8, "auto")),
            logits_processor=processors, adaptive=draw.random() < 0.3,
        )  # fmt: skip
        assert [row[0] for row in out] == right, number


def test_a_sequence_is_what_it_is_alone() -> None:
    target, prompts, seeds = toys.llama(), [toys.prompt(3), toys.prompt(9, 1)], [4, 5]
    texts = {
        seed: ids[0].tolist() + own_text(target, ids)
        for seed, ids in zip(seeds, prompts, strict=True)
    }
    drafter = hesitant(texts, 4.0)
    arguments: dict[str, Any] = {"max_new_tokens": NUM_TOKENS, "num_candidates": 3}
    batch = together(drafter, target, prompts, seeds, "left", **arguments)
    assert batch == alone(drafter, target, prompts, seeds, **arguments)


def test_a_tree_accepts_more_than_a_block() -> None:
    target, ids = toys.llama(), toys.prompt(8)
    drafter = hesitant({7: ids[0].tolist() + toys.greedy(target, ids, 60)}, 5.0)
    found = {
        number: drafter.spec_generate(
            target, ids, max_new_tokens=60, seed=7, num_candidates=number
        ).acceptance_length
        for number in (1, 4)
    }
    assert found[4] > 1.2 * found[1]


def test_both_caches_hold_the_path_alone() -> None:
    target, ids = toys.llama(), toys.prompt(8)
    drafter = hesitant({7: ids[0].tolist() + toys.greedy(target, ids, 30)}, 5.0)
    past = drafter.new_past()
    out = drafter.spec_generate(target, ids, 30, seed=7, num_candidates=4, past=past)
    assert max(out.acceptance_lengths) > 1
    cache, context = past.caches()
    text = torch.tensor([past.text])
    with torch.no_grad(), drafter.target_features(target) as tap:
        plain = target(text, use_cache=True).past_key_values
        fresh = drafter.new_cache(1, past.length)
        drafter.extend_context(fresh, tap())
    torch.testing.assert_close(context.kv[..., : past.length, :], fresh.kv, rtol=1e-4, atol=1e-4)
    for kept, own in zip(cache.layers, plain.layers, strict=True):
        torch.testing.assert_close(kept.keys, own.keys, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(kept.values, own.values, rtol=1e-4, atol=1e-4)


def test_a_position_table_ends_a_tree() -> None:
    target, ids = toys.gpt2(positions=24), toys.prompt(10)
    right = toys.greedy(target, ids, 14)
    drafter = hesitant({1: ids[0].tolist() + right}, 30.0, block_size=5)
    out = drafter.spec_generate(target, ids, 14, seed=1, num_candidates=4)
    assert toys.text_of(out, ids) == right


def test_draws_are_made_only_where_the_noise_is_heeded() -> None:
    drafter, target, ids = oracle(), toys.llama(), toys.prompt(4)
    drafter.texts = {0: []}
    asked: list[int] = []
    honest = drafter.draft

    def draft(*args: Any, **kwargs: Any) -> Any:
        asked.append(kwargs["num_draws"])
        kwargs["num_draws"] = 1
        return honest(*args, **kwargs)

    drafter.draft = draft
    assert drafter.heeds_noise()
    drafter.spec_generate(target, ids, 6, seed=0, num_candidates=5)
    assert set(asked) == {5}
    with torch.no_grad():
        drafter.noise_gate.fill_(1e-4)
    asked.clear()
    assert not drafter.heeds_noise()
    assert drafter.heeds_noise(2)  # the state carries noise from jump to jump
    drafter.spec_generate(target, ids, 6, seed=0, num_candidates=5)
    assert set(asked) == {1}


def test_a_gate_that_is_not_heeded_leaves_the_draft_alone() -> None:
    drafter, target = toys.drafter().bfloat16(), toys.llama().bfloat16()
    modules = target.get_input_embeddings(), target.get_output_embeddings()
    features = torch.randn(1, 5, drafter.fc.in_features, generator=torch.Generator().manual_seed(0))

    def difference(gate: float) -> float:
        with torch.no_grad():
            drafter.noise_gate.fill_(gate)
            cache = drafter.new_cache(1, 16)
            drafter.extend_context(cache, features)
            block = drafter.draft(torch.tensor([3]), cache, *modules, seed=1, num_draws=2)
        return float((block[:, 0] - block[:, 1]).abs().max() / block.abs().max())

    assert difference(1e-4) < 0.02 < difference(1.0)


def test_a_target_that_heeds_no_mask_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = toys.llama(), toys.drafter()
    forward = type(target.model).forward

    def causal(self: Any, *args: Any, **kwargs: Any) -> Any:
        mask = kwargs.get("attention_mask")
        if mask is not None and mask.dim() == 4:
            kwargs["attention_mask"] = None
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(target.model), "forward", causal)
    with pytest.raises(ValueError, match=r"num_candidates.* heeds no mask .*leave num_candidates"):
        drafter.spec_generate(target, toys.prompt(3), 4, num_candidates=2)


@pytest.mark.parametrize(
    ("make", "reason"),
    [(toys.gemma2, "do not see all tokens"), (toys.llama, "runs flash_attention_2 attention")],
)
def test_a_target_without_masks_is_refused_and_auto_does_without(make: Any, reason: str) -> None:
    target, drafter, ids = make(), toys.drafter(), toys.prompt(3)
    if make is toys.llama:
        target.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match=f"num_candidates verifies a tree, and .*{reason}"):
        drafter.spec_generate(target, ids, 4, num_candidates=2)
    if make is not toys.llama:
        out = drafter.spec_generate(target, ids, 8, num_candidates="auto")
        assert toys.text_of(out, ids) == toys.greedy(target, ids, 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_candidates": 0}, r"num_candidates=0 is not valid: ask for at least 1"),
        ({"num_candidates": True}, r"num_candidates=True is not valid"),
        ({"num_candidates": "many"}, r"num_candidates='many' is not valid"),
        ({"num_candidates": 2, "temperature": 0.5}, r"num_candidates=2 .*pass num_draws=2 instead"),
        ({"num_candidates": 2, "num_draws": 3}, r"num_draws=3 and num_candidates=2 .*Pass one"),
    ],
)
def test_contradictions(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        toys.drafter().spec_generate(toys.llama(), toys.prompt(3), **arguments)


def test_a_runner_tries_a_target_once(monkeypatch: pytest.MonkeyPatch) -> None:
    target = toys.qwen3()
    with FeatureTap(target, [0]) as tap:
        TreeRunner.checked(target, tap)
        monkeypatch.setattr(TreeRunner, "verify_trees", None)  # a second trial would fail
        TreeRunner.checked(target, tap)


def test_a_tree_has_no_more_nodes_than_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    honest = TreeRunner.verify_trees

    def verify(self: TreeRunner, anchors: Any, trees: Any) -> Any:
        sizes.extend(len(tree.tokens) for tree in trees)
        return honest(self, anchors, trees)

    drafter, target, ids = toys.drafter(), toys.llama(), toys.prompt(4)
    drafter.spec_generate(target, ids, 3, num_candidates=2)  # past the trial
    monkeypatch.setattr(TreeRunner, "verify_trees", verify)
    for number, most in ((2, 6), (100, drafting_flashmap.MOST_NODES)):
        sizes.clear()
        drafter.spec_generate(target, ids, 6, num_candidates=number)
        assert set(sizes) == {most}


def test_padding_on_either_side() -> None:
    target, prompts = toys.llama(), [toys.prompt(2), toys.prompt(6, 1)]
    for side in ("left", "right"):
        ids, mask = padded(prompts, side)
        out = toys.drafter().spec_generate(target, ids, 9, attention_mask=mask, num_candidates=3)
        assert [row[0] for row in texts_of(out, ids)] == [
            toys.greedy(target, one, 9) for one in prompts
        ]
