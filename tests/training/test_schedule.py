"""The time schedule against counted noise, high-precision integrals and published grids."""

import itertools
import math

import pytest
import torch

from flashmap import schedule

# Times at equal accuracies, solved to about 1e-13 with another integration rule.
GRIDS = {
    49152: {
        2: [0.8085630020740834],
        3: [0.7906717137081579, 0.8236702838722515],
        4: [0.779002964143092, 0.8085630020740834, 0.8312237542865432],
    },
    151936: {
        2: [0.8172569146170762],
        3: [0.8010797697090732, 0.8310279789721944],
        4: [0.790605278919398, 0.8172569146170762, 0.837951762715176],
    },
    4096: {
        2: [0.783658607990046],
        3: [0.7602746807627334, 0.8029446336837522],
        4: [0.7446958063177942, 0.783658607990046, 0.8124345526310164],
    },
}


@pytest.mark.parametrize("vocab_size", [2, 7, 61])
def test_accuracy_is_how_often_a_noisy_state_shows_its_token(vocab_size: int) -> None:
    count = 40_000
    noise = torch.randn(count, vocab_size, generator=torch.Generator().manual_seed(0))
    times = torch.tensor([0.0, 0.3, 0.5, 0.7, 0.9])
    for time, found in zip(times, schedule.decoding_accuracy(times, vocab_size), strict=True):
        state = (1.0 - time) * noise
        state[:, 0] += time
        shown = float((state.argmax(dim=-1) == 0).double().mean())
        error = math.sqrt(max(shown * (1.0 - shown), 1.0 / count) / count)
        chance = (1.0 + (vocab_size - 1) * float(found)) / vocab_size
        assert abs(shown - chance) < 4.0 * error


@pytest.mark.parametrize("vocab_size", [2, 61, 49152])
def test_accuracy_equals_its_integral_in_high_precision(vocab_size: int) -> None:
    mpmath = pytest.importorskip("mpmath")
    times = [0.05, 0.4, 0.75, 0.8, 0.83, 0.9]
    found = schedule.decoding_accuracy(torch.tensor(times, dtype=torch.float64), vocab_size)
    for time, accuracy in zip(times, found.tolist(), strict=True):
        ratio = mpmath.mpf(time) / (1 - mpmath.mpf(time))
        readable = mpmath.quad(
            lambda z, ratio=ratio: mpmath.npdf(z) * mpmath.ncdf(z + ratio) ** (vocab_size - 1),
            [-13, -6, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 13],
        )
        exact = (vocab_size * readable - 1) / (vocab_size - 1)
        assert abs(accuracy - float(exact)) < 1e-11


def test_accuracy_runs_from_zero_to_one_and_rises() -> None:
    times = torch.linspace(0.0, 1.0, 101, dtype=torch.float64)
    for vocab_size in (2, 61, 151936):
        found = schedule.decoding_accuracy(times, vocab_size)
        assert abs(float(found[0])) < 1e-9
        assert float(found[-1]) == 1.0
        assert float(found.diff().min()) > -1e-12
        assert found.dtype == torch.float64


def test_one_token_has_no_schedule() -> None:
    with pytest.raises(ValueError, match="vocab_size=1"):
        schedule.decoding_accuracy(torch.tensor([0.5]), 1)


@pytest.mark.parametrize("vocab_size", GRIDS)
def test_jump_times_equal_the_published_grids(vocab_size: int) -> None:
    for steps, wanted in GRIDS[vocab_size].items():
        found = schedule.jump_times([i / steps for i in range(steps + 1)], vocab_size)
        assert found[0] == 0.0
        assert found[-1] == 1.0
        assert found[1:-1] == pytest.approx(wanted, rel=0.0, abs=1e-12)


def test_jump_times_of_two_tokens_are_those_of_the_closed_form() -> None:
    # Two tokens: q = Phi(ratio / sqrt 2), so alpha = 2 q - 1 = erf(ratio / 2).
    accuracies = [0.1, 0.5, 0.9]
    for accuracy, time in zip(accuracies, schedule.jump_times(accuracies, 2), strict=True):
        assert math.isclose(math.erf(time / (1.0 - time) / 2.0), accuracy, abs_tol=1e-11)


@pytest.mark.parametrize("vocab_size", [2, 61, 49152])
def test_time_table_rises_from_zero_to_one(vocab_size: int) -> None:
    table = schedule.time_table(vocab_size, 513)
    assert table.shape == (513,)
    assert table.dtype == torch.float32
    assert float(table[0]) == 0.0
    assert float(table[-1]) == 1.0
    assert all(low < high for low, high in itertools.pairwise(table.tolist()))


@pytest.mark.parametrize("vocab_size", [2, 61, 49152, 151936])
def test_interpolated_times_have_the_accuracy_asked_for(vocab_size: int) -> None:
    table = schedule.time_table(vocab_size, 4097)
    wanted = torch.rand(200, generator=torch.Generator().manual_seed(0)) * 0.998 + 0.001
    times = schedule.interpolate(table, wanted)
    found = schedule.decoding_accuracy(times, vocab_size)
    assert float((found - wanted.double()).abs().max()) < 1e-4


def test_interpolation_is_linear_between_entries_and_stays_inside_the_table() -> None:
    table = torch.tensor([0.0, 0.4, 1.0])
    found = schedule.interpolate(table, torch.tensor([-1.0, 0.0, 0.25, 0.5, 0.75, 1.0, 2.0]))
    wanted = torch.tensor([0.0, 0.0, 0.2, 0.4, 0.7, 1.0, 1.0])
    torch.testing.assert_close(found, wanted)
