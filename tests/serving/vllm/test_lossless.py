"""An engine with a drafter says greedily what it says without one."""

from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import as_speculators
from support.engine_pairs import BLOCK, next_token, write_tokenizer
from support.engines import acceptance, engine, metric, speculator, texts

from flashmap import FlashMapDraftModel
from flashmap.serving.options import VARIABLE

PROMPTS = [[5], [3, 9, 30, 1, 1, 7, 22], [2, 2, 7, 2] * 12, [2, 9, 2, 11, 4] * 20]
LENGTH = 24


@pytest.fixture(scope="module")
def plain(random: Path) -> list[list[int]]:
    """What the random target says on its own."""
    with engine(random) as llm:
        return texts(llm, PROMPTS, temperature=0.0, max_tokens=LENGTH)


@pytest.mark.parametrize(
    ("num_drafts", "settings"),
    [
        (None, {}),
        (2, {}),
        (None, {"dtype": "bfloat16"}),
        (None, {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}),
    ],
    ids=["whole blocks", "half blocks", "bfloat16", "eight-bit cache"],
)
def test_right_drafts_are_accepted_to_the_last(
    num_drafts: int | None, settings: dict[str, Any], right: Path
) -> None:
    asked = {} if num_drafts is None else {"num_speculative_tokens": num_drafts}
    with engine(right, asked, **settings) as llm:
        found = texts(llm, PROMPTS, temperature=0.0, max_tokens=LENGTH)
        drafted, accepted = acceptance(llm)
    for prompt, text in zip(PROMPTS, found, strict=True):
        expected = [next_token(prompt[-1])]
        while len(expected) < LENGTH:
            expected.append(next_token(expected[-1]))
        assert text == expected
    size = num_drafts or BLOCK
    assert accepted == drafted > 0
    # The first token is the prefill's; the last round may hold more than is wanted.
    rounds = -(-(LENGTH - 1) // (size + 1))
    assert drafted <= len(PROMPTS) * rounds * size


Case = tuple[dict[str, Any], dict[str, Any], str]
CASES: dict[str, Case] = {
    "as it is": ({}, {}, "{}"),
    "fewer drafts than the block": ({"num_speculative_tokens": 2}, {}, "{}"),
    "two jumps": ({}, {}, '{"num_steps": 2}'),
    "draft vocabulary": ({}, {}, '{"draft_vocab_size": 9}'),
    "eight-bit weights": ({}, {}, '{"fp8_weights": true}'),
    "no proposals handed over": ({"draft_sample_method": "greedy"}, {}, "{}"),
    "chunked prefill": ({}, {"max_num_batched_tokens": 40}, "{}"),
    "prefix caching": ({}, {"enable_prefix_caching": True, "block_size": 32}, "{}"),
    "preemption": ({}, {"num_gpu_blocks_override": 9, "block_size": 32}, "{}"),
}


@pytest.mark.parametrize("case", CASES)
def test_greedy_text_is_plain_decodings(
    case: str, random: Path, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    draft, settings, options = CASES[case]
    monkeypatch.setenv(VARIABLE, options)
    with engine(random, draft, **settings) as llm:
        assert texts(llm, PROMPTS, temperature=0.0, max_tokens=LENGTH) == plain
        if case == "prefix caching":
            assert texts(llm, PROMPTS[::-1], temperature=0.0, max_tokens=LENGTH) == plain[::-1]
            assert metric(llm, "prefix_cache_hits") > 0
        if case == "preemption":  # all are let in with two pages, and need three
            assert (
                texts(llm, [PROMPTS[2]] * 4, temperature=0.0, max_tokens=LENGTH) == [plain[2]] * 4
            )
            assert metric(llm, "num_preemptions") > 0
        drafted, accepted = acceptance(llm)
    assert 0 < accepted < drafted / 2, "the random drafter is to be wrong mostly, not always"


def test_a_speculators_checkpoint_drafts_from_its_tables(
    random: Path, plain: list[list[int]], tmp_path: Path
) -> None:
    members = [0, 3, 4, 17, 18, 30]
    drafter = FlashMapDraftModel.from_pretrained(random / "draft")
    folder = as_speculators(tmp_path / "foreign", drafter, members)
    with engine(random, {"model": str(folder)}) as llm:
        assert texts(llm, PROMPTS, temperature=0.0, max_tokens=LENGTH) == plain
        assert speculator(llm).model.step.token_ids.tolist() == members
        drafted = speculator(llm).draft_tokens[: len(PROMPTS)]
    assert set(drafted.flatten().tolist()) <= set(members)


def test_a_grammar_holds_as_without_a_drafter(random: Path) -> None:
    write_tokenizer(random / "target")
    greedy = {"temperature": 0.0, "max_tokens": LENGTH}

    def told(llm: Any, **sampling: Any) -> list[list[int]]:
        from vllm.sampling_params import StructuredOutputsParams

        grammar = StructuredOutputsParams(regex="[0-5]+")
        return texts(llm, PROMPTS, structured_outputs=grammar, **{**greedy, **sampling})

    with engine(random, skip_tokenizer_init=False) as llm:
        free, expected = texts(llm, PROMPTS, **greedy), told(llm)
    with engine(random, {}, skip_tokenizer_init=False) as llm:
        assert told(llm) == expected != free
        _, accepted = acceptance(llm)
        assert accepted > 0
        sampled = told(llm, temperature=1.0, seed=[1, 2, 3, 4])
    assert all(set(str(token)) <= set("012345") for text in sampled for token in text)


def test_logprobs_are_the_targets(random: Path) -> None:
    def told(llm: Any) -> list[dict[int, float]]:
        from vllm import SamplingParams

        options = SamplingParams(
            temperature=0.0, max_tokens=LENGTH, logprobs=4, ignore_eos=True, detokenize=False
        )
        [output] = llm.generate([{"prompt_token_ids": PROMPTS[1]}], options, use_tqdm=False)
        return [
            {token: entry.logprob for token, entry in place.items()}
            for place in output.outputs[0].logprobs
        ]

    with engine(random) as llm:
        expected = told(llm)
    with engine(random, {}) as llm:
        found = told(llm)
    assert [list(place) for place in found] == [list(place) for place in expected]
    for one, other in zip(found, expected, strict=True):
        assert list(one.values()) == pytest.approx(list(other.values()), abs=1e-4)
