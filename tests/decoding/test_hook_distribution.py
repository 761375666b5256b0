"""Sampled text of `generate(custom_generate=flashmap_decoding)` has the exact joint distribution
that plain `generate`'s settings ask for.
"""

import functools
import itertools
from typing import Any

import pytest
import torch
from support import toys
from support.chi_square import joint_counts, p_value
from torch import Tensor

from flashmap.modeling import hook_flashmap
from flashmap.modeling.hook_flashmap import flashmap_decoding

SMALL, NUM_TOKENS, COUNT = 6, 3, 300
PROMPT = torch.tensor([[4, 2, 5]])
SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "temperature": {"temperature": 0.6},
    "top_k": {"temperature": 0.8, "top_k": 3},
    "top_p": {"temperature": 1.3, "top_p": 0.7},
    "repetition and min_p": {"repetition_penalty": 1.6, "min_p": 0.15, "temperature": 1.2},
    "several draws": {"temperature": 0.8, "top_k": 4, "num_draws": 3},
    "adaptive": {"temperature": 0.8, "top_p": 0.9, "adaptive": (0.4, 0.1)},
}


@functools.cache
def target() -> Any:
    return toys.llama(3, vocab_size=SMALL)


def following(
    text: tuple[int, ...],
    temperature: float = 1.0,
    top_k: int = SMALL,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    **drafts: Any,
) -> Tensor:
    """Float64 distribution of the token after `text`, written down from the settings' meaning."""
    with torch.no_grad():
        scores = target()(torch.tensor([text])).logits[0, -1].double()
    seen = torch.zeros(SMALL, dtype=torch.bool)
    seen[list(text)] = True
    punished = torch.where(scores < 0, scores * repetition_penalty, scores / repetition_penalty)
    p = torch.softmax(torch.where(seen, punished, scores) / temperature, dim=-1)
    p = p * (p >= p.sort(descending=True).values[top_k - 1])
    p = p / p.sum()
    p = p * (torch.stack([p[p > one].sum() for one in p]) < top_p)
    p = p * (p >= min_p * p.max())
    return p / p.sum()


def exact(setting: str) -> Tensor:
    joint = torch.zeros((SMALL,) * NUM_TOKENS, dtype=torch.float64)
    known = functools.cache(lambda tail: following((4, 2, 5, *tail), **SETTINGS[setting]))
    for tail in itertools.product(range(SMALL), repeat=NUM_TOKENS):
        joint[tail] = 1.0
        for place, token in enumerate(tail):
            joint[tail] *= known(tail[:place])[token]
    return joint


def sampled(setting: str) -> float:
    """p-value of a batch of equal prompts, each row with its own seed."""
    ids = PROMPT.expand(COUNT, -1)
    found = target().generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=True, max_new_tokens=NUM_TOKENS,
        custom_generate=flashmap_decoding, seed=1, pad_token_id=0,
        draft_model=toys.drafter(vocab_size=SMALL), **SETTINGS[setting],
    )  # fmt: skip
    return p_value(joint_counts(found[:, 3:].tolist(), SMALL), exact(setting))


@pytest.mark.parametrize("setting", SETTINGS)
def test_sampled_text_has_the_settings_joint_distribution(setting: str) -> None:
    assert sampled(setting) > 1e-3


def test_the_test_rejects_warpers_that_are_applied_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = hook_flashmap._split

    def twice(*args: Any) -> Any:
        processors, truncations = honest(*args)
        return processors, (*truncations, *truncations)

    monkeypatch.setattr(hook_flashmap, "_split", twice)
    assert sampled("temperature") < 1e-6


def test_the_test_rejects_warpers_that_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = hook_flashmap._split
    monkeypatch.setattr(hook_flashmap, "_split", lambda *args: (honest(*args)[0], ()))
    assert sampled("top_k") < 1e-6
