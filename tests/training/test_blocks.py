"""Training batches many blocks; each must be what inference drafts for it alone."""

import itertools
from typing import Any

import pytest
import torch
from support import toys
from torch import Tensor

from flashmap.kernels.fused_flashmap import seeded_normal
from flashmap.training import objectives
from flashmap.training import walk as walking
from flashmap.training.blocks import (
    Blocks,
    Target,
    build_context,
    draw_blocks,
    encode_documents,
    slots_of,
    target_slots,
)
from flashmap.training.documents import Document, Documents, pack
from flashmap.training.flow import Flow
from flashmap.training.recipe import LossRecipe, RunRecipe

SIZES = [(4, 9), (6, 5), (3, 2), (5, 12)]  # prompt and answer tokens of each document
CPU = torch.device("cpu")


def documents(vocab: int = toys.VOCAB) -> Documents:
    made = []
    for seed, (prompt, answer) in enumerate(SIZES):
        ids = toys.prompt(prompt + answer, seed, vocab)[0].tolist()
        made.append(Document(ids[:prompt], ids[prompt:], 0.0, False))
    return pack(made, vocab).to(CPU)


def texts() -> list[list[int]]:
    found = documents()
    ends = itertools.pairwise(found.offsets.tolist())
    return [found.tokens[start:end].tolist() for start, end in ends]


def wrapped(target: Any, model: Any) -> Target:
    embedding = target.get_input_embeddings().weight.detach()[: model.config.vocab_size]
    return Target(target, list(model.config.target_layer_ids), embedding)


def drawn(num_anchors: int = 4, length: int = 32, seed: int = 0) -> Blocks:
    generator = torch.Generator().manual_seed(seed)
    return draw_blocks(documents(), torch.arange(len(SIZES)), num_anchors, length, generator)


def features_of(target: Any, model: Any, ids: list[int]) -> Tensor:
    """Features (1, T, n H) from the tuple of hidden states, as transformers gives it."""
    with torch.no_grad():
        states = target(torch.tensor([ids]), output_hidden_states=True).hidden_states
    return torch.cat([states[tap + 1] for tap in model.config.target_layer_ids], dim=-1)


def draft(model: Any, target: Any, ids: list[int], anchor: int, **options: Any) -> Tensor:
    """Logits (K, V) of one block the way the decoding loop asks for them."""
    cache = model.new_cache(1, anchor + model.config.block_size + 1)
    if anchor:
        model.extend_context(cache, features_of(target, model, ids)[:, :anchor])
    with torch.no_grad():
        logits: Tensor = model.draft(
            torch.tensor([ids[anchor]]), cache, target.get_input_embeddings(),
            target.get_output_embeddings(), **options,
        )  # fmt: skip
    return logits[0]


# Drawing


def test_anchors_start_at_the_first_answer_token_and_leave_a_token_to_predict() -> None:
    blocks = drawn(num_anchors=400)
    for (prompt, answer), anchors in zip(SIZES, blocks.anchors, strict=True):
        counts = torch.bincount(anchors, minlength=prompt + answer)
        allowed = range(prompt, prompt + answer - 1)
        assert counts.nonzero()[:, 0].tolist() == list(allowed)
        assert counts[prompt:-1].min() > 0.4 * 400 / len(allowed)  # evenly


def test_blocks_hold_the_documents_and_as_many_anchors_of_each() -> None:
    blocks = drawn(num_anchors=6)
    assert blocks.anchors.shape == (len(SIZES), 6)
    assert blocks.ends.tolist() == [sum(sizes) for sizes in SIZES]
    for row, text in zip(blocks.ids.tolist(), texts(), strict=True):
        assert row == text + [0] * (32 - len(text))


def test_documents_are_cut_to_the_length_and_anchors_stay_inside() -> None:
    blocks = drawn(num_anchors=50, length=8)
    assert blocks.ids.shape == (len(SIZES), 8)
    assert blocks.ends.tolist() == [8, 8, 5, 8]
    assert bool((blocks.anchors <= blocks.ends[:, None] - 2).all())
    assert bool((blocks.anchors[1] == 6).all())  # the only answer token with one after it
    short = drawn(num_anchors=50, length=4)  # only prompts are left: their last two tokens serve
    assert bool((short.anchors[[0, 1, 3]] == 2).all())


def test_drawing_repeats_with_the_generator() -> None:
    first, again, other = drawn(seed=3), drawn(seed=3), drawn(seed=4)
    assert first.anchors.equal(again.anchors)
    assert not first.anchors.equal(other.anchors)


# Slots


def test_slots_are_the_tokens_after_the_anchor() -> None:
    blocks, size = drawn(num_anchors=5), 4
    slots = slots_of(blocks, size)
    flat = [(row, int(a)) for row, anchors in enumerate(blocks.anchors) for a in anchors]
    for block, (row, anchor) in enumerate(flat):
        text = texts()[row]
        for k in range(1, size + 1):
            assert int(slots.positions[block, k - 1]) == anchor + k
            assert bool(slots.valid[block, k - 1]) == (anchor + k < len(text))
            if anchor + k < len(text):
                assert int(slots.tokens[block, k - 1]) == text[anchor + k]
    assert bool(slots.valid[:, 0].all())


@pytest.mark.parametrize("make", [toys.llama, toys.qwen3, toys.gemma3])
def test_target_slots_are_the_targets_logits_given_the_text_before_each_slot(make: Any) -> None:
    target, model = make(), toys.drafter()
    blocks, size = drawn(num_anchors=3), model.config.block_size
    _, logits = wrapped(target, model).read(model, blocks.ids, logits=True)
    assert logits is not None
    found = target_slots(logits, blocks, size).unflatten(0, blocks.anchors.shape)
    for (row, text), n in itertools.product(enumerate(texts()), range(3)):
        for k in range(1, size + 1):
            position = int(blocks.anchors[row, n]) + k
            if position < len(text):
                with torch.no_grad():
                    wanted = target(torch.tensor([text[:position]])).logits[0, -1]
                torch.testing.assert_close(found[row, n, k - 1], wanted, rtol=1e-4, atol=1e-4)


def test_reading_without_logits_gives_the_same_features() -> None:
    target, model = toys.llama(), toys.drafter()
    reader, ids = wrapped(target, model), drawn().ids
    features, nothing = reader.read(model, ids, logits=False)
    assert nothing is None
    torch.testing.assert_close(features, reader.read(model, ids, logits=True)[0])
    assert toys.hook_count(target) == 0
    for row, text in enumerate(texts()):
        wanted = features_of(target, model, text)[0]
        torch.testing.assert_close(features[row, : len(text)], wanted, rtol=1e-4, atol=1e-4)


# What a block may look at


@pytest.mark.parametrize("repeats", [1, 2])
def test_a_block_sees_what_lies_before_its_anchor_and_the_anchor_itself(repeats: int) -> None:
    target, model = toys.llama(), toys.drafter()
    blocks, size = drawn(num_anchors=3), model.config.block_size
    reader = wrapped(target, model)
    shared = encode_documents(model, reader.read(model, blocks.ids, logits=False)[0])
    embeds = reader.embed(blocks.ids.gather(1, blocks.anchors))
    context = build_context(model, shared, blocks.anchors, embeds, repeats)
    length, count = blocks.ids.shape[1], blocks.anchors.shape[1]
    assert context.mask.shape == (len(SIZES), 1, count * repeats * size, length + count)
    for row, anchors in enumerate(blocks.anchors.tolist()):
        for n, r, k in itertools.product(range(count), range(repeats), range(size)):
            seen = context.mask[row, 0, (n * repeats + r) * size + k].nonzero()[:, 0].tolist()
            assert seen == [*range(anchors[n]), length + n]
    for (key, value), (own_key, own_value) in zip(
        context.entries, model.anchor_entries(embeds, blocks.anchors), strict=True
    ):
        assert key.shape == value.shape == (len(SIZES), *key.shape[1:2], length + count, 8)
        assert key[:, :, length:].equal(own_key)
        assert value[:, :, length:].equal(own_value)


# Training's forward pass and inference's


def step_of(model: Any, target: Any, blocks: Blocks) -> objectives.Step:
    reader = wrapped(target, model)
    features, _ = reader.read(model, blocks.ids, logits=False)
    embeds = reader.embed(blocks.ids.gather(1, blocks.anchors))
    slots = slots_of(blocks, model.config.block_size)
    return objectives.Step(blocks, slots, features, embeds, None)


@pytest.mark.parametrize("make", [toys.llama, toys.gemma3])
@pytest.mark.parametrize(("name", "draws"), [("Product", 1), ("Mixture", 3)])
def test_a_training_jump_gives_the_logits_that_inference_drafts(
    make: Any, name: str, draws: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, model = make(), toys.drafter()
    reader, blocks = wrapped(target, model), drawn(num_anchors=3)
    objective = getattr(objectives, name)(LossRecipe(num_draws=draws), model, reader, RunRecipe())
    step = step_of(model, target, blocks)
    count = len(step.slots.tokens) * draws
    seeds = torch.arange(100, 100 + count)
    positions = step.slots.positions.repeat_interleave(draws, dim=0)
    noise = seeded_normal(seeds, positions, toys.WIDTH)

    def same_noise(*shape: int, **options: Any) -> Tensor:
        assert shape == noise.shape
        return noise

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(torch, "randn", same_noise)
        logits = reader.head(objective.one_jump(step))
    flat = [(row, int(a)) for row, anchors in enumerate(blocks.anchors) for a in anchors]
    for block, (row, anchor) in enumerate(flat):
        for m in range(draws):
            place = block * draws + m
            alone = draft(model, target, texts()[row], anchor, num_steps=1, seed=int(seeds[place]))
            torch.testing.assert_close(logits[place], alone, rtol=1e-5, atol=3e-5)


def test_a_jump_of_the_flow_from_given_noise_is_the_draft_from_it() -> None:
    target, model = toys.llama(), toys.drafter()
    reader, blocks = wrapped(target, model), drawn(num_anchors=2)
    flow, step = Flow(LossRecipe(), model, reader, RunRecipe()), step_of(model, target, blocks)
    count = len(step.slots.tokens)
    noise = torch.randn(count, 3, toys.VOCAB, generator=torch.Generator().manual_seed(1))
    s, t = torch.zeros(count), torch.ones(count)
    with torch.no_grad():
        hidden = flow.jump(model, noise, s, t, step.slots.positions, flow.context(step))
        logits = reader.head(hidden)
    flat = [(row, int(a)) for row, anchors in enumerate(blocks.anchors) for a in anchors]
    for block, (row, anchor) in enumerate(flat):
        alone = draft(model, target, texts()[row], anchor, noise=noise[block : block + 1])
        torch.testing.assert_close(logits[block], alone, rtol=1e-5, atol=3e-5)


@pytest.mark.parametrize("num_steps", [1, 2, 4])
def test_a_walks_drafts_are_the_logits_that_inference_drafts(
    num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, model = toys.llama(), toys.drafter()
    drafted: list[tuple[list[int], int, int, Tensor]] = []  # text, anchor, seed, logits (K, V)
    inner = walking._Walker._draft

    def kept(self: Any, active: Tensor, positions: Tensor) -> Tensor:
        logits = inner(self, active, positions)
        assert logits.shape[:2] == (len(active), 1)
        for place, row in enumerate(active.tolist()):
            text, seed = self.ids[row].tolist(), int(self.seeds[row])
            drafted.append((text, int(positions[place, 0]) - 1, seed, logits[place, 0]))
        return logits

    monkeypatch.setattr(walking._Walker, "_draft", kept)
    reader = wrapped(target, model)
    walking.walk(model, reader, documents(), temperature=0.0, num_steps=num_steps, seed=7)
    assert len(drafted) > 12
    for text, anchor, seed, logits in drafted:
        alone = draft(model, target, text, anchor, num_steps=num_steps, seed=seed)
        torch.testing.assert_close(logits, alone, rtol=1e-5, atol=3e-5)


def test_a_look_at_the_anchors_own_features_would_be_noticed() -> None:
    """The comparison above is sharp: one position too many changes the logits."""
    target, model = toys.llama(), toys.drafter()
    ids, anchor = texts()[0], 5
    right = draft(model, target, ids, anchor, seed=1)
    cache = model.new_cache(1, 20)
    model.extend_context(cache, features_of(target, model, ids)[:, : anchor + 1])
    with torch.no_grad():
        wrong = model.draft(
            torch.tensor([ids[anchor]]), cache, target.get_input_embeddings(),
            target.get_output_embeddings(), seed=1,
        )[0]  # fmt: skip
    assert (right - wrong).abs().max() > 0.1
