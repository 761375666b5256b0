"""Rounds of fixed shape beside the plain loop: targets, a padded batch, and both ways compared."""

import functools
from typing import Any

import pytest

from flashmap.modeling import obstacles_flashmap, target_flashmap
from flashmap.modeling.round_flashmap import Round

from . import toys
from .oracle import padded
from .toys import prompt

FAMILIES: dict[str, Any] = {
    "llama": toys.llama,
    "qwen3": toys.qwen3,
    "gpt2": lambda: toys.gpt2(positions=160),
}
LENGTHS = (9, 1, 17, 4)
IDS, MASK = padded([prompt(length, seed=length) for length in LENGTHS], "left")
SEEDS = [3, 10, 8, 6]


@functools.cache
def family(name: str) -> Any:
    return FAMILIES[name]()


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a CPU take part, and forgets which reasons were given."""
    monkeypatch.setattr(obstacles_flashmap, "DEVICES", ("cpu", "cuda"))
    monkeypatch.setattr(target_flashmap, "_warned", set())


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The rounds that are made from now on."""
    rounds: list[Any] = []
    honest = Round.__init__

    def init(self: Any, *args: Any) -> None:
        honest(self, *args)
        rounds.append(self)

    monkeypatch.setattr(Round, "__init__", init)
    return rounds


def both(drafter: Any, target: Any, ids: Any = IDS, mask: Any = MASK, **settings: Any) -> Any:
    """The output in rounds of fixed shape, after comparing it with the plain loop's."""
    settings = {"max_new_tokens": 32, "seed": SEEDS[: len(ids)], **settings}
    plain = drafter.spec_generate(target, ids, attention_mask=mask, graphs=False, **settings)
    found = drafter.spec_generate(target, ids, attention_mask=mask, graphs=True, **settings)
    assert found.sequences.equal(plain.sequences)
    assert found.acceptance_lengths == plain.acceptance_lengths
    assert (found.num_new_tokens, found.seeds) == (plain.num_new_tokens, plain.seeds)
    return found
