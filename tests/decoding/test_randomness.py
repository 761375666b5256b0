"""A run is repeated by its seed alone, whatever drew random numbers before."""

from typing import Any

import pytest
import torch
from support import toys
from support.toys import prompt, text_of

LENGTH, NUM_TOKENS = 5, 24


def run(temperature: float = 1.0, **arguments: Any) -> tuple[list[int], list[int], list[int]]:
    """Tokens, acceptance lengths and seeds of a run on fresh models."""
    ids = prompt(LENGTH)
    out = toys.drafter().spec_generate(
        toys.llama(), ids, max_new_tokens=NUM_TOKENS, temperature=temperature, **arguments
    )
    return text_of(out, ids), out.acceptance_lengths, out.seeds


@pytest.mark.parametrize("num_steps", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_a_seed_repeats_a_run_exactly(temperature: float, num_steps: int) -> None:
    torch.manual_seed(1)
    first = run(temperature, seed=11, num_steps=num_steps)
    torch.manual_seed(2)
    assert run(temperature, seed=11, num_steps=num_steps) == first
    assert first[2] == [11]


def test_an_integer_and_a_list_of_one_are_the_same_seed() -> None:
    assert run(seed=[11]) == run(seed=11)


def test_different_seeds_give_different_text() -> None:
    texts = {tuple(run(seed=seed)[0]) for seed in range(8)}
    assert len(texts) == 8


def test_seeds_that_differ_only_in_their_high_bits_differ() -> None:
    assert run(seed=3)[0] != run(seed=3 + 2**32)[0]


def test_seeds_count_modulo_two_to_the_64() -> None:
    assert run(seed=-1) == run(seed=2**64 - 1)
    assert run(seed=-1)[2] == [-1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_manual_seed_makes_runs_repeatable(temperature: float) -> None:
    torch.manual_seed(5)
    first, second = run(temperature), run(temperature)
    torch.manual_seed(5)
    assert (run(temperature), run(temperature)) == (first, second)
    assert first[2] != second[2]
    if temperature:
        assert first[0] != second[0]


def test_the_reported_seed_replays_an_unseeded_run() -> None:
    free = run()
    assert run(seed=free[2]) == free


def test_a_generator_makes_runs_repeatable_and_advances() -> None:
    generator = torch.Generator().manual_seed(9)
    first, second = run(generator=generator), run(generator=generator)
    assert first[0] != second[0]
    assert run(generator=torch.Generator().manual_seed(9)) == first


def test_a_generator_leaves_the_default_one_alone() -> None:
    target, drafter = toys.llama(), toys.drafter()
    before = torch.get_rng_state()
    for arguments in ({"seed": 1}, {"generator": torch.Generator()}):
        drafter.spec_generate(target, prompt(LENGTH), max_new_tokens=8, **arguments)
    assert torch.get_rng_state().equal(before)


def test_an_unseeded_run_takes_one_number_a_sequence_also_when_greedy() -> None:
    target, drafter = toys.llama(), toys.drafter()
    for temperature in (0.0, 1.0):
        torch.manual_seed(5)
        expected = torch.randint(-(2**63), 2**63 - 1, (1,)).tolist()
        after = torch.get_rng_state()
        torch.manual_seed(5)
        out = drafter.spec_generate(
            target, prompt(LENGTH), max_new_tokens=6, temperature=temperature
        )
        assert out.seeds == expected
        assert torch.get_rng_state().equal(after)


def test_sampling_near_temperature_zero_is_greedy() -> None:
    greedy_text = run(0.0, seed=1)[0]
    for temperature in (1e-3, 1e-6):
        assert run(temperature, seed=1)[0] == greedy_text


def test_the_coldest_temperature_is_greedy() -> None:
    target, ids = toys.llama(), prompt(7)
    out = toys.drafter().spec_generate(target, ids, max_new_tokens=24, temperature=1e-30, seed=0)
    assert text_of(out, ids) == toys.greedy(target, ids, 24)
