"""Sampled text has the target's distribution, which of the right target is known exactly: its
logit is 6 for one token and 0 for the others."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support import engine_pairs
from support.chi_square import joint_counts, p_value
from support.engine_pairs import VOCAB, next_token
from support.engines import acceptance, engine, texts
from torch import Tensor

from flashmap.serving.options import VARIABLE
from flashmap.vocabulary import write_draft_vocab

LOGIT, TEMPERATURE = 6.0, 1.5
GROUPS, LENGTH, SAMPLES = 4, 3, 300
PROMPT = [3, 9, 30]


@pytest.fixture(scope="module")
def unsure(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair whose drafter is right most of the time, and knows it."""
    folder = tmp_path_factory.mktemp("unsure")
    pair = engine_pairs.write_right(folder, logit=LOGIT, certainty=0.4)
    write_draft_vocab(pair / "draft" / "draft_vocab.safetensors", torch.arange(VOCAB).flip(0), {})
    return pair


def expected() -> Tensor:
    """Exact probabilities (GROUPS, ) * LENGTH of texts whose tokens are told by their remainder."""
    odds = math.exp(LOGIT / TEMPERATURE)
    step = torch.full((VOCAB, VOCAB), 1.0 / (odds + VOCAB - 1), dtype=torch.float64)
    for token in range(VOCAB):
        step[token, next_token(token)] *= odds
    joint = step[PROMPT[-1]]
    for _ in range(LENGTH - 1):
        joint = joint.unsqueeze(-1) * step
    for axis in range(LENGTH):
        shape = (*joint.shape[:axis], VOCAB // GROUPS, GROUPS, *joint.shape[axis + 1 :])
        joint = joint.reshape(shape).sum(dim=axis)
    return joint


@pytest.mark.parametrize(
    ("draft", "options"),
    [
        ({}, "{}"),
        ({}, '{"draft_vocab_size": 9}'),
        ({"draft_sample_method": "greedy"}, "{}"),
    ],
    ids=["as it is", "restricted", "greedy"],
)
def test_sampled_text_has_the_targets_distribution(
    draft: dict[str, Any], options: str, unsure: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, options)
    few = {"num_speculative_tokens": LENGTH - 1}  # interpreted kernels are slow
    with engine(unsure, draft | few, max_num_seqs=64, max_num_batched_tokens=512) as llm:
        seeds = list(range(SAMPLES))
        found = texts(
            llm, [PROMPT] * SAMPLES, temperature=TEMPERATURE, seed=seeds, max_tokens=LENGTH
        )
        drafted, accepted = acceptance(llm)
    assert 0.05 < accepted / drafted < 0.9, "drafts are to be accepted and rejected"
    groups = [[token % GROUPS for token in text] for text in found]
    assert p_value(joint_counts(groups, GROUPS), expected()) > 1e-3


def test_a_wrong_distribution_would_be_found() -> None:
    generator = torch.Generator().manual_seed(0)
    wrong = (expected() + 0.01).flatten()
    samples = torch.multinomial(wrong, SAMPLES, replacement=True, generator=generator)
    texts = [[int(one) // 16, int(one) // 4 % 4, int(one) % 4] for one in samples]
    assert p_value(joint_counts(texts, GROUPS), expected()) < 1e-3
