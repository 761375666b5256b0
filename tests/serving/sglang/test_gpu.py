"""On a GPU: Triton over sglang's pool, inside CUDA graphs and outside, with eight-bit pools and
weights, sampled in the captured graph."""

from itertools import accumulate
from operator import eq
from pathlib import Path
from typing import Any

import pytest
import torch
from support.chi_square import p_value
from support.engine_pairs import VOCAB, next_token, write_right
from support.sglang_engines import acceptance, ask, engine, texts

from flashmap.serving.options import VARIABLE

pytestmark = pytest.mark.gpu
PROMPTS = [[5], [3, 9, 30, 1, 1, 7, 22], list(range(31, 0, -1)), [2, 2, 2, 2] * 12]
LENGTH = 24
CHAIN: dict[str, Any] = {}
EAGER = {"disable_cuda_graph": True}
EIGHT_BITS = {"speculative_draft_kv_cache_dtype": "fp8_e4m3"}


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ("{}", CHAIN),
        ("{}", EAGER),
        ("{}", EIGHT_BITS),
        ('{"fp8_weights": true}', CHAIN),
        ('{"num_steps": 2}', CHAIN),
        ('{"fused_sampler": true}', {"speculative_dspark_block_size": 2}),
        ('{"tree_candidates": 4}', CHAIN),
        ('{"tree_candidates": 4}', EAGER),
    ],
    ids=[
        "graphs", "eager", "eight-bit pool", "eight-bit weights", "two jumps", "two drafts",
        "trees", "eager trees",
    ],
)  # fmt: skip
def test_right_drafts_are_accepted(
    options: str, settings: dict[str, Any], right: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, options)
    with engine(right, True, **settings) as llm:
        answers = ask(llm, PROMPTS, temperature=0, max_new_tokens=LENGTH)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        text = answer["output_ids"]
        assert text[0] == next_token(prompt[-1])
        assert text[1:] == [next_token(token) for token in text[:-1]]
    drafted, accepted = acceptance(answers)
    size = settings.get("speculative_dspark_block_size", 4)
    # Only drafts beyond the longest text are not counted.
    assert accepted >= drafted - len(PROMPTS) * size > 0


GREEDY = ["{}", '{"num_steps": 2}', '{"draft_vocab_size": 9}', '{"tree_candidates": 4}']


@pytest.mark.parametrize("options", GREEDY)
def test_greedy_text_is_plain_decodings(
    options: str, random: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, options)
    with engine(random) as llm:
        plain = texts(llm, PROMPTS, temperature=0, max_new_tokens=LENGTH)
    with engine(random, True) as llm:
        found = texts(llm, PROMPTS, temperature=0, max_new_tokens=LENGTH)
    # bfloat16: a text may leave the other at a near tie, but not at once.
    same = [sum(accumulate(map(eq, *pair), min)) for pair in zip(plain, found, strict=True)]
    assert sum(same) >= len(PROMPTS) * LENGTH // 2


@pytest.mark.parametrize("options", ["{}", '{"fused_sampler": true}'])
def test_sampled_text_has_the_targets_distribution(
    options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second token after a prompt, whose draft is accepted or not."""
    logit, temperature, samples = 6.0, 1.5, 4000
    pair = write_right(tmp_path, logit=logit, certainty=0.4)
    monkeypatch.setenv(VARIABLE, options)
    with engine(pair, True) as llm:
        answers = ask(llm, [[3, 9, 30]] * samples, temperature=temperature, max_new_tokens=2)
    drafted, accepted = acceptance(answers)
    assert 0.05 < accepted / drafted < 0.95, "drafts are to be accepted and rejected"
    step = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    for token in range(VOCAB):
        step[token, next_token(token)] = logit / temperature
    step = torch.softmax(step, dim=1)
    second = step[30] @ step
    tokens = torch.tensor([answer["output_ids"][1] for answer in answers])
    assert p_value(torch.bincount(tokens, minlength=VOCAB), second) > 1e-3
