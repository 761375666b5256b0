"""`release grids`: the definition in high precision, given values, the published constants."""

import json
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from flashmap.modeling.configuration_flashmap import PUBLISHED_JUMP_GRIDS, PUBLISHED_VOCAB_SIZE
from flashmap.schedule import MODES, jump_grids

GOLDEN = json.loads(
    (Path(__file__).resolve().parents[1] / "golden/jump_grids.json").read_text(encoding="utf-8")
)
VOCAB_SIZES = [int(size) for size in GOLDEN["exact"]]


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_exact_grids_are_the_given_ones(vocab_size: int) -> None:
    found = jump_grids(vocab_size, 8)
    wanted = GOLDEN["exact"][str(vocab_size)]
    assert list(found) == list(wanted)
    for number, times in wanted.items():
        assert found[number] == pytest.approx(times, rel=0.0, abs=1e-12)
        assert (found[number][0], found[number][-1]) == (0.0, 1.0)


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_compat_grids_are_the_given_ones_bit_for_bit(vocab_size: int) -> None:
    assert jump_grids(vocab_size, 8, "compat") == GOLDEN["table4001_float32"][str(vocab_size)]


def test_compat_repeats_the_published_constants() -> None:
    found = jump_grids(PUBLISHED_VOCAB_SIZE, len(PUBLISHED_JUMP_GRIDS), "compat")
    assert found == PUBLISHED_JUMP_GRIDS


@pytest.mark.parametrize("vocab_size", [2, 1_000_000])
def test_times_of_64_jumps_have_their_accuracies_in_high_precision(vocab_size: int) -> None:
    mpmath = pytest.importorskip("mpmath")
    times = jump_grids(vocab_size, 64)["64"]
    for i in (1, 37, 63):
        ratio = mpmath.mpf(times[i]) / (1 - mpmath.mpf(times[i]))
        readable = mpmath.quad(
            lambda z, ratio=ratio: mpmath.npdf(z) * mpmath.ncdf(z + ratio) ** (vocab_size - 1),
            [-13, -6, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 13],
        )
        accuracy = (vocab_size * readable - 1) / (vocab_size - 1)
        assert abs(float(accuracy - mpmath.mpf(i) / 64)) < 4e-13


@pytest.mark.parametrize("mode", MODES)
def test_the_largest_request_takes_less_than_a_second(mode: str) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    start = time.process_time()  # not the clock on the wall: others use the machine too
    grids = jump_grids(1_000_000 - MODES.index(mode), 64, mode)
    seconds = time.process_time() - start
    torch.set_num_threads(threads)
    assert list(grids) == [str(n) for n in range(1, 65)]
    assert all(low < high for grid in grids.values() for low, high in pairwise(grid))
    assert seconds < 1.0
