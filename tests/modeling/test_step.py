"""The fused step drafts as the model does: equal to the golden values, the same noise in any batch,
in any context that keeps its promises."""

from typing import Any

import pytest
import torch
from support import golden, toys
from support.golden import Golden, assert_matches
from support.interpreter import mend
from support.steps import Toy, anchored
from torch import Tensor, nn

from flashmap.kernels.paged import sglang_layout
from flashmap.modeling.reference_flashmap import KvLayout
from flashmap.modeling.step_flashmap import ContextRows, DenseContext, FusedStep
from flashmap.modeling.triton_flashmap import INTERPRETED

# Rounding the folded head to bfloat16 moves a logit by up to 2^-8 of it; the roundings of the
# prediction between two jumps add up, and its softmax is as sharp as e(s) = 25 makes it.
ONE_JUMP_BF16, JUMPS_BF16 = 2.0**-6, 0.1


@torch.no_grad()
def golden_step(case: Golden, num_steps: int, **options: Any) -> tuple[FusedStep, DenseContext]:
    features, anchors = case.value("in.target_hidden"), case.value("in.anchor_ids")
    step = FusedStep(
        case.model,
        case.embedding,
        case.lm_head,
        features.shape[1] + 1,
        num_steps=num_steps,
        **options,
    )
    return step, anchored(step, features, case.embed_tokens(anchors))


@torch.no_grad()
def check_golden(case: Golden, num_steps: int, **options: Any) -> None:
    step, context = golden_step(case, num_steps, **options)
    assert_matches(context.kv, case.value("out.context_kv"))
    hidden = step.hidden(context, context.lengths, noise=case.value("in.noise"))
    expected = case.value(f"out.draft_logits.{num_steps}")
    found = step.logits(hidden)
    if expected.dtype == torch.float32:
        assert_matches(found, expected)
        return
    if num_steps == 1:  # the fold of the head alone rounds otherwise than the published package
        assert_matches(case.lm_head(case.model.head(hidden)), expected)
    allowed = ONE_JUMP_BF16 if num_steps == 1 else JUMPS_BF16
    assert (found.float() - expected.float()).abs().max() <= allowed * expected.float().abs().max()


@pytest.mark.parametrize("num_steps", [1, 2, 3, 4])
@pytest.mark.parametrize("name", golden.CASES)
def test_golden_drafts(name: str, num_steps: int) -> None:
    check_golden(golden.load(name), num_steps, kernels="eager")


@pytest.mark.parametrize(("name", "num_steps"), [("tiny-bf16", 1), ("tiny-fp32", 2)])
def test_golden_drafts_in_triton(
    name: str, num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not INTERPRETED:
        pytest.skip("triton is not installed, or compiles for a GPU in this process")
    mend(monkeypatch)
    check_golden(golden.load(name), num_steps, kernels="triton")


@pytest.fixture(scope="module")
def toy() -> Toy:
    return Toy()


@pytest.mark.parametrize("num_steps", [1, 2, 3])
@pytest.mark.parametrize("num_draws", [1, 3])
def test_seeds_draft_as_in_the_model(num_steps: int, num_draws: int, toy: Toy) -> None:
    found = toy.found(toy.step(num_steps=num_steps), num_draws=num_draws)
    assert_matches(found, toy.expected(num_steps, num_draws=num_draws))


@pytest.mark.parametrize("num_steps", [1, 2])
def test_a_row_drafts_the_same_alone(num_steps: int, toy: Toy) -> None:
    step = toy.step(num_steps=num_steps)
    together = toy.found(step)
    for row in range(3):
        assert_matches(toy.found(step, slice(row, row + 1))[0], together[row])


def test_rows_of_different_lengths_draft_as_alone(toy: Toy) -> None:
    step, lengths = toy.step(), [9, 4, 1]
    context = anchored(step, toy.features, toy.anchors, room=20)
    context.lengths.copy_(torch.tensor(lengths))
    slots = context.slots(context.lengths.unsqueeze(1)).flatten()
    step.write(context, anchors=ContextRows(toy.anchors, context.lengths, slots))
    together = step.logits(step.hidden(context, context.lengths, seeds=toy.seeds))
    for row, length in enumerate(lengths):
        own = slice(row, row + 1)
        alone = anchored(step, toy.features[own, :length], toy.anchors[own])
        hidden = step.hidden(alone, alone.lengths, seeds=toy.seeds[own])
        assert_matches(step.logits(hidden)[0], together[row])


def test_features_overwrite_the_anchors_entry(toy: Toy) -> None:
    step = toy.step()
    context = anchored(step, toy.features[:, :4], toy.anchors, room=10)
    for place in range(4, 9):
        position = context.lengths.clone()
        slots = context.slots(position.unsqueeze(1)).flatten()
        context.lengths.add_(1)
        after = context.slots(context.lengths.unsqueeze(1)).flatten()
        step.write(
            context,
            ContextRows(toy.features[:, place], position, slots),
            ContextRows(toy.anchors, context.lengths, after),
        )
    assert_matches(context.kv, anchored(step, toy.features, toy.anchors).kv)


def test_rows_past_the_capacity_are_skipped(toy: Toy) -> None:
    step = toy.step()
    context = anchored(step, toy.features, toy.anchors)
    before = context.kv.clone()
    slots = context.slots(torch.full((3, 1), 10)).flatten()
    assert slots.tolist() == [-1, -1, -1]
    step.write(context, anchors=ContextRows(toy.anchors, context.lengths, slots))
    assert context.kv.equal(before)


class Paged:
    """An engine's context: entries in shuffled rows of a pool, gathered to attend."""

    def __init__(self, step: FusedStep, tables: Tensor, lengths: Tensor) -> None:
        self.step, self.tables, self.lengths = step, tables, lengths
        config = step.config
        shape = (config.num_hidden_layers, 100, config.num_attention_heads, config.head_size)
        self.keys, self.values = torch.zeros(shape), torch.zeros(shape)

    def write(self, kv: Tensor, positions: Tensor, slots: Tensor) -> None:
        self.step.store(kv, positions, slots, self.layout())

    def attend(self, layer: int, query: Tensor) -> Tensor:
        key, value = (pool[layer][self.tables].transpose(1, 2) for pool in (self.keys, self.values))
        out: Tensor = self.step.ops.context_attention(query, key, value, self.lengths)
        return out

    def layout(self) -> KvLayout:
        return sglang_layout(list(self.keys), list(self.values))


def test_an_engines_pages_can_take_the_dense_contexts_place(toy: Toy) -> None:
    step, lengths = toy.step(), torch.full((3,), 9)
    shuffled = torch.randperm(100, generator=torch.Generator().manual_seed(0))[:30]
    context = Paged(step, shuffled.view(3, 10), lengths)
    places = torch.arange(9).expand(3, 9).flatten()
    new = ContextRows(toy.features.flatten(0, 1), places, context.tables[:, :9].flatten())
    step.write(context, new, ContextRows(toy.anchors, lengths, context.tables[:, 9]))
    found = step.logits(step.hidden(context, lengths, seeds=toy.seeds))
    assert_matches(found, toy.expected(1))


@pytest.mark.parametrize("num_steps", [1, 3])
def test_a_draft_vocabulary_is_a_part_of_the_whole(num_steps: int, toy: Toy) -> None:
    tokens = torch.tensor([0, 3, 17, 18, 60])
    step = toy.step(num_steps=num_steps, token_ids=tokens)
    assert step.token_ids.equal(tokens)
    assert_matches(toy.found(step), toy.expected(num_steps)[..., tokens])


@pytest.mark.parametrize("singular", [False, True])
def test_the_folded_noise_is_the_formula(singular: bool) -> None:
    toy = Toy()
    with torch.no_grad():
        if singular:
            toy.embed_tokens.weight[:, 3] = toy.embed_tokens.weight[:, 5]
        step, model = toy.step(fold_noise=True), toy.model
        slots = torch.arange(10, 13).expand(3, 3)
        found = step._first(toy.seeds, slots, 1, step.jumps[0])
        z = step.ops.block_noise(toy.seeds, slots, toys.WIDTH, 1, torch.float32).double()
        embedding = toy.embed_tokens.weight.double()
        values, vectors = torch.linalg.eigh(embedding.T @ embedding)
        noise = (z * values.clamp(min=0).sqrt()) @ vectors.T
        mean = toy.embed_tokens.weight.mean(dim=0)
        expected = model.x_embed(model.mix_state(mean, noise.float(), 0.0, 1.0)).flatten(0, 1)
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_eight_bit_weights_draft_nearly_the_same() -> None:
    toy = Toy(hidden_size=32, intermediate_size=48, target_hidden_size=32)
    tokens = torch.arange(48)  # a multiple of 16
    exact = toy.expected(1)[..., :48]
    found = toy.found(toy.step(fp8_weights=True, token_ids=tokens))
    error = (found - exact).square().mean() / exact.square().mean()
    assert 1e-6 < error < 0.02


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_steps": 9}, "9"),
        ({"num_steps": 2, "fold_noise": True}, "fold_noise serves one jump"),
        ({"kernels": "fast"}, "choose one of auto, eager, triton"),
        ({"fp8_weights": True}, "multiples of 16"),
        ({"token_ids": torch.tensor([3, 2])}, "must increase and lie in 0 .. 60"),
        ({"token_ids": torch.tensor([3, 61])}, "must increase and lie in 0 .. 60"),
        ({"token_ids": torch.tensor([-1, 3])}, "must increase and lie in 0 .. 60"),
        ({"token_ids": torch.tensor([0.5])}, "token_ids is torch.float32"),
    ],
)
def test_what_cannot_be_served(options: dict[str, Any], words: str, toy: Toy) -> None:
    with pytest.raises(ValueError, match=words):
        toy.step(**options)


def test_a_head_that_cannot_be_folded(toy: Toy) -> None:
    head = nn.Sequential(toy.lm_head)
    with pytest.raises(ValueError, match=r"vocabulary head \(Sequential\) is not a linear layer"):
        FusedStep(toy.model, toy.embed_tokens.weight, head, 64)
    narrow = nn.Linear(toys.WIDTH, toys.VOCAB - 1)
    with pytest.raises(ValueError, match="gives 60 logits and the drafter drafts tokens up to 60"):
        FusedStep(toy.model, toy.embed_tokens.weight, narrow, 64)


def test_a_target_on_another_device(toy: Toy) -> None:
    elsewhere = toy.embed_tokens.weight.detach().to("meta")
    with pytest.raises(ValueError, match="embedding is on meta and the drafter on cpu"):
        FusedStep(toy.model, elsewhere, toy.lm_head, 64)


def test_one_graph_holds_the_step(toy: Toy) -> None:
    step = toy.step()
    context = anchored(step, toy.features, toy.anchors)

    def draft(positions: Tensor, seeds: Tensor) -> Tensor:
        return step.logits(step.hidden(context, positions, seeds=seeds))

    compiled = torch.compile(draft, backend="eager", fullgraph=True)
    assert_matches(compiled(context.lengths, toy.seeds), toy.expected(1))
