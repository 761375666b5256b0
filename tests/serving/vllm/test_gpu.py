"""On a GPU: FlashAttention over vLLM's pages, inside CUDA graphs and outside, and eight-bit
caches."""

from itertools import accumulate
from operator import eq
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine_pairs import next_token
from support.engines import acceptance, engine, speculator, texts

from flashmap.serving.options import VARIABLE

pytestmark = pytest.mark.gpu
PROMPTS = [[5], [3, 9, 30, 1, 1, 7, 22], list(range(31, 0, -1)), [2, 2, 2, 2] * 12]
LENGTH = 24
ON_GPU = {"dtype": "bfloat16", "gpu_memory_utilization": 0.2, "max_num_batched_tokens": 256}


def graphs(mode: str) -> dict[str, Any]:
    """Settings of the target's CUDA graphs."""
    return {"enforce_eager": mode == "NONE", "compilation_config": {"cudagraph_mode": mode}}


@pytest.mark.parametrize(
    ("mode", "cache"),
    [
        ("FULL", "auto"),
        ("FULL", "fp8"),
        ("PIECEWISE", "auto"),
        ("FULL_AND_PIECEWISE", "auto"),
        ("NONE", "auto"),
        ("NONE", "fp8"),
    ],
)
def test_right_drafts_are_accepted(mode: str, cache: str, right: Path) -> None:
    with engine(right, {}, kv_cache_dtype=cache, **ON_GPU, **graphs(mode)) as llm:
        found = texts(llm, PROMPTS, temperature=0.0, max_tokens=LENGTH)
        drafted, accepted = acceptance(llm)
    for prompt, text in zip(PROMPTS, found, strict=True):
        assert text[0] == next_token(prompt[-1])
        assert text[1:] == [next_token(token) for token in text[:-1]]
    assert accepted == drafted > 0


@pytest.mark.parametrize(
    "options", ["{}", '{"num_steps": 2}', '{"draft_vocab_size": 9}', '{"fp8_weights": true}']
)
def test_greedy_text_is_plain_decodings(
    options: str, random: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, options)
    settings = ON_GPU | graphs("FULL_AND_PIECEWISE")
    with engine(random, **settings) as llm:
        plain = texts(llm, PROMPTS, temperature=0.0, max_tokens=LENGTH)
    with engine(random, {}, **settings) as llm:
        found = texts(llm, PROMPTS, temperature=0.0, max_tokens=LENGTH)
    # bfloat16: a text may leave the other at a near tie, but not at once.
    same = [sum(accumulate(map(eq, *pair), min)) for pair in zip(plain, found, strict=True)]
    assert sum(same) >= len(PROMPTS) * LENGTH // 2


def test_graphs_draft_what_eager_steps_draft(random: Path) -> None:
    found = []
    for mode in ("FULL", "NONE"):
        with engine(random, {}, **ON_GPU, **graphs(mode)) as llm:
            texts(llm, PROMPTS, temperature=0.0, max_tokens=2, seed=[1, 2, 3, 4])
            found.append(speculator(llm).draft_tokens[: len(PROMPTS)].cpu())
    assert torch.equal(*found)
