"""Sampled text has the target's distribution, which of the right target is known exactly: its
logit is 6 for one token and 0 for the others."""

from pathlib import Path

import pytest
import torch
from support import engine_pairs
from support.chi_square import joint_counts, p_value
from support.engine_pairs import VOCAB, next_token
from support.sglang_engines import acceptance, ask, engine
from torch import Tensor

LOGIT, TEMPERATURE = 6.0, 1.5
GROUPS, LENGTH, SAMPLES = 4, 2, 128
PROMPT = [3, 9, 30]


def expected() -> Tensor:
    """Exact probabilities (GROUPS, ) * LENGTH of texts of whose tokens only the remainder is
    told."""
    step = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    for token in range(VOCAB):
        step[token, next_token(token)] = LOGIT / TEMPERATURE
    step = torch.softmax(step, dim=1)
    joint = step[PROMPT[-1]]
    for _ in range(LENGTH - 1):
        joint = joint.unsqueeze(-1) * step
    for axis in range(LENGTH):
        shape = (*joint.shape[:axis], VOCAB // GROUPS, GROUPS, *joint.shape[axis + 1 :])
        joint = joint.reshape(shape).sum(dim=axis)
    return joint


@pytest.mark.slow  # interpreted kernels, for many requests
def test_sampled_text_has_the_targets_distribution(tmp_path: Path) -> None:
    pair = engine_pairs.write_right(tmp_path, logit=LOGIT, certainty=0.4)
    few = {"speculative_dspark_block_size": 2}
    with engine(pair, True, max_running_requests=64, **few) as llm:
        answers = ask(llm, [PROMPT] * SAMPLES, temperature=TEMPERATURE, max_new_tokens=LENGTH)
    drafted, accepted = acceptance(answers)
    assert 0.05 < accepted / drafted < 0.9, "drafts are to be accepted and rejected"
    groups = [[token % GROUPS for token in answer["output_ids"]] for answer in answers]
    assert p_value(joint_counts(groups, GROUPS), expected()) > 1e-3


def test_a_wrong_distribution_would_be_found() -> None:
    generator = torch.Generator().manual_seed(0)
    wrong = torch.full((GROUPS**LENGTH,), 1.0 / GROUPS**LENGTH)
    samples = torch.multinomial(wrong, SAMPLES, replacement=True, generator=generator)
    texts = [[int(one) // GROUPS, int(one) % GROUPS] for one in samples]
    assert p_value(joint_counts(texts, GROUPS), expected()) < 1e-3
