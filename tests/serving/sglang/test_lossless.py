"""Greedy text is the same with and without drafts, in the whole engine; right drafts are all
accepted."""

from pathlib import Path

import pytest
from support.engine_pairs import BLOCK, next_token
from support.sglang_engines import LENGTH, PROMPTS, acceptance, ask, engine, texts

from flashmap.serving.options import VARIABLE


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ("{}", {}),
        (
            '{"num_steps": 2, "jump_bank_size": 64, "draft_vocab_size": 9}',
            {"chunked_prefill_size": 8, "page_size": 4, "speculative_dspark_block_size": 2},
        ),
    ],
    ids=["default", "other"],
)
def test_greedy_text_is_the_targets(
    options: str,
    settings: dict[str, int],
    random: Path,
    plain: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VARIABLE, options)
    with engine(random, True, **settings) as llm:
        answers = ask(llm, PROMPTS, temperature=0, max_new_tokens=LENGTH)
        assert [answer["output_ids"] for answer in answers] == plain
        drafted, accepted = acceptance(answers)
        assert 0 <= accepted < drafted
        # What the cache keeps of a text serves the next one that begins alike.
        assert texts(llm, PROMPTS[2:], temperature=0, max_new_tokens=LENGTH) == plain[2:]


@pytest.mark.parametrize(
    ("size", "options"),
    [(BLOCK, "{}"), pytest.param(2, '{"num_steps": 2}', marks=pytest.mark.slow)],
)
def test_right_drafts_are_accepted(
    size: int, options: str, right: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, options)
    with engine(right, True, speculative_dspark_block_size=size) as llm:
        answers = ask(llm, PROMPTS, temperature=0, max_new_tokens=LENGTH)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        expected = [next_token(prompt[-1])]
        while len(expected) < LENGTH:
            expected.append(next_token(expected[-1]))
        assert answer["output_ids"] == expected
    drafted, accepted = acceptance(answers)
    # All of them but what lies beyond the longest text: the first token is the prefill's.
    rounds = -(-(LENGTH - 1) // (size + 1))
    assert drafted == len(PROMPTS) * rounds * size
    assert accepted >= len(PROMPTS) * ((LENGTH - 1) - rounds)
