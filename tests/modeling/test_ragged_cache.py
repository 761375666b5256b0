"""A cache of sequences that are not equally long holds, for each, what a cache of its own would."""

from typing import Any

import pytest
import torch
from support import toys
from torch import Tensor

from flashmap import FlashMapCache

LENGTHS = [5, 1, 8]


@pytest.fixture(autouse=True)
def without_gradients() -> object:
    with torch.no_grad():
        yield


def features(length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, length, 2 * toys.WIDTH, generator=generator)


def filled_up(rows: list[Tensor]) -> Tensor:
    """Features of several rows, the shorter ones followed by numbers that mean nothing."""
    longest = max(row.shape[1] for row in rows)
    noise = [torch.full((1, longest - row.shape[1], 2 * toys.WIDTH), 50.0) for row in rows]
    return torch.cat([torch.cat(pair, dim=1) for pair in zip(rows, noise, strict=True)])


def ragged(model: Any, lengths: list[int] = LENGTHS, room: int = 20) -> FlashMapCache:
    cache: FlashMapCache = model.new_cache(len(lengths), room)
    rows = [features(length, seed) for seed, length in enumerate(lengths)]
    model.extend_context(cache, filled_up(rows), lengths)
    return cache


def single(model: Any, row: int, lengths: list[int] = LENGTHS, room: int = 20) -> FlashMapCache:
    cache: FlashMapCache = model.new_cache(1, room)
    model.extend_context(cache, features(lengths[row], row))
    return cache


def same_entries(model: Any, cache: FlashMapCache, row: int, own: FlashMapCache) -> bool:
    length = own.length
    assert cache.lengths[row] == length
    return torch.allclose(cache.kv[:, :, row, :, :length], own.kv[:, :, 0, :, :length], atol=1e-5)


def draft(model: Any, cache: FlashMapCache, anchors: list[int], **arguments: Any) -> Tensor:
    target = toys.llama()
    modules = target.get_input_embeddings(), target.get_output_embeddings()
    logits: Tensor = model.draft(torch.tensor(anchors), cache, *modules, **arguments)
    return logits


def test_rows_are_written_as_if_alone() -> None:
    model = toys.drafter()
    cache = ragged(model)
    assert (cache.lengths, cache.length, cache.is_even) == (LENGTHS, 8, False)
    assert all(same_entries(model, cache, row, single(model, row)) for row in range(3))


def test_rows_that_advance_unequally_round_after_round() -> None:
    model = toys.drafter()
    cache, own = ragged(model, room=40), [single(model, row, room=40) for row in range(3)]
    for turn, counts in enumerate(([1, 4, 2], [3, 1, 1], [2, 2, 2], [1, 4, 4], [4, 1, 1])):
        rows = [features(count, 10 * turn + row) for row, count in enumerate(counts)]
        model.extend_context(cache, filled_up(rows), counts)
        for one, entry in zip(own, rows, strict=True):
            model.extend_context(one, entry)
        draft(model, cache, [1, 2, 3], seed=turn)  # writes scratch entries
        assert all(same_entries(model, cache, row, one) for row, one in enumerate(own))
    assert cache.lengths == [16, 13, 18]


def test_rows_that_catch_up_are_even_again() -> None:
    model = toys.drafter()
    cache = ragged(model, [2, 4])
    model.extend_context(cache, filled_up([features(3, 7), features(1, 8)]), [3, 1])
    assert cache.is_even
    assert cache.mask(3) is None
    model.extend_context(cache, features(2).expand(2, -1, -1))
    assert cache.lengths == [7, 7]


def test_positions_go_on_from_each_rows_length() -> None:
    cache = ragged(toys.drafter())
    expected = [[5, 6, 7], [1, 2, 3], [8, 9, 10]]
    assert cache.positions(3).tolist() == expected
    assert cache.positions(3).dtype == torch.int64
    assert cache.positions(0).shape == (3, 0)


def test_the_mask_shows_each_slot_its_rows_context_and_anchor() -> None:
    cache = ragged(toys.drafter())
    mask = cache.mask(4)
    assert mask is not None
    assert mask.shape == (3, 1, 4, 9)
    assert mask.dtype == torch.bool
    for row, length in enumerate(LENGTHS):
        expected = [place <= length for place in range(9)]
        assert all(slot.tolist() == expected for slot in mask[row, 0])


@pytest.mark.parametrize("num_steps", [1, 2, 4])
def test_a_draft_is_each_rows_own(num_steps: int) -> None:
    model, anchors, seeds = toys.drafter(), [7, 3, 9], [11, 4, 2**40]
    found = draft(model, ragged(model), anchors, num_steps=num_steps, seed=seeds)
    for row, (anchor, seed) in enumerate(zip(anchors, seeds, strict=True)):
        own = draft(model, single(model, row), [anchor], num_steps=num_steps, seed=[seed])
        assert torch.allclose(found[row], own[0], atol=1e-5), row
        assert not torch.allclose(found[row], found[row - 1], atol=0.1)


@pytest.mark.parametrize("num_steps", [1, 3])
def test_a_draft_from_given_noise_is_each_rows_own(num_steps: int) -> None:
    model, anchors = toys.drafter(), [7, 3, 9]
    noise = torch.randn(3, 3, toys.VOCAB, generator=torch.Generator().manual_seed(0))
    found = draft(model, ragged(model), anchors, num_steps=num_steps, noise=noise)
    for row, anchor in enumerate(anchors):
        own = draft(
            model, single(model, row), [anchor], num_steps=num_steps, noise=noise[row : row + 1]
        )
        assert torch.allclose(found[row], own[0], atol=1e-5), row


def test_what_lies_beyond_a_rows_anchor_is_not_seen() -> None:
    model = toys.drafter()
    cache = ragged(model)
    expected = draft(model, cache, [7, 3, 9], seed=1)
    for row, length in enumerate(LENGTHS):
        cache.kv[:, :, row, :, length + 1 :] = 1e3
    assert torch.allclose(draft(model, cache, [7, 3, 9], seed=1), expected, atol=1e-5)
    cache.kv[:, :, 1, :, 0] += 1.0
    changed = draft(model, cache, [7, 3, 9], seed=1)
    assert not torch.allclose(changed[1], expected[1], atol=1e-3)
    assert torch.allclose(changed[[0, 2]], expected[[0, 2]], atol=1e-5)


def test_a_draft_does_not_advance_and_leaves_other_entries() -> None:
    model = toys.drafter()
    cache = ragged(model)
    draft(model, cache, [7, 3, 9], seed=1)
    assert cache.lengths == LENGTHS
    assert all(same_entries(model, cache, row, single(model, row)) for row in range(3))


@pytest.mark.parametrize("rows", [[0, 2], [1], [2, 0], [0, 1, 2]])
def test_rows_that_are_kept_are_as_before(rows: list[int]) -> None:
    model = toys.drafter()
    cache = ragged(model)
    cache.keep(rows)
    assert cache.lengths == [LENGTHS[row] for row in rows]
    assert cache.kv.shape[2] == len(rows)
    assert all(
        same_entries(model, cache, place, single(model, row)) for place, row in enumerate(rows)
    )
    found = draft(model, cache, [5] * len(rows), seed=[20 + row for row in rows])
    for place, row in enumerate(rows):
        own = draft(model, single(model, row), [5], seed=[20 + row])
        assert torch.allclose(found[place], own[0], atol=1e-5)


def test_growing_keeps_every_row() -> None:
    model = toys.drafter()
    cache = ragged(model, room=9)
    cache.reserve(30)
    assert (cache.max_length, cache.lengths) == (30, LENGTHS)
    assert all(same_entries(model, cache, row, single(model, row)) for row in range(3))


def test_the_longest_row_decides_what_fits() -> None:
    model = toys.drafter()
    cache = ragged(model, room=9)
    before = cache.kv.clone()
    with pytest.raises(ValueError, match=r"\b9 entries.*\b10\b"):
        model.extend_context(cache, features(2).expand(3, -1, -1), [1, 1, 1])
    assert cache.kv.equal(before)
    assert cache.lengths == LENGTHS


@pytest.mark.parametrize("counts", [[1, 2], [1, 1, 1, 1]])
def test_counts_for_another_number_of_rows_are_refused(counts: list[int]) -> None:
    model = toys.drafter()
    with pytest.raises(ValueError):
        model.extend_context(ragged(model), features(2).expand(3, -1, -1), counts)


class TestOneLength:
    """A cache of sequences that are equally long works by its `length` alone."""

    def test_setting_it_sets_every_row(self) -> None:
        cache = ragged(toys.drafter())
        cache.length = 4
        assert (cache.length, cache.lengths, cache.is_even) == (4, [4, 4, 4], True)
        cache.length += 2
        assert cache.lengths == [6, 6, 6]

    def test_rolling_back_and_writing_again(self) -> None:
        model = toys.drafter()
        cache = single(model, 2)
        cache.length = 3
        model.extend_context(cache, features(4, 9))
        expected = model.new_cache(1, 20)
        model.extend_context(expected, torch.cat((features(8, 2)[:, :3], features(4, 9)), dim=1))
        assert cache.length == expected.length == 7
        assert torch.allclose(cache.kv[..., :7, :], expected.kv[..., :7, :], atol=1e-5)

    def test_a_new_cache_is_empty(self) -> None:
        cache = toys.drafter().new_cache(2, 5)
        assert (cache.length, cache.lengths, cache.is_even, cache.mask(3)) == (
            0,
            [0, 0],
            True,
            None,
        )
