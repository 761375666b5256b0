"""Processors and truncations: greedy text is `generate`'s under the same settings, sampled text has
the processed target's exact joint distribution.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support import toys
from support.chi_square import joint_counts, p_value
from support.oracle import alone, oracle, together
from support.table_models import TableDrafter, TableTarget, reasonable, wrong
from support.toys import VOCAB, prompt, text_of
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TopPLogitsWarper,
)

from flashmap.modeling.decoding_flashmap import spec_generate
from flashmap.modeling.sampling_flashmap import Sampler, nucleus

LENGTH, NUM_TOKENS = 7, 24


class Presence(LogitsProcessor):
    """Takes something off every token that the text holds."""

    def __init__(self, penalty: float = 4.0) -> None:
        self.penalty = penalty

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        seen = torch.zeros_like(scores).scatter_(1, input_ids, 1.0)
        return scores - self.penalty * seen


class ByPrefix(LogitsProcessor):
    """Moves the scores along by what the whole prefix adds up to."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        place = int((input_ids[0] * torch.arange(1, input_ids.shape[1] + 1)).sum()) % 5
        bonus = torch.zeros_like(scores)
        bonus[:, place::5] = 3.0
        return scores + bonus


class InPlace(LogitsProcessor):
    """Writes into the scores it is given, as some processors do."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, int(input_ids[0, -1])] = float("-inf")
        return scores


def bad_words(*words: list[int]) -> Any:
    return NoBadWordsLogitsProcessor(list(words), eos_token_id=torch.tensor([0]))


PROCESSORS: dict[str, Callable[[], Any]] = {
    "repetition": lambda: RepetitionPenaltyLogitsProcessor(1.4),
    "presence": Presence,
    "by prefix": ByPrefix,
    "in place": InPlace,
    "bad words": lambda: bad_words([1], [4], [2, 3], [5, 1]),
}


def listed(*names: str) -> Any:
    return LogitsProcessorList([PROCESSORS[name]() for name in names])


class TestGreedy:
    @functools.cache  # noqa: B019 - one small target for the whole class
    def target(self) -> Any:
        return toys.llama()

    def plain(self, ids: Tensor, processors: Any, num_tokens: int, **arguments: Any) -> list[int]:
        out = self.target().generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_tokens,
            logits_processor=processors, pad_token_id=0, **arguments,
        )  # fmt: skip
        new: list[int] = out[0, ids.shape[1] :].tolist()
        return new

    @pytest.mark.parametrize("knows", [True, False])
    @pytest.mark.parametrize(
        "names", [*((name,) for name in PROCESSORS), ("presence", "by prefix"), tuple(PROCESSORS)]
    )
    def test_text_is_generates(self, names: tuple[str, ...], knows: bool) -> None:
        ids, text = prompt(LENGTH), self.plain(prompt(LENGTH), listed(*names), NUM_TOKENS)
        assert text != toys.greedy(self.target(), ids, NUM_TOKENS), "they change nothing"
        script = {LENGTH + i: token for i, token in enumerate(text) if i % 6 != 4}
        drafter = toys.scripted(script) if knows else toys.drafter()
        out = drafter.spec_generate(
            self.target(), ids, max_new_tokens=NUM_TOKENS, logits_processor=listed(*names)
        )
        assert text_of(out, ids) == text
        if knows:
            assert max(out.acceptance_lengths) == 4

    def test_a_smallest_number_of_tokens(self) -> None:
        ids = prompt(LENGTH)
        eos = toys.greedy(self.target(), ids, 6)[4]
        makes = functools.partial(
            MinNewTokensLengthLogitsProcessor, LENGTH, eos_token_id=torch.tensor([eos])
        )
        for smallest in (2, 9, 16):
            text = self.plain(ids, LogitsProcessorList([makes(smallest)]), 30, eos_token_id=eos)
            script = {LENGTH + i: token for i, token in enumerate(text)}
            for drafter in (toys.scripted(script), toys.drafter()):
                out = drafter.spec_generate(
                    self.target(), ids, max_new_tokens=30, stop_token_ids=eos,
                    logits_processor=LogitsProcessorList([makes(smallest)]),
                )  # fmt: skip
                assert text_of(out, ids) == text
                assert len(text) >= smallest

    @pytest.mark.parametrize("temperature", [0.0, 0.7])
    def test_a_batch_is_its_rows(self, temperature: float) -> None:
        prompts, seeds = [prompt(n, seed=n) for n in (3, 9, 1)], [1, 2, 3]
        arguments: dict[str, Any] = {
            "max_new_tokens": 16, "temperature": temperature,
            "logits_processor": listed("repetition", "by prefix"),
        }  # fmt: skip
        if temperature:
            arguments |= {"top_k": 20, "top_p": 0.9, "min_p": 0.01}
        drafter = toys.drafter()
        found = together(drafter, self.target(), prompts, seeds, "left", **arguments)
        assert found == alone(drafter, self.target(), prompts, seeds, **arguments)
        if not temperature:
            plain = [self.plain(ids, arguments["logits_processor"], 16) for ids in prompts]
            assert [row[0] for row in found] == plain


class Spy(LogitsProcessor):
    """Remembers what it is given, and changes nothing."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []
        self.dtypes: set[torch.dtype] = set()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert input_ids.shape[0] == scores.shape[0] == 1
        self.seen.append(input_ids[0].tolist())
        self.dtypes.add(scores.dtype)
        return scores


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_processors_see_the_text_before_each_token(num_rows: int, temperature: float) -> None:
    target, spy = toys.llama(), Spy()
    prompts = [prompt(3 + 4 * row, seed=row) for row in range(num_rows)]
    drafter = oracle(3)
    for row, ids in enumerate(prompts):
        drafter.texts[row] = ids[0].tolist() + toys.greedy(target, ids, 20)
    arguments = {"max_new_tokens": 16, "temperature": temperature}
    found = together(
        drafter, target, prompts, 0, "left", logits_processor=LogitsProcessorList([spy]),
        **arguments,
    )  # fmt: skip
    assert found == alone(drafter, target, prompts, range(num_rows), **arguments)
    starts = [ids[0].tolist() for ids in prompts]
    whole = [start + row[0] for start, row in zip(starts, found, strict=True)]
    for start, text in zip(starts, whole, strict=True):
        for end in range(len(start), len(text)):  # the target's scores of every token it committed
            assert text[:end] in spy.seen
    # No prefix holds padding, or more than the drafts of one block beyond a committed text.
    for prefix in spy.seen:
        assert any(
            prefix[: len(start)] == start
            and any(prefix[:end] == text[:end] for end in range(max(1, len(prefix) - 3), 64))
            for start, text in zip(starts, whole, strict=True)
        )
    assert spy.dtypes == {torch.float32}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_target_with_a_wider_head_than_the_drafters_vocabulary(temperature: float) -> None:
    target, ids = toys.llama(vocab_size=VOCAB + 3), prompt(LENGTH)
    processors = LogitsProcessorList([bad_words([1], [VOCAB + 1], [2, 3]), Presence()])
    out = toys.drafter().spec_generate(
        target, ids, max_new_tokens=NUM_TOKENS, temperature=temperature, seed=1,
        logits_processor=processors,
    )  # fmt: skip
    text = text_of(out, ids)
    assert not {1, VOCAB + 1} & set(text)
    if not temperature:
        expected = target.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_TOKENS,
            pad_token_id=0,
            logits_processor=LogitsProcessorList([bad_words([1], [VOCAB + 1], [2, 3]), Presence()]),
        )  # fmt: skip
        assert text == expected[0, LENGTH:].tolist()


SMALL, BLOCK, COUNT = 6, 2, 500
PAIR = torch.tensor([[4, 2]])
# Name: temperature, processors, truncations.
SETTINGS: dict[str, tuple[float, tuple[str, ...], dict[str, float]]] = {
    "temperature": (0.6, (), {}),
    "top_k": (1.0, (), {"top_k": 3}),
    "top_p": (0.9, (), {"top_p": 0.7}),
    "min_p": (1.2, (), {"min_p": 0.15}),
    "all three": (1.1, (), {"top_k": 4, "top_p": 0.9, "min_p": 0.1}),
    "repetition": (1.0, ("repetition",), {}),
    "presence": (0.8, ("presence",), {}),
    "bad words": (1.0, ("bad words",), {}),
    "by prefix": (1.0, ("by prefix",), {}),
    "everything": (0.9, ("presence", "by prefix"), {"top_k": 4, "top_p": 0.95}),
}


def truncated(scores: Tensor, top_k: float = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """Float64 distribution of `scores` (V): first the k likeliest, then the smallest set of them
    that reaches p together, then those at least min_p times as likely as the likeliest."""
    p = torch.softmax(scores.double(), dim=-1)
    if top_k:
        p = p * (p >= p.sort(descending=True).values[int(top_k) - 1])
    p = p / p.sum()
    before = torch.stack([p[p > one].sum() for one in p])
    p = p * (before < top_p)
    p = p * (p >= min_p * p.max())
    return p / p.sum()


@pytest.mark.parametrize("least", [1, 3])
@pytest.mark.parametrize("top_p", [0.1, 0.7, 0.99])
def test_top_p_of_a_large_vocabulary(top_p: float, least: int) -> None:
    """Peaked rows, whose set is small, and flat ones, whose set is most of the vocabulary."""
    warmth = torch.tensor([0.1, 0.5, 2.0, 50.0])[:, None]
    scores = torch.randn(4, 3000, generator=torch.Generator().manual_seed(0)) * 3 / warmth
    found = nucleus(TopPLogitsWarper(top_p, min_tokens_to_keep=least), scores)
    for row, out in zip(scores, found, strict=True):
        wanted = truncated(row, top_p=top_p) > 0
        wanted[row.topk(least).indices] = True
        assert out.isfinite().equal(wanted)
        assert out[wanted].equal(row[wanted])


def exact_joint(target: TableTarget, setting: str, num_tokens: int) -> Tensor:
    """Probabilities of the tokens after PAIR, prefix by prefix."""
    temperature, names, truncations = SETTINGS[setting]
    processors, joint = listed(*names), torch.zeros((SMALL,) * num_tokens, dtype=torch.float64)

    @functools.cache
    def following(tail: tuple[int, ...]) -> Tensor:
        text = torch.tensor([[*PAIR[0].tolist(), *tail]])
        scores = target.table[text[0, -2], text[0, -1]][None].clone()
        return truncated(processors(text, scores)[0] / temperature, **truncations)

    for tail in itertools.product(range(SMALL), repeat=num_tokens):
        chance = 1.0
        for place, token in enumerate(tail):
            chance *= float(following(tail[:place])[token]) if chance > 0 else 0.0
        joint[tail] = chance
    return joint


def sampled(setting: str, quality: Any, count: int, num_tokens: int = 3) -> float:
    """p-value of so many runs against the exact joint distribution."""
    temperature, names, truncations = SETTINGS[setting]
    target = TableTarget(SMALL, seed=2, scale=1.2)
    drafter = TableDrafter(quality(target, BLOCK, SMALL))
    samples = []
    for seed in range(count):
        out = spec_generate(
            drafter, target, PAIR, num_tokens, temperature, seed=seed, stop_token_ids=[],
            logits_processor=listed(*names) if names else None, **truncations,
        )  # fmt: skip
        samples.append(out.sequences[0, 2:].tolist())
    counts = joint_counts(samples, SMALL)
    return p_value(counts, exact_joint(target, setting, num_tokens))


@pytest.mark.parametrize("quality", [reasonable, wrong])
@pytest.mark.parametrize("setting", SETTINGS)
def test_sampled_text_has_the_processed_targets_joint_distribution(
    setting: str, quality: Any
) -> None:
    value = sampled(setting, quality, COUNT)
    assert value > 1e-3, value


def test_a_smallest_number_of_tokens_when_sampling() -> None:
    target = TableTarget(SMALL, seed=2, scale=1.2)
    drafter = TableDrafter(reasonable(target, BLOCK, SMALL))
    ends = []
    for seed in range(200):
        processor = MinNewTokensLengthLogitsProcessor(2, 3, torch.tensor([1, 4]))
        out = spec_generate(
            drafter, target, PAIR, 8, 1.0, seed=seed, stop_token_ids=[1, 4],
            logits_processor=LogitsProcessorList([processor]),
        )  # fmt: skip
        text = out.sequences[0, 2:].tolist()
        assert not {1, 4} & set(text[:3])
        ends.append(len(text))
    assert min(ends) == 4 < max(ends)


class TestTheTestRejects:
    """Each wrong rule is one that an implementation could plausibly have."""

    def test_a_residual_of_unprocessed_drafts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        honest = Sampler.propose

        def propose(self: Any, logits: Tensor, position: int) -> tuple[list[int], Tensor]:
            drafts, _ = honest(self, logits, position)
            return drafts, self._probabilities(logits)

        monkeypatch.setattr(Sampler, "propose", propose)
        assert sampled("by prefix", reasonable, COUNT) < 1e-6

    def test_processors_that_do_not_see_the_drafts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        honest = Sampler._processed
        monkeypatch.setattr(
            Sampler, "_processed", lambda self, logits, drafts: honest(self, logits, [])
        )
        assert sampled("by prefix", reasonable, COUNT) < 1e-6

    def test_processors_on_the_drafts_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def bare(self: Any, drafts: Sequence[int], logits: Tensor) -> Callable[[int], Tensor]:
            return lambda slot: self._probabilities(logits[slot])

        monkeypatch.setattr(Sampler, "_target_probabilities", bare)
        assert sampled("presence", reasonable, COUNT) < 1e-6

    def test_truncations_before_the_temperature(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(SETTINGS, "exact", (1.2, (), {"top_p": 0.7}))
        target = TableTarget(SMALL, seed=2, scale=1.2)
        monkeypatch.setitem(SETTINGS, "other", (0.5, (), {"top_p": 0.7}))
        exact, other = (exact_joint(target, name, 2) for name in ("exact", "other"))
        counts = (other * COUNT).round()
        assert p_value(counts, exact) < 1e-6
