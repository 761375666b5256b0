"""Rounds of trees in the whole engine: greedy text is the target's, right drafts are accepted, and
what trees cannot serve is refused without harm to others."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.engine_pairs import BLOCK, next_token
from support.sglang_engines import LENGTH, PROMPTS, acceptance, ask, engine, texts

from flashmap.serving.options import VARIABLE


@pytest.fixture(autouse=True)
def trees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, '{"tree_candidates": 4, "tree_budget": 9}')


def test_greedy_text_is_the_targets(random: Path, plain: list[list[int]]) -> None:
    with engine(random, True) as llm:
        answers = ask(llm, PROMPTS, temperature=0, max_new_tokens=LENGTH)
        # A text that was served before begins with entries whose slots were reordered.
        prompt, rest = PROMPTS[2] + plain[2][:5], plain[2][5:]
        assert texts(llm, [prompt], temperature=0, max_new_tokens=len(rest)) == [rest]
    assert [answer["output_ids"] for answer in answers] == plain
    drafted, accepted = acceptance(answers)
    assert 0 <= accepted < drafted


def test_right_drafts_are_accepted_and_other_requests_refused(right: Path) -> None:
    greedy = {"max_new_tokens": LENGTH, "ignore_eos": True, "temperature": 0.0}
    with engine(right, True) as llm:

        async def all_at_once() -> list[Any]:
            asked = [
                llm.async_generate(input_ids=prompt, sampling_params=greedy | kind, **more)
                for prompt, kind, more in (
                    (PROMPTS[0], {}, {}),
                    (PROMPTS[1], {"temperature": 1.0}, {}),
                    (PROMPTS[1], {}, {"return_logprob": True}),
                    (PROMPTS[2], {}, {}),
                )
            ]
            return await asyncio.gather(*asked, return_exceptions=True)

        first, sampled, logprobs, last = llm.loop.run_until_complete(all_at_once())
    for refused, words in ((sampled, "a temperature above 0"), (logprobs, "logprobs")):
        assert isinstance(refused, ValueError)
        assert "drafts trees" in str(refused)
        assert words in str(refused)
    served = [first, last]
    for prompt, answer in zip((PROMPTS[0], PROMPTS[2]), served, strict=True):
        expected = [next_token(prompt[-1])]
        while len(expected) < LENGTH:
            expected.append(next_token(expected[-1]))
        assert answer["output_ids"] == expected
    drafted, accepted = acceptance(served)
    rounds = -(-(LENGTH - 1) // (BLOCK + 1))
    assert drafted == len(served) * rounds * BLOCK
    assert accepted >= len(served) * (LENGTH - 1 - rounds)
