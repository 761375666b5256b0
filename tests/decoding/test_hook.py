"""`generate(custom_generate=flashmap_decoding)` gives what plain `generate` gives with the same
settings: tokens and scores.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from support import toys
from support.hooked import (
    LENGTH,
    NUM_TOKENS,
    batch,
    generate,
    hooked,
    knowing,
    single,
    target,
    text,
)
from support.oracle import padded
from support.toys import VOCAB, hook_count, prompt
from support.words import tokenizer
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteria,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

from flashmap.modeling.hook_flashmap import flashmap_decoding


class ByPrefix(LogitsProcessor):
    """Moves the scores along by what each whole row adds up to."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        places = torch.arange(1, input_ids.shape[1] + 1)
        bonus = torch.zeros_like(scores)
        for row, total in enumerate((input_ids * places).sum(dim=1).tolist()):
            bonus[row, total % 5 :: 5] = 3.0
        return scores + bonus


class ByRow(LogitsProcessor):
    """Has something for each row of the batch, as transformers' own processors may."""

    def __init__(self, num_rows: int) -> None:
        self.bonus = torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(1)) * 3

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + self.bonus


class Multiple(StoppingCriteria):
    """Ends a row once its sum is a multiple of a number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return input_ids.sum(dim=1) % self.number == 0


def allowed(row: int, ids: Tensor) -> list[int]:
    return list(range(row, VOCAB, 3)) if len(ids) % 2 else list(range(1, VOCAB, 2))


# Settings of `generate` by what they are; the greedy text is plain `generate`'s under each.
SETTINGS: dict[str, Callable[[], dict[str, Any]]] = {
    "nothing": dict,
    "length": lambda: {"max_length": 19},
    "criterion of length": lambda: {"stopping_criteria": [MaxLengthCriteria(15)]},
    "one beyond the length": lambda: {
        "stopping_criteria": [MaxLengthCriteria(15)], "max_new_tokens": 2
    },
    "no time": lambda: {"max_time": 1e-9},
    "one token": lambda: {"max_new_tokens": 1},
    "end tokens": lambda: {"eos_token_id": [60, text()[6]]},
    "repetition": lambda: {"repetition_penalty": 1.4},
    "no ngrams": lambda: {"no_repeat_ngram_size": 1},
    "prompt's tokens": lambda: {"encoder_repetition_penalty": 2.0},
    "prompt's ngrams": lambda: {"encoder_no_repeat_ngram_size": 1},
    "bad words": lambda: {"bad_words_ids": [[text()[1]], [text()[2], text()[3]]]},
    "at least": lambda: {"eos_token_id": text()[4], "min_new_tokens": 9},
    "at least in all": lambda: {"eos_token_id": text()[4], "min_length": 15},
    "forced end": lambda: {"forced_eos_token_id": 5},
    "suppressed": lambda: {"suppress_tokens": text()[2:4], "begin_suppress_tokens": text()[:1]},
    "bias": lambda: {"sequence_bias": [[[text()[5]], -9.0], [[text()[1], 7], 9.0]]},
    "length penalty": lambda: {
        "eos_token_id": 5, "exponential_decay_length_penalty": (4, 1.5),
    },
    "by row": lambda: {"prefix_allowed_tokens_fn": allowed},
    "processor": lambda: {"logits_processor": LogitsProcessorList([ByPrefix()])},
    "criteria": lambda: {"stopping_criteria": [Multiple(7)], "eos_token_id": 60},
    "configuration": lambda: {
        "generation_config": GenerationConfig(
            max_new_tokens=12, repetition_penalty=1.3, eos_token_id=text()[9], pad_token_id=0
        )
    },
    "several": lambda: {
        "repetition_penalty": 1.2, "bad_words_ids": [[text()[1]]], "eos_token_id": 11,
        "min_new_tokens": 3, "logits_processor": LogitsProcessorList([ByPrefix()]),
        "num_steps": 2, "num_draws": 2,
    },
    "tree": lambda: {"num_candidates": 3},
    "adaptive tree": lambda: {
        "num_candidates": "auto", "adaptive": (0.4, 0.1), "repetition_penalty": 1.2,
        "eos_token_id": 11,
    },
    "adaptive": lambda: {"adaptive": (0.4, 0.1), "num_draws": "auto", "bad_words_ids": [[5]]},
}  # fmt: skip
OURS = {"num_steps", "num_draws", "num_candidates", "adaptive"}


@pytest.mark.parametrize("inputs", [single, batch])
@pytest.mark.parametrize("setting", SETTINGS)
def test_greedy_text_is_plain_generates(setting: str, inputs: Any) -> None:
    given = SETTINGS[setting]()
    plain = generate(inputs(), **{name: given[name] for name in given if name not in OURS})
    assert hooked(inputs(), **SETTINGS[setting]()).equal(plain)
    if inputs is single:
        assert hooked(inputs(), knowing(plain[0]), **SETTINGS[setting]()).equal(plain)
        assert (plain[0, LENGTH:].tolist() == text()) == (setting in ("nothing", "tree"))
    assert hook_count(target()) == 0


@pytest.mark.parametrize("num_tokens", [1, 4, 5, 9])
def test_exactly_so_many_tokens(num_tokens: int) -> None:
    found = hooked(single(), knowing(generate(single())[0]), max_new_tokens=num_tokens)
    assert found[0, LENGTH:].tolist() == text()[:num_tokens]


@pytest.mark.parametrize("make", [toys.gemma2, toys.gpt2, toys.qwen3])
def test_other_targets_beyond_their_window(make: Any) -> None:
    ids, other = prompt(13), make()
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 9, "pad_token_id": 0}
    found = other.generate(
        ids, custom_generate=flashmap_decoding, draft_model=toys.drafter(), **settings
    )
    assert found.equal(other.generate(ids, **settings))


def test_padding_on_the_right_is_text_as_without() -> None:
    ids, mask = padded([prompt(n, seed=n) for n in (3, 9)], "right")
    found = hooked({"input_ids": ids, "attention_mask": mask})
    for row, length in enumerate((3, 9)):
        alone = generate({"input_ids": prompt(length, seed=length)})
        assert found[row, 9:].tolist() == alone[0, length:].tolist()


def test_processors_see_their_own_row() -> None:
    both = {"logits_processor": LogitsProcessorList([ByRow(3)]), "max_new_tokens": 9}
    assert hooked(batch(), **both).equal(generate(batch(), **both))


@pytest.mark.parametrize("inputs", [single, batch])
@pytest.mark.parametrize(
    "setting",
    ["end tokens", "several", "tree", "adaptive tree", "adaptive"],
)
@pytest.mark.parametrize("knows", [False, True])
def test_scores_and_logits_are_plain_generates(setting: str, inputs: Any, knows: bool) -> None:
    given, more = SETTINGS[setting](), {"return_dict_in_generate": True}
    more |= {"output_scores": True, "output_logits": True}
    plain = generate(inputs(), **{n: given[n] for n in given if n not in OURS}, **more)
    drafter = knowing(plain.sequences[0]) if knows else None
    found = hooked(inputs(), drafter, **SETTINGS[setting](), **more)
    assert type(found) is GenerateDecoderOnlyOutput
    assert found.sequences.equal(plain.sequences)
    ids = inputs()["input_ids"]
    new = found.sequences[:, ids.shape[1] :]
    ends = torch.tensor(given.get("eos_token_id", [-1]))
    over = torch.isin(new, ends).cumsum(dim=1) - torch.isin(new, ends).long() > 0
    for name in ("scores", "logits"):
        ours, theirs = found[name], plain[name]
        assert len(ours) == len(theirs) == new.shape[1]
        for step, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            running = ~over[:, step]
            assert one.dtype == torch.float32
            torch.testing.assert_close(one[running], other[running], atol=1e-4, rtol=1e-4)
            assert not one[~running].any()


@pytest.mark.parametrize("drafts", [{}, {"adaptive": (0.4, 0.1)}, {"num_draws": "auto"}])
def test_scores_of_sampled_tokens_are_those_that_a_pass_over_them_gives(
    drafts: dict[str, Any],
) -> None:
    settings = {"do_sample": True, "temperature": 0.8, "top_k": 9, "top_p": 0.95, "seed": 4}
    found = hooked(
        single(), **settings, **drafts, repetition_penalty=1.2, return_dict_in_generate=True,
        output_scores=True,
    )  # fmt: skip
    with torch.no_grad():
        logits = target()(found.sequences).logits[0, LENGTH - 1 : -1]
    listed = LogitsProcessorList([
        transformers.RepetitionPenaltyLogitsProcessor(1.2),
        transformers.TemperatureLogitsWarper(0.8),
        transformers.TopKLogitsWarper(9),
        transformers.TopPLogitsWarper(0.95),
    ])  # fmt: skip
    for step, one in enumerate(found.scores):
        expected = listed(found.sequences[:, : LENGTH + step], logits[step : step + 1])
        torch.testing.assert_close(one, expected, atol=1e-4, rtol=1e-4)
        assert one[0, found.sequences[0, LENGTH + step]] > float("-inf")


@pytest.mark.parametrize(
    ("drafts", "longest"), [({}, 9), ({"num_candidates": 2}, 17), ({"adaptive": (0.5, 2.0)}, 1)]
)
def test_passes_are_as_long_as_the_settings_say(drafts: dict[str, Any], longest: int) -> None:
    sizes: list[int] = []
    handle = target().register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    hooked(single(), toys.drafter(block_size=8), **drafts)
    handle.remove()
    assert max(sizes[-5:]) == longest  # before are the prompt, trials and drafts without luck


def test_without_scores_the_output_has_none() -> None:
    found = hooked(single(), return_dict_in_generate=True)
    assert found.scores is None
    assert found.logits is None
    assert found.sequences.equal(generate(single()))


def test_criteria_see_the_scores_if_they_are_kept() -> None:
    class Sure(StoppingCriteria):
        """Ends a row at its second token that is likelier than a bound."""

        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            best = torch.stack([torch.softmax(one, dim=-1).amax(-1) for one in scores])
            return (best > 0.3).sum(dim=0) >= 2

    more = {"stopping_criteria": [Sure()], "eos_token_id": 60, "output_scores": True}
    more["return_dict_in_generate"] = True
    for inputs in (single, batch):
        plain = generate(inputs(), **more).sequences
        assert hooked(inputs(), **more).sequences.equal(plain)
    assert plain.shape[1] < batch()["input_ids"].shape[1] + NUM_TOKENS


class TestSeeds:
    def test_a_seed_repeats_the_run_and_rows_have_their_own(self) -> None:
        sampled = {"do_sample": True, "top_k": 0}
        first = hooked(batch(), seed=3, **sampled)
        assert first.equal(hooked(batch(), seed=[3, 4, 5], **sampled))
        assert not first.equal(hooked(batch(), seed=4, **sampled))

    def test_torchs_own_seed_repeats_it_too(self) -> None:
        found = []
        for _ in range(2):
            torch.manual_seed(5)
            found.append(hooked(single(), do_sample=True, top_k=0))
        assert found[0].equal(found[1])
        assert not found[0].equal(hooked(single(), do_sample=True, top_k=0))

    def test_it_is_spec_generates_text(self) -> None:
        ids = prompt(LENGTH)
        out = toys.drafter().spec_generate(target(), ids, NUM_TOKENS, 0.8, seed=6, top_k=9)
        found = hooked(single(), do_sample=True, temperature=0.8, top_k=9, seed=6)
        assert found.equal(out.sequences)


class TestStopStrings:
    def test_with_a_bound_tokenizer(self) -> None:
        words = tokenizer()
        stop = "".join(words.convert_ids_to_tokens(text()))[9:12]
        plain = generate(single(), stop_strings=[stop], tokenizer=words)
        bound = functools.partial(flashmap_decoding, tokenizer=words)
        found = hooked(single(), stop_strings=stop, custom_generate=bound)
        assert found.equal(plain)
        assert found.shape[1] < LENGTH + NUM_TOKENS

    def test_without_one(self) -> None:
        with pytest.raises(ValueError, match="stop_strings='ab' needs the target's tokenizer"):
            hooked(single(), stop_strings="ab", tokenizer=tokenizer())


def test_the_drafter_carries_the_callable() -> None:
    drafter = toys.drafter()
    found = generate(single(), custom_generate=drafter.flashmap_decoding, draft_model=drafter)
    assert found[0, LENGTH:].tolist() == text()
