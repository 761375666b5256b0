"""Random calls: greedy text is the target's own, sampled rows are what they are alone."""

import functools
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from support import toys
from support.oracle import alone, oracle, padded, texts_of
from support.toys import prompt
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
)

from flashmap.modeling import runner_flashmap

NUM_CASES, NUM_GROUPS = 510, 10
LONGEST = 14
WITH_WINDOWS = ("gemma2", "gemma3")  # one prompt at a time, and no trees


def gemma(seed: int = 0) -> Any:
    config = transformers.GemmaConfig(**toys._sizes(head_dim=12))
    return toys.liven(transformers.GemmaForCausalLM(config), seed, embedding_std=0.1)


TARGETS: dict[str, Any] = {
    "llama": toys.llama,
    "llama-four-heads": lambda: toys.llama(5, num_attention_heads=4, num_key_value_heads=2),
    "qwen3": toys.qwen3,
    "gpt2": lambda: toys.gpt2(positions=256),  # room for every tree, in a batch or alone
    "gemma": gemma,
    "gemma2": toys.gemma2,
    "gemma3": toys.gemma3,
}
PROCESSORS: dict[str, Any] = {
    "": lambda: None,
    "repetition": lambda: RepetitionPenaltyLogitsProcessor(1.3),
    "bad words": lambda: NoBadWordsLogitsProcessor([[7], [3, 4], [30]], torch.tensor([0])),
}


class Sums:
    """Ends a text once its sum is a multiple of 13."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return input_ids.sum(dim=1) % 13 == 0


def random_drafts(draw: random.Random, target: str, temperature: float) -> dict[str, Any]:
    """How to draft: blocks, trees of a size, or as many as pay; adaptively or not."""
    drafts: dict[str, Any] = {"adaptive": draw.choice((False, False, True, (0.4, 0.1)))}
    if temperature > 0.0 or target in WITH_WINDOWS:
        drafts["num_draws"] = draw.choice((1, 1, 2, "auto"))
    else:
        drafts["num_candidates"] = draw.choice((1, 1, 2, 3, 20, "auto"))
    return drafts


@dataclass
class Case:
    """One call, as `random.Random(number)` makes it."""

    number: int
    target: str
    prompts: list[tuple[int, int]]
    side: str
    more_padding: int
    block_size: int
    knows: bool
    num_tokens: int
    num_steps: int
    temperature: float
    seeds: list[int]
    processor: str
    truncations: dict[str, float]
    stops: list[int]
    ends_at_sums: bool
    most_holes: int
    drafts: dict[str, Any]
    loud: float

    @classmethod
    def numbered(cls, number: int) -> "Case":
        draw = random.Random(number)
        target = draw.choice(list(TARGETS))
        rows = 1 if target in WITH_WINDOWS else draw.choice((1, 2, 2, 3, 4))
        temperature = draw.choice((0.0, 0.0, 0.0, 0.0, 0.4, 1.0))
        truncations: dict[str, float] = {}
        if temperature:
            options = {"top_k": draw.randint(1, 30), "top_p": draw.random(), "min_p": 0.05}
            truncations = {name: value for name, value in options.items() if draw.random() < 0.3}
        return cls(
            number, target,
            [(draw.randint(1, 14), draw.randint(0, 3)) for _ in range(rows)],
            draw.choice(("left", "right")), draw.choice((0, 0, 3)),
            draw.randint(1, 6), draw.random() < 0.7, draw.randint(1, LONGEST),
            draw.choice((1, 1, 2)), temperature,
            draw.sample(range(1000), rows), draw.choice(("", "", *PROCESSORS)), truncations,
            draw.choice(([], [], draw.sample(range(toys.VOCAB), 4))), draw.random() < 0.15,
            draw.choice((0, 1, 64)),
            random_drafts(draw, target, temperature),
            draw.choice((30.0, 30.0, 3.0)),  # right tokens are the likeliest drafts, or likely
        )  # fmt: skip

    def arguments(self) -> dict[str, Any]:
        made = PROCESSORS[self.processor]()
        return {
            "max_new_tokens": self.num_tokens, "num_steps": self.num_steps,
            "temperature": self.temperature, "stop_token_ids": self.stops,
            "logits_processor": LogitsProcessorList([made]) if made else None,
            "stopping_criteria": [Sums()] if self.ends_at_sums else None,
            **self.truncations, **self.drafts,
        }  # fmt: skip


@functools.cache
def target_of(name: str) -> Any:
    return TARGETS[name]()


@functools.cache
def drafter_of(block_size: int) -> Any:
    return oracle(block_size)


@functools.cache
def plain(target: str, shape: tuple[int, int], processor: str) -> tuple[int, ...]:
    """The target's own text, by `generate`."""
    ids, made = prompt(*shape), PROCESSORS[processor]()
    out = target_of(target).generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=LONGEST,
        logits_processor=LogitsProcessorList([made] if made else []), pad_token_id=0,
    )  # fmt: skip
    return tuple(out[0, ids.shape[1] :].tolist())


def expected(case: Case, shape: tuple[int, int]) -> list[int]:
    """The target's own text as far as the case's settings let it go."""
    text, whole = [], prompt(*shape)[0].tolist()
    for token in plain(case.target, shape, case.processor)[: case.num_tokens]:
        text.append(token)
        if token in case.stops or (case.ends_at_sums and sum(whole + text) % 13 == 0):
            break
    return text


def run(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_flashmap, "MOST_HOLES", case.most_holes)
    target, drafter = target_of(case.target), drafter_of(case.block_size)
    prompts = [prompt(*shape) for shape in case.prompts]
    drafter.texts, drafter.loud = {seed: [] for seed in case.seeds}, case.loud
    if case.knows:
        for seed, shape, ids in zip(case.seeds, case.prompts, prompts, strict=True):
            drafter.texts[seed] = ids[0].tolist() + list(plain(case.target, shape, case.processor))
    ids, mask = padded(prompts, case.side, pad=case.number % toys.VOCAB, more=case.more_padding)
    out = drafter.spec_generate(
        target, ids, attention_mask=mask, seed=case.seeds, **case.arguments()
    )
    found = texts_of(out, ids)
    if case.temperature == 0.0:
        assert [row[0] for row in found] == [expected(case, shape) for shape in case.prompts]
    if case.temperature > 0.0 or case.number % 4 == 0:
        singly = alone(drafter, target, prompts, case.seeds, **case.arguments())
        assert found == singly


@pytest.mark.parametrize("group", range(NUM_GROUPS))
def test_random_calls(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(group, NUM_CASES, NUM_GROUPS):
        case = Case.numbered(number)
        try:
            run(case, monkeypatch)
        except (AssertionError, RuntimeError, ValueError, LookupError, TypeError) as error:
            error.add_note(f"in {case}")
            raise


def test_cases_are_of_all_kinds() -> None:
    cases = [Case.numbered(number) for number in range(NUM_CASES)]
    assert {case.target for case in cases} == set(TARGETS)
    assert {len(case.prompts) for case in cases} == {1, 2, 3, 4}
    assert {case.processor for case in cases} == set(PROCESSORS)
    assert sum(case.temperature == 0.0 for case in cases) > 250
    assert sum(case.temperature > 0.0 for case in cases) > 130
    assert sum(case.drafts.get("num_candidates", 1) != 1 for case in cases) > 140
    assert sum(case.drafts.get("num_draws", 1) != 1 for case in cases) > 60
    assert sum(bool(case.drafts["adaptive"]) for case in cases) > 200
    assert StoppingCriteriaList([Sums()])(torch.tensor([[13]]), None).all()
