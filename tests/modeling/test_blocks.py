"""Blocks drafted together, or sharing a context row, equal the same blocks one by one."""

from typing import Any

import pytest
import torch
from support import toys
from torch import Tensor

BLOCK, LENGTH = 3, 6


@pytest.fixture(autouse=True)
def without_gradients() -> object:
    with torch.no_grad():
        yield


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def modules() -> tuple[Any, Any]:
    target = toys.llama()
    return target.get_input_embeddings(), target.get_output_embeddings()


@pytest.mark.parametrize("num_steps", [1, 2, 4])
def test_rows_of_a_batch_draft_as_they_do_alone(num_steps: int) -> None:
    model, parts = toys.drafter(), modules()
    features, anchors = numbers(3, LENGTH, 2 * toys.WIDTH), torch.tensor([3, 9, 3])
    seeds = [4, -7, 2**40]
    together = model.new_cache(3, LENGTH + 1)
    model.extend_context(together, features)
    drafted = model.draft(anchors, together, *parts, num_steps, seed=seeds)
    assert drafted.shape == (3, BLOCK, toys.VOCAB)
    for row in range(3):
        cache = model.new_cache(1, LENGTH + 1)
        model.extend_context(cache, features[row : row + 1])
        alone = model.draft(anchors[row : row + 1], cache, *parts, num_steps, seed=[seeds[row]])
        assert torch.allclose(drafted[row], alone[0], atol=1e-4)


def test_an_integer_seed_counts_up_by_row() -> None:
    model, parts = toys.drafter(), modules()
    anchors = torch.tensor([3, 3])
    first = model.draft(anchors, model.new_cache(2, 4), *parts, seed=5)
    second = model.draft(anchors, model.new_cache(2, 4), *parts, seed=[5, 6])
    assert first.equal(second)
    assert not first[0].equal(first[1])


def test_drafts_without_noise_or_seed_follow_the_generator() -> None:
    model, parts, anchors = toys.drafter(), modules(), torch.tensor([3, 3])

    def draft(**arguments: Any) -> Tensor:
        return model.draft(anchors, model.new_cache(2, 4), *parts, **arguments)

    torch.manual_seed(1)
    first, second = draft(), draft()
    torch.manual_seed(1)
    assert draft().equal(first)
    assert not first.equal(second)
    by_generator = draft(generator=torch.Generator().manual_seed(3))
    assert by_generator.equal(draft(generator=torch.Generator().manual_seed(3)))
    with pytest.raises(ValueError, match="seed and generator"):
        draft(generator=torch.Generator(), seed=1)
    with pytest.raises(ValueError, match="3 values for 2 sequences"):
        draft(seed=[1, 2, 3])


@pytest.mark.parametrize("shape", [(2, BLOCK, toys.VOCAB + 1), (1, BLOCK, toys.VOCAB), (2, 4, 61)])
def test_noise_of_another_shape_is_refused_with_both(shape: tuple[int, ...]) -> None:
    model, parts = toys.drafter(), modules()
    with pytest.raises(ValueError) as caught:
        model.draft(torch.tensor([3, 3]), model.new_cache(2, 4), *parts, noise=torch.zeros(shape))
    assert str(shape) in str(caught.value)
    assert str((2, BLOCK, toys.VOCAB)) in str(caught.value)


def contexts(model: toys.FlashMapDraftModel, rows: int) -> list[tuple[Tensor, Tensor]]:
    cache = model.new_cache(rows, LENGTH)
    model.extend_context(cache, numbers(rows, LENGTH, 2 * toys.WIDTH))
    return cache.context(LENGTH)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 6])
def test_blocks_that_share_a_context_row_equal_blocks_one_by_one(rows: int, masked: bool) -> None:
    # Six blocks of a training sequence, each with its own anchor position, over `rows` sequences.
    model, blocks = toys.drafter(), 6
    each = blocks // rows
    context, inputs = contexts(model, rows), numbers(blocks, BLOCK, toys.WIDTH, seed=1)
    lengths = torch.tensor([2, 4, 5, 3, 6, 1]) if masked else torch.full((blocks,), LENGTH)
    positions = lengths[:, None] + torch.arange(BLOCK)
    mask = None
    if masked:
        visible = torch.arange(LENGTH) < lengths[:, None]  # (blocks, LENGTH)
        slots = visible[:, None].expand(blocks, BLOCK, LENGTH)
        mask = slots.reshape(rows, 1, each * BLOCK, LENGTH)
    modulations = model.time_conditioning(0.0, 1.0)
    together = model(inputs, modulations, positions, context, mask)
    assert together.shape == (blocks, BLOCK, toys.WIDTH)
    for block in range(blocks):
        row, length = block // each, int(lengths[block])
        own = [
            (key[row : row + 1, :, :length], value[row : row + 1, :, :length])
            for key, value in context
        ]
        alone = model(inputs[block : block + 1], modulations, positions[block : block + 1], own)
        assert torch.allclose(together[block], alone[0], atol=1e-5)


def test_times_of_each_block_equal_floats_one_by_one() -> None:
    model = toys.drafter()
    context, inputs = contexts(model, 2), numbers(4, BLOCK, toys.WIDTH, seed=1)
    positions = (LENGTH + torch.arange(BLOCK)).expand(4, BLOCK)
    starts, ends = [0.0, 0.0, 0.25, 0.5], [1.0, 0.5, 0.75, 1.0]
    together = model(
        inputs, model.time_conditioning(torch.tensor(starts), torch.tensor(ends)), positions,
        context,
    )  # fmt: skip
    for block in range(4):
        own = [(k[block // 2 : block // 2 + 1], v[block // 2 : block // 2 + 1]) for k, v in context]
        alone = model(
            inputs[block : block + 1],
            model.time_conditioning(starts[block], ends[block]),
            positions[block : block + 1],
            own,
        )
        assert torch.allclose(together[block], alone[0], atol=1e-5)
    assert not torch.allclose(together[0], together[1], atol=1e-2)


def test_a_tensor_and_a_float_time_can_be_mixed() -> None:
    model = toys.drafter()
    mixed = model.time_conditioning(torch.tensor([0.25, 0.25]), 1.0)
    plain = model.time_conditioning(0.25, 1.0)
    assert torch.allclose(mixed[1].scale[1], plain[1].scale[0], atol=1e-6)


def test_slots_of_a_block_see_each_other_both_ways() -> None:
    model = toys.drafter()
    context, inputs = contexts(model, 1), numbers(1, BLOCK, toys.WIDTH, seed=1)
    positions = (LENGTH + torch.arange(BLOCK)).expand(1, BLOCK)
    before = model(inputs, model.time_conditioning(0.0, 1.0), positions, context)
    for slot in range(BLOCK):
        changed = inputs.clone()
        changed[0, slot] += 1.0
        after = model(changed, model.time_conditioning(0.0, 1.0), positions, context)
        assert ((after - before).abs().amax(dim=-1) > 1e-4).all()


def test_the_final_norms_gate_is_not_used() -> None:
    model = toys.drafter()
    context, inputs = contexts(model, 1), numbers(1, BLOCK, toys.WIDTH, seed=1)
    positions = (LENGTH + torch.arange(BLOCK)).expand(1, BLOCK)
    before = model(inputs, model.time_conditioning(0.0, 1.0), positions, context)
    model.final_adaln.linear.weight[2 * 16 :] = 7.0
    after = model(inputs, model.time_conditioning(0.0, 1.0), positions, context)
    assert after.equal(before)
