"""Text ends at the first stop token, wherever in a block, as if tokens came one at a time."""

import functools
from typing import Any

import pytest
import torch
from support import toys
from support.toys import greedy, prompt, text_of

BLOCK = 3
LENGTH = 11


@functools.cache
def target() -> Any:
    return toys.llama()


@functools.cache
def text() -> list[int]:
    found = greedy(target(), prompt(LENGTH), 2 * (BLOCK + 1) + 6)
    assert len(set(found[:9])) == 9, "the tests below need each of these tokens to be new"
    return found


def knowing() -> toys.Scripted:
    """A drafter whose every draft is accepted: token 0 is the prefill's, blocks are 1-4 and 5-8."""
    return toys.scripted({LENGTH + i: token for i, token in enumerate(text())}, block_size=BLOCK)


@pytest.mark.parametrize("index", range(2 * (BLOCK + 1) + 1))
def test_a_stop_token_at_each_index_of_a_block(index: int) -> None:
    ids = prompt(LENGTH)
    out = knowing().spec_generate(target(), ids, max_new_tokens=14, stop_token_ids=text()[index])
    assert text_of(out, ids) == text()[: index + 1]
    blocks, rest = divmod(index, BLOCK + 1)
    assert out.acceptance_lengths == [BLOCK + 1] * blocks + ([rest] if rest else [])
    assert sum(out.acceptance_lengths) + 1 == out.num_new_tokens


def test_the_first_of_several_stop_tokens_in_a_block_counts() -> None:
    ids = prompt(LENGTH)
    stops = [text()[4], text()[2], text()[3]]
    out = knowing().spec_generate(target(), ids, max_new_tokens=14, stop_token_ids=stops)
    assert text_of(out, ids) == text()[:3]


def test_a_block_that_stops_beyond_the_limit_is_cut_at_the_limit() -> None:
    ids = prompt(LENGTH)
    out = knowing().spec_generate(target(), ids, max_new_tokens=3, stop_token_ids=text()[3])
    assert text_of(out, ids) == text()[:3]
    assert out.acceptance_lengths == [3]  # counted after the stop, before the limit
    assert sum(out.acceptance_lengths) + 1 - out.num_new_tokens == 1


@pytest.mark.parametrize("kind", ["int", "list", "tuple", "model int", "model list"])
def test_a_drafter_that_proposes_text_beyond_the_end_token(kind: str) -> None:
    # The first block is [x, eos, y, z], and the target agrees with all of it.
    ids, eos = prompt(LENGTH), text()[2]
    own = toys.llama()
    if kind.startswith("model"):
        own.generation_config.eos_token_id = eos if kind == "model int" else [60, eos]
        stop = None
    else:
        stop = {"int": eos, "list": [eos], "tuple": (60, eos)}[kind]
    out = knowing().spec_generate(own, ids, max_new_tokens=14, stop_token_ids=stop)
    assert text_of(out, ids) == text()[:3]


@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_sampled_text_ends_at_its_first_stop_token(temperature: float) -> None:
    ids = prompt(LENGTH)
    stops = set(range(0, toys.VOCAB, 5))
    ended = 0
    for seed in range(16):
        arguments: dict[str, Any] = {"max_new_tokens": 14, "temperature": temperature}
        free = knowing().spec_generate(target(), ids, seed=seed, stop_token_ids=[], **arguments)
        free_text = text_of(free, ids)
        end = next((i for i, token in enumerate(free_text) if token in stops), 13)
        out = knowing().spec_generate(
            target(), ids, seed=seed, stop_token_ids=sorted(stops), **arguments
        )
        assert text_of(out, ids) == free_text[: end + 1]
        ended += end < 13
    assert ended > 5


def test_without_an_end_token_text_is_as_long_as_asked() -> None:
    assert target().generation_config.eos_token_id is None
    assert knowing().spec_generate(target(), prompt(LENGTH), max_new_tokens=14).num_new_tokens == 14


def test_an_empty_list_overrides_the_models_end_token() -> None:
    own = toys.llama()
    own.generation_config.eos_token_id = text()[2]
    out = knowing().spec_generate(own, prompt(LENGTH), max_new_tokens=9, stop_token_ids=[])
    assert out.num_new_tokens == 9


def test_the_output_dtype_and_device_are_the_prompts() -> None:
    ids = prompt(LENGTH).to(torch.int32)
    out = knowing().spec_generate(target(), ids, max_new_tokens=5)
    assert out.sequences.dtype == torch.int32
    assert out.sequences[0].tolist() == ids[0].tolist() + text()[:5]
