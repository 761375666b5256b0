"""The context cache holds the same in pieces or at once, and the anchor never advances it."""

import pytest
import torch
from support import toys
from torch import Tensor

from flashmap import FlashMapCache


def features(length: int, batch: int = 1, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, 2 * toys.WIDTH, generator=generator)


@pytest.fixture(autouse=True)
def without_gradients() -> object:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("pieces", [[9], [4, 5], [1] * 9, [1, 7, 1], [0, 9]])
def test_pieces_or_at_once(pieces: list[int]) -> None:
    model, whole = toys.drafter(), features(9, batch=2)
    expected = model.new_cache(2, 12)
    model.extend_context(expected, whole)
    cache = model.new_cache(2, 12)
    for piece in whole.split(pieces, dim=1):
        model.extend_context(cache, piece)
    assert cache.length == expected.length == 9
    assert torch.allclose(cache.kv, expected.kv, atol=1e-5)
    assert cache.kv[:, :, :, :, 9:].count_nonzero() == 0


def test_shape_and_public_constructor() -> None:
    config = toys.drafter_config()
    cache = FlashMapCache(config, 2, 12, device="cpu", dtype=torch.bfloat16)
    assert cache.kv.shape == (2, 2, 2, 2, 12, 8)
    assert cache.kv.dtype == torch.bfloat16
    assert (cache.length, cache.max_length) == (0, 12)
    made = toys.drafter().to(torch.float64).new_cache(3, 5)
    assert made.kv.dtype == torch.float64


def draft(model: toys.FlashMapDraftModel, cache: FlashMapCache, anchor: int = 3) -> Tensor:
    target = toys.llama()
    return model.draft(
        torch.tensor([anchor]), cache, target.get_input_embeddings(),
        target.get_output_embeddings(), seed=1,
    )  # fmt: skip


def test_the_anchors_entry_does_not_advance_and_is_overwritten() -> None:
    model = toys.drafter()
    cache = model.new_cache(1, 12)
    model.extend_context(cache, features(4))
    before = cache.kv.clone()
    first = draft(model, cache)
    assert cache.length == 4
    assert cache.kv[..., :4, :].equal(before[..., :4, :])
    assert cache.kv[..., 4, :].count_nonzero() > 0
    assert cache.kv[..., 5:, :].count_nonzero() == 0
    assert not draft(model, cache, anchor=5).equal(first)
    assert draft(model, cache).equal(first)
    model.extend_context(cache, features(3, seed=1))
    straight = model.new_cache(1, 12)
    model.extend_context(straight, torch.cat((features(4), features(3, seed=1)), dim=1))
    assert torch.allclose(cache.kv[..., :7, :], straight.kv[..., :7, :], atol=1e-5)


def test_the_anchor_goes_to_its_own_position() -> None:
    model = toys.drafter()
    target = toys.llama()
    embeds = target.get_input_embeddings()(torch.tensor([[3]]))
    cache = model.new_cache(1, 12)
    model.extend_context(cache, features(4))
    draft(model, cache)
    for layer, (key, value) in enumerate(model.anchor_entries(embeds, torch.tensor([[4]]))):
        assert cache.kv[layer, 0, :, :, 4:5].equal(key)
        assert cache.kv[layer, 1, :, :, 4:5].equal(value)


def test_every_context_entry_and_no_later_one_is_seen() -> None:
    model = toys.drafter()
    cache = model.new_cache(1, 12)
    model.extend_context(cache, features(4))
    expected = draft(model, cache)
    cache.kv[..., 5:, :] = 1e3  # beyond the anchor
    assert draft(model, cache).equal(expected)
    for position in range(4):
        changed = model.new_cache(1, 12)
        model.extend_context(changed, features(4))
        changed.kv[..., position, :] += 1.0
        assert not torch.allclose(draft(model, changed), expected, atol=1e-4)


def test_overflow_names_capacity_and_request() -> None:
    model = toys.drafter()
    cache = model.new_cache(1, 6)
    model.extend_context(cache, features(4))
    before = cache.kv.clone()
    with pytest.raises(ValueError, match=r"\b6 entries.*\b7\b"):
        model.extend_context(cache, features(3))
    assert cache.length == 4
    assert cache.kv.equal(before)
    model.extend_context(cache, features(2))
    with pytest.raises(ValueError, match=r"\b6 entries.*\b7\b"):
        draft(model, cache)


def test_reserve_grows_and_keeps() -> None:
    model = toys.drafter()
    cache = model.new_cache(2, 6)
    model.extend_context(cache, features(5, batch=2))
    before = cache.kv.clone()
    cache.reserve(6)
    assert cache.max_length == 6
    cache.reserve(7)
    assert cache.max_length == 12  # doubled, so that growing costs little in all
    assert cache.length == 5
    assert cache.kv[..., :6, :].equal(before)
    assert cache.kv[..., 6:, :].count_nonzero() == 0
    cache.reserve(40)
    assert cache.max_length == 40
    model.extend_context(cache, features(30, batch=2))
    assert cache.length == 35


@pytest.mark.parametrize("shape", [(1, 3, 47), (1, 3, 24), (3, 48)])
def test_features_of_another_width_are_refused_with_both(shape: tuple[int, ...]) -> None:
    model = toys.drafter()
    with pytest.raises(ValueError) as caught:
        model.extend_context(model.new_cache(1, 6), torch.zeros(shape))
    assert str(shape) in str(caught.value)
    assert "48" in str(caught.value)
    assert "[0, 1]" in str(caught.value)


def test_features_of_another_batch_are_refused() -> None:
    model = toys.drafter()
    cache = model.new_cache(2, 6)
    with pytest.raises((ValueError, RuntimeError)):
        model.extend_context(cache, features(3, batch=3))
    assert cache.length == 0
