"""What bench counts: loops, identical outputs, medians, rates of returned tokens."""

from typing import Any

import pytest
from support import pair_folders, toys

from flashmap.cli import measure as measure_module
from flashmap.cli.decoding import Decoded, decode_plainly
from flashmap.cli.measure import Sample, Settings, measure, summarise
from flashmap.loops import ends_in_loop
from flashmap.prompts import Prompt

TEXT = list(range(100, 160))


@pytest.mark.parametrize(
    ("tokens", "looped"),
    [
        ([], False),
        (TEXT, False),
        (TEXT + [7] * 11, True),
        (TEXT + [7] * 10, False),
        (TEXT + [1, 2, 3, 4, 5, 6, 7, 8] * 4, True),
        (TEXT + [1, 2, 3, 4, 5, 6, 7, 8] * 3, False),
        (TEXT + [1, 2, 3] * 6, True),
        (TEXT + list(range(20)) * 4, True),
        (TEXT + list(range(20)) * 4 + [99], False),
        (TEXT + [7] * 11 + [0], True),
        (TEXT + list(range(65)) * 5, False),
        ([0, 0, 0], False),
    ],
)
def test_ends_in_loop(tokens: list[int], looped: bool) -> None:
    assert ends_in_loop(tokens, stop_ids=[0]) is looped


def sample(**changes: Any) -> Sample:
    fields: dict[str, Any] = {
        "domain": "d",
        "plain_ids": [1] * 10,
        "ids": [1] * 10,
        "acceptance_lengths": [2, 3, 5],
        "plain_seconds": 2.0,
        "seconds": 1.0,
        "looped": False,
    }
    return Sample(**{**fields, **changes})


def test_a_row_adds_up() -> None:
    row = summarise(
        "d",
        [sample(), sample(ids=[2] * 4, acceptance_lengths=[4], seconds=0.5, looped=True)],
        greedy=True,
    )
    assert (row["prompts"], row["tokens"], row["rounds"]) == (2, 14, 4)
    assert row["acceptance_length"] == pytest.approx(14 / 4)
    assert row["acceptance_length_without_looped"] == pytest.approx(10 / 3)
    assert row["tokens_per_second"] == pytest.approx(14 / 1.5)
    assert row["plain_tokens_per_second"] == pytest.approx(20 / 4.0)
    assert (row["identical"], row["looped"]) == (1, 1)


def test_nothing_left_without_loops() -> None:
    row = summarise("d", [sample(looped=True)], greedy=False)
    assert row["acceptance_length_without_looped"] is None and row["identical"] is None


def test_sides_alternate_and_the_median_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    seconds = iter(
        [9.0, 9.0, 1.0, 5.0, 2.0, 6.0, 30.0, 7.0]
    )  # a warm-up of two, then three repeats

    def side(name: str) -> Any:
        def decode(*args: Any, **options: Any) -> Decoded:
            calls.append(f"{name} {options['max_new_tokens']} {options['seed']}")
            return Decoded(
                [1, 2], [2] if name == "flashmap" else [], next(seconds), options["seed"]
            )

        return decode

    monkeypatch.setattr(measure_module, "decode_plainly", side("plain"))
    monkeypatch.setattr(measure_module, "decode_with_drafter", side("flashmap"))
    settings = Settings(40, 0.0, None, 1, 1, False, repeats=3, seed=10, raw=True)
    advanced: list[int] = []
    (result,) = measure(
        toys.llama(),
        None,
        pair_folders.tokenizer(),
        [Prompt("a", "d")],
        settings,
        lambda: advanced.append(1),
    )
    assert calls == [
        "plain 16 10",
        "flashmap 16 10",
        "plain 40 10",
        "flashmap 40 10",
        "flashmap 40 10",
        "plain 40 10",
        "plain 40 10",
        "flashmap 40 10",
    ]
    assert (result.plain_seconds, result.seconds) == (6.0, 5.0)
    assert len(advanced) == 1


def test_plain_decoding_sets_the_targets_own_settings_aside() -> None:
    target = toys.llama(eos_token_id=[5, 6])
    config = target.generation_config
    config.repetition_penalty, config.top_k, config.do_sample = 1.9, 3, True
    ids = toys.prompt(6)
    bare = toys.llama()
    expected = toys.greedy(bare, ids, 12)
    found = decode_plainly(target, ids, max_new_tokens=12, temperature=0.0, seed=0)
    stop = next((i + 1 for i, token in enumerate(expected) if token in (5, 6)), len(expected))
    assert found.token_ids == expected[:stop]
    assert target.generation_config is config and config.repetition_penalty == 1.9


def test_a_seed_beyond_64_bits_wraps() -> None:
    target, ids = toys.llama(), toys.prompt(6)
    small, large = (
        decode_plainly(target, ids, max_new_tokens=9, temperature=1.0, seed=seed)
        for seed in (5, 2**64 + 5)
    )
    assert small.token_ids == large.token_ids and large.seed == 2**64 + 5


def test_plain_sampling_draws_from_the_bare_distribution() -> None:
    import torch

    target = toys.llama()
    target.generation_config.top_k, target.generation_config.top_p = 1, 0.1
    ids = toys.prompt(6)
    drawn = [
        decode_plainly(target, ids, max_new_tokens=1, temperature=1.5, seed=seed).token_ids[0]
        for seed in range(60)
    ]
    assert len(set(drawn)) > 5  # top_k=1 would always give the same
    probabilities = torch.softmax(target(ids).logits[0, -1] / 1.5, dim=-1)
    assert all(probabilities[token] > 0 for token in drawn)
