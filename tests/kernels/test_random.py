"""Random numbers equal the known answers of Philox4x32-10 and of every stream, bit for bit."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flashmap.kernels.fused_flashmap import (
    Stream,
    coin,
    draw_seeds,
    philox,
    seeded_normal,
    seeded_uniform,
)

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/philox.json").read_text())
SEED, POSITION, DRAW = GOLDEN["seed"], GOLDEN["position"], GOLDEN["m"]


def words_of(text: str) -> tuple[int, ...]:
    return tuple(int(word, 16) for word in text.split())


def number(value: Any) -> int:
    return int(value, 16) if isinstance(value, str) else int(value)


def as_tensors(*values: int) -> list[Tensor]:
    return [torch.tensor([(value + 2**63) % 2**64 - 2**63]) for value in values]


@pytest.mark.parametrize("answer", GOLDEN["known_answers"])
def test_published_known_answers(answer: dict[str, Any]) -> None:
    low, high = map(number, answer["key"])
    counter = list(map(number, answer["counter"]))
    expected = words_of(answer["words"])
    seed = low | high << 32
    assert philox(*counter, seed) == expected
    assert tuple(int(word) for word in philox(*as_tensors(*counter, seed))) == expected


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("tag", range(1, 8))
def test_words_of_every_stream(tag: int, index: int) -> None:
    expected = words_of(GOLDEN["words"][str(tag)][f"index{index}"])
    arguments = (index, POSITION, DRAW, tag, SEED)
    assert philox(*arguments) == expected
    assert tuple(int(word) for word in philox(*as_tensors(*arguments))) == expected


def test_streams_have_the_documented_numbers() -> None:
    names = ["NOISE", "DRAFT", "ACCEPT", "BONUS", "FIRST", "GUMBEL", "BANK"]
    assert [(stream.name, int(stream)) for stream in Stream] == list(zip(names, range(1, 8)))  # noqa: B905


@pytest.mark.parametrize("seed", [-1, 2**64 - 1])
def test_a_negative_seed_counts_modulo_two_to_the_64(seed: int) -> None:
    expected = words_of(GOLDEN["seed_minus_one_tag1_index0"])
    assert philox(0, POSITION, DRAW, 1, seed) == expected
    seeds, positions = torch.tensor([-1]), torch.tensor([[POSITION]])
    first = seeded_uniform(seeds, positions, 4, Stream.NOISE)
    exact = [min(float(torch.tensor(word).float()) * 2**-32 + 2**-33, 1) for word in expected]
    assert torch.allclose(first.flatten(), torch.tensor(exact), atol=1e-7, rtol=0)


def test_integers_and_tensors_agree_on_large_numbers() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-(2**63), 2**63 - 1, (5, 64), generator=generator)
    together = philox(*values)
    for column in range(values.shape[1]):
        alone = philox(*values[:, column].tolist())
        assert alone == tuple(int(word[column]) for word in together)
        assert all(0 <= word < 2**32 for word in alone)


@pytest.mark.parametrize("tag", [2, 3, 4, 5])
def test_coins(tag: int) -> None:
    assert coin(SEED, POSITION, Stream(tag)) == GOLDEN["uniform_float64"][str(tag)]


def test_coins_are_inside_zero_and_one(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = {0: 2.0**-53, 2**32 - 1: 1 - 2.0**-53}
    for word, expected in ends.items():
        monkeypatch.setitem(coin.__globals__, "philox", lambda *arguments, w=word: (w,) * 4)
        assert coin(0, 0, Stream.ACCEPT) == expected
        assert 0 < expected < 1


@pytest.mark.parametrize(
    ("stream", "name"),
    [(Stream.NOISE, "noise_uniform_float32"), (Stream.GUMBEL, "gumbel_uniform_float32")],
)
def test_uniforms_bit_for_bit(stream: Stream, name: str) -> None:
    found = seeded_uniform(torch.tensor([SEED]), torch.tensor([[POSITION]]), 8, stream)
    assert found.dtype == torch.float32
    assert found.flatten().equal(torch.tensor(GOLDEN[name]))


def test_uniforms_stay_below_one(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = (torch.tensor(0), torch.tensor(2**32 - 1))

    def extremes(index: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        shape = torch.broadcast_shapes(index.shape, *(value.shape for value in rest))
        return tuple(end.expand(shape) for end in (ends * 2))

    monkeypatch.setitem(seeded_uniform.__globals__, "philox", extremes)
    found = seeded_uniform(torch.tensor([0]), torch.tensor([[0]]), 4, Stream.NOISE).flatten()
    assert found.tolist() == [2.0**-33, 1 - 2.0**-24] * 2


def test_normals() -> None:
    found = seeded_normal(torch.tensor([SEED]), torch.tensor([[POSITION]]), 8)
    assert found.dtype == torch.float32
    assert (found.flatten() - torch.tensor(GOLDEN["noise_normals"])).abs().max() <= 5e-6


def test_normals_are_box_muller_of_the_uniforms_in_float64() -> None:
    seeds, positions = torch.tensor([3, 4]), torch.arange(6).expand(2, 6)
    uniforms = seeded_uniform(seeds, positions, 400, Stream.NOISE).double().unflatten(-1, (-1, 2))
    radius, angle = (-2 * uniforms[..., 0].log()).sqrt(), 2 * math.pi * uniforms[..., 1]
    exact = torch.stack((radius * angle.cos(), radius * angle.sin()), dim=-1).flatten(-2)
    assert (seeded_normal(seeds, positions, 400) - exact).abs().max() <= 5e-6


def test_normals_have_the_moments_of_a_normal_distribution() -> None:
    z = seeded_normal(torch.arange(100), torch.arange(50).expand(100, 50), 41).double()
    count = z.numel()
    assert abs(float(z.mean())) < 4 / count**0.5
    assert abs(float(z.square().mean()) - 1) < 4 * (2 / count) ** 0.5
    assert abs(float(z.pow(4).mean()) - 3) < 4 * (96 / count) ** 0.5
    neighbours = (z[..., 1:] * z[..., :-1]).mean()
    assert abs(float(neighbours)) < 4 / count**0.5


class TestIndependenceOfTheBatch:
    seeds = torch.tensor([5, -9, 2**40, 5])
    positions = torch.tensor([[0, 1, 2], [7, 8, 9], [1, 2, 3], [2, 3, 4]])

    def test_a_row_draws_the_same_alone(self) -> None:
        together = seeded_normal(self.seeds, self.positions, 10)
        for row in range(4):
            alone = seeded_normal(self.seeds[row : row + 1], self.positions[row : row + 1], 10)
            assert alone[0].equal(together[row])

    def test_the_order_of_rows_does_not_matter(self) -> None:
        order = torch.tensor([2, 0, 3, 1])
        together = seeded_normal(self.seeds, self.positions, 10)
        permuted = seeded_normal(self.seeds[order], self.positions[order], 10)
        assert permuted.equal(together[order])

    def test_numbers_belong_to_positions_not_to_slots(self) -> None:
        together = seeded_normal(self.seeds, self.positions, 10)
        assert together[0, 2].equal(together[3, 0])  # seed 5, position 2
        assert not together[0, 0].equal(together[0, 1])

    @pytest.mark.parametrize("columns", [1, 2, 3, 5, 6, 7, 9, 11])
    def test_columns_that_are_no_multiple_of_four(self, columns: int) -> None:
        for function in (
            seeded_normal,
            lambda s, p, c: seeded_uniform(s, p, c, Stream.GUMBEL),
        ):
            whole = function(self.seeds, self.positions, 12)
            cut = function(self.seeds, self.positions, columns)
            assert cut.shape == (4, 3, columns)
            assert cut.equal(whole[..., :columns])

    def test_draws_and_streams_differ(self) -> None:
        drawn = [seeded_normal(self.seeds, self.positions, 8, draw) for draw in (0, 1, 2)]
        drawn += [seeded_uniform(self.seeds, self.positions, 8, stream) for stream in Stream]
        for i, first in enumerate(drawn):
            for second in drawn[i + 1 :]:
                assert not (first == second).any()


class TestSeeds:
    def test_an_integer_counts_up_by_row(self) -> None:
        assert draw_seeds(3, 40, None) == [40, 41, 42]

    def test_a_list_is_taken_as_it_is(self) -> None:
        assert draw_seeds(3, [7, -1, 7], None) == [7, -1, 7]
        assert draw_seeds(2, (7, 8), None) == [7, 8]

    def test_counting_wraps_modulo_two_to_the_64(self) -> None:
        assert draw_seeds(3, 2**63 - 1, None) == [2**63 - 1, -(2**63), -(2**63) + 1]
        assert draw_seeds(2, [2**64 + 5, -(2**64) - 1], None) == [5, -1]
        seeds = draw_seeds(2, 2**64 - 1, None)
        assert seeds == [-1, 0]
        assert torch.tensor(seeds).dtype == torch.int64

    def test_a_generator_is_reproducible_and_advances(self) -> None:
        generator = torch.Generator().manual_seed(3)
        expected = torch.randint(
            -(2**63), 2**63 - 1, (4,), generator=torch.Generator().manual_seed(3)
        )
        assert draw_seeds(4, None, generator) == expected.tolist()
        assert draw_seeds(4, None, generator) != expected.tolist()

    def test_the_default_generator_follows_manual_seed(self) -> None:
        torch.manual_seed(8)
        first = draw_seeds(2, None, None)
        torch.manual_seed(8)
        assert draw_seeds(2, None, None) == first

    def test_seed_and_generator_exclude_each_other(self) -> None:
        with pytest.raises(ValueError, match="seed and generator"):
            draw_seeds(1, 0, torch.Generator())

    @pytest.mark.parametrize("seed", [True, "5", "55", 1.0, [1.0], [True], ["1"], None])
    def test_no_integers_are_refused_with_the_value(self, seed: Any) -> None:
        seed = [None] if seed is None else seed
        with pytest.raises(ValueError, match="seed"):
            draw_seeds(1, seed, None)

    @pytest.mark.parametrize("seed", [[], [1], [1, 2, 3]])
    def test_a_list_has_one_seed_a_sequence(self, seed: list[int]) -> None:
        with pytest.raises(ValueError, match=rf"{len(seed)} values for 2 sequences"):
            draw_seeds(2, seed, None)
