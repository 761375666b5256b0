"""Answers in batches are the target's own: greedy ones token by token, sampled ones in
distribution."""

from typing import Any

import pytest
import torch
import transformers
from support import toys
from support.chi_square import joint_counts, p_value
from torch import Tensor

from flashmap.training.attention import CAUSAL, GROUPED, attention, is_plain
from flashmap.training.generation import (
    BatchDecoder,
    GenerateDecoder,
    end_tokens,
    make_decoder,
)

END = 60  # seldom said by most of these targets
PROMPTS = [toys.prompt(length, seed)[0].tolist() for seed, length in enumerate((5, 1, 9, 3, 7))]
GREEDY = [0.0] * len(PROMPTS)
MAX_NEW = 20  # more than CHECK_EVERY, so that the look for finished answers is passed


def ended(target: Any, *stops: int) -> Any:
    """The target with these end tokens."""
    target.generation_config.eos_token_id = list(stops) if len(stops) > 1 else stops[0]
    target.generation_config.pad_token_id = 0
    return target


def mistral(**changes: Any) -> Any:
    """A target of which every layer sees the last 4 tokens only."""
    sizes = {**toys._SIZES, "sliding_window": 4, **changes}
    model = transformers.MistralForCausalLM(transformers.MistralConfig(**sizes))
    return toys.liven(model, 0)


@torch.no_grad()
def plain(target: Any, prompt: list[int], stops: set[int], limit: int = MAX_NEW) -> list[int]:
    """The greedy answer by one pass over the whole text a token, ended by an end token."""
    text = list(prompt)
    for _ in range(limit):
        text.append(int(target(torch.tensor([text])).logits[0, -1].argmax()))
        if text[-1] in stops:
            break
    return text[len(prompt) :]


@torch.no_grad()
def distribution(target: Any, prompt: list[int], temperature: float) -> Tensor:
    logits = target(torch.tensor([prompt])).logits[0, -1].double()
    return torch.softmax(logits / temperature, dim=-1)


FAMILIES: dict[str, Any] = {
    "grouped heads": toys.llama,
    "two groups": lambda: toys.llama(3, num_attention_heads=4, num_key_value_heads=2),
    "one key a head": lambda: toys.llama(4, num_key_value_heads=2),
    "qwen3": toys.qwen3,
}


@pytest.mark.parametrize("kind", [BatchDecoder, GenerateDecoder])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_answers_are_the_targets_prompt_by_prompt(family: str, kind: Any) -> None:
    target = ended(FAMILIES[family](), END)
    decoder = kind(target, len(PROMPTS) + 1, 10, MAX_NEW)  # one row stays empty
    answers = decoder.run(PROMPTS, GREEDY, seed=0)
    assert answers == [plain(target, prompt, {END}) for prompt in PROMPTS]
    longest = max(range(len(PROMPTS)), key=lambda row: len(answers[row]))
    if len(answers[longest]) == MAX_NEW:
        ids = torch.tensor([PROMPTS[longest]])
        assert answers[longest] == toys.greedy(target, ids, MAX_NEW)
    assert decoder.run(PROMPTS[2:], GREEDY[2:], seed=0) == answers[2:]  # nothing is left behind


@pytest.mark.parametrize("make", [toys.gemma2, toys.gemma3, mistral])
def test_targets_with_windows_are_answered_by_transformers(make: Any) -> None:
    target = ended(make(), END)
    decoder = make_decoder(target, 8, 10, MAX_NEW)
    assert isinstance(decoder, GenerateDecoder)
    answers = decoder.run(PROMPTS, GREEDY, seed=0)
    assert answers == [plain(target, prompt, {END}) for prompt in PROMPTS]


def test_plain_targets_are_answered_by_the_batch_decoder() -> None:
    assert isinstance(make_decoder(ended(toys.llama(), END), 4, 10, 5), BatchDecoder)


@pytest.mark.parametrize("kind", [BatchDecoder, GenerateDecoder])
def test_answers_end_with_the_first_end_token(kind: Any) -> None:
    free = [plain(toys.llama(), prompt, set()) for prompt in PROMPTS]
    stops = {free[0][3], free[1][6]}
    target = ended(toys.llama(), *stops)
    answers = kind(target, 5, 10, MAX_NEW).run(PROMPTS, GREEDY, seed=0)
    for answer, whole in zip(answers, free, strict=True):
        places = [place for place, token in enumerate(whole) if token in stops]
        assert answer == (whole[: places[0] + 1] if places else whole)
    assert {len(answer) for answer in answers} > {len(answers[0])}


@pytest.mark.parametrize("kind", [BatchDecoder, GenerateDecoder])
def test_fewer_new_tokens_than_the_decoder_was_made_for(kind: Any) -> None:
    decoder = kind(ended(toys.llama(), END), 5, 10, MAX_NEW)
    whole = decoder.run(PROMPTS, GREEDY, seed=0)
    for limit in (1, 2, 7):
        assert decoder.run(PROMPTS, GREEDY, seed=0, max_new=limit) == [a[:limit] for a in whole]
    assert decoder.run(PROMPTS, GREEDY, seed=0, max_new=99) == whole


@pytest.mark.parametrize("kind", [BatchDecoder, GenerateDecoder])
def test_the_targets_own_sampling_settings_change_nothing(kind: Any) -> None:
    target = ended(toys.llama(), END)
    wanted = [plain(target, prompt, {END}) for prompt in PROMPTS]
    target.generation_config.repetition_penalty = 3.0
    target.generation_config.no_repeat_ngram_size = 1
    target.generation_config.do_sample = True
    target.generation_config.temperature = 0.3
    target.generation_config.top_k = 2
    target.generation_config.top_p = 0.5
    assert kind(target, 5, 10, MAX_NEW).run(PROMPTS, GREEDY, seed=0) == wanted
    tiny = small()
    tiny.generation_config.top_k = 2
    tiny.generation_config.top_p = 0.5
    tiny.generation_config.repetition_penalty = 3.0
    tiny.generation_config.temperature = 0.3
    answers = kind(tiny, 3000, 3, 1).run([[4, 2]] * 3000, [1.0] * 3000, seed=1)
    counts = joint_counts(answers, 11)
    assert p_value(counts, distribution(tiny, [4, 2], 1.0)) > 0.001


# Sampling


def small() -> Any:
    """A target with 11 tokens whose next token is uncertain."""
    target = ended(toys.llama(2, vocab_size=11), 10)
    with torch.no_grad():
        target.lm_head.weight.mul_(0.5)
        target.lm_head.weight[10] = 0.0
    return target


@pytest.mark.parametrize("kind", [BatchDecoder, GenerateDecoder])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_tokens_have_the_targets_distribution(temperature: float, kind: Any) -> None:
    target, count, prompt = small(), 4000, [4, 2, 9]
    answers = kind(target, count, 5, 2).run([prompt] * count, [temperature] * count, seed=1)
    first = distribution(target, prompt, temperature)
    assert p_value(joint_counts([[a[0]] for a in answers], 11), first) > 0.001
    pairs = [answer for answer in answers if answer[0] != 10]  # others ended
    second = [distribution(target, [*prompt, token], temperature) for token in range(10)]
    joint = torch.zeros(11, 11, dtype=torch.float64)
    joint[:10] = first[:10, None] * torch.stack(second)
    assert p_value(joint_counts(pairs, 11), joint / joint.sum()) > 0.001


@pytest.mark.parametrize("kind", [BatchDecoder, GenerateDecoder])
@pytest.mark.parametrize("temperature", [1.0, 1.5])
def test_tokens_below_the_floor_are_never_sampled(temperature: float, kind: Any) -> None:
    target, count, prompt, floor = small(), 4000, [4, 2, 9], 0.3
    decoder = kind(target, count, 5, 1)
    answers = decoder.run([prompt] * count, [temperature] * count, seed=2, min_p=floor)
    p = distribution(target, prompt, temperature)
    kept = torch.where(p >= floor * p.max(), p, 0.0)
    assert 2 <= int((kept > 0).sum()) < 11
    assert p_value(joint_counts(answers, 11), kept / kept.sum()) > 0.001


def test_the_floor_of_one_call_does_not_outlast_it() -> None:
    target, count, prompt = small(), 2000, [4, 2, 9]
    decoder = BatchDecoder(target, count, 5, 1)
    decoder.run([prompt] * count, [1.0] * count, seed=2, min_p=0.9)
    answers = decoder.run([prompt] * count, [1.0] * count, seed=3)
    assert p_value(joint_counts(answers, 11), distribution(target, prompt, 1.0)) > 0.001


@pytest.mark.parametrize("kind", [BatchDecoder, GenerateDecoder])
def test_seeds_repeat_answers_and_cold_rows_stay_greedy_among_hot_ones(kind: Any) -> None:
    decoder = kind(ended(toys.llama(), END), 5, 10, MAX_NEW)
    temperatures = [0.0, 1.0, 0.0, 3.0, 1.0]
    first = decoder.run(PROMPTS, temperatures, seed=4)
    assert decoder.run(PROMPTS, temperatures, seed=4) == first
    other = decoder.run(PROMPTS, temperatures, seed=5)
    assert other != first
    for row in (0, 2):
        assert first[row] == other[row] == plain(decoder.target, PROMPTS[row], {END})


def test_no_end_token_is_an_error() -> None:
    target = toys.llama()
    target.generation_config.eos_token_id = None
    with pytest.raises(ValueError, match="eos_token_id"):
        end_tokens(target)
    assert end_tokens(ended(target, 5)) == [5]
    assert end_tokens(ended(target, 5, 6)) == [5, 6]


# Attention


@pytest.mark.parametrize("name", [CAUSAL, GROUPED])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_other_ways_to_attend_give_what_sdpa_gives(family: str, name: str) -> None:
    target, ids = FAMILIES[family](), torch.cat([toys.prompt(13, seed) for seed in range(2)])
    wanted = target(ids, use_cache=False).logits
    with attention(target, name):
        assert target.config._attn_implementation == name
        found = target(ids, use_cache=False).logits
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert target.config._attn_implementation == "sdpa"


def test_only_targets_that_see_everything_by_sdpa_are_plain() -> None:
    assert all(is_plain(make()) for make in FAMILIES.values())
    assert not any(is_plain(make()) for make in (toys.gemma2, toys.gemma3, mistral))
    assert not is_plain(toys.llama(attn_implementation="eager"))
    assert is_plain(mistral(sliding_window=None))


def test_targets_that_are_not_plain_keep_their_attention() -> None:
    target = mistral()
    before = target.config._attn_implementation
    with attention(target, CAUSAL):
        assert target.config._attn_implementation == before


def test_the_targets_attention_is_put_back_after_an_error() -> None:
    target = toys.llama()
    with pytest.raises(RuntimeError, match="midway"), attention(target, CAUSAL):
        raise RuntimeError("midway")
    assert target.config._attn_implementation == "sdpa"
    wrong = BatchDecoder(ended(target, END), 2, 4, 3)
    with pytest.raises(RuntimeError):
        wrong.run([[1] * 5], [0.0], seed=0)  # longer than it was made for
    assert target.config._attn_implementation == "sdpa"
