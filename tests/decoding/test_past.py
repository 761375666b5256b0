"""Caches that go from turn to turn: the text is that of a fresh run, only new tokens are run."""

from typing import Any

import pytest
import torch
from support import toys
from support.words import tokenizer
from torch import Tensor

from flashmap import FlashMapDraftModel


class Counter:
    """Counts the tokens that each forward pass of a target runs."""

    def __init__(self, target: Any) -> None:
        self.sizes: list[int] = []
        target.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, module: Any, args: Any, kwargs: Any) -> None:
        self.sizes.append(kwargs["input_ids"].shape[1])


def more(text: Tensor, count: int, seed: int) -> Tensor:
    """The text with a user's next tokens."""
    return torch.cat((text, toys.prompt(count, seed)), dim=1)


def turns(drafter: FlashMapDraftModel, target: Any, **arguments: Any) -> list[tuple[int, int, int]]:
    """Three turns, each compared with a fresh run: (tokens of the prompt, tokens that the caches
    held, tokens that the first pass ran)."""
    past, counter, text = drafter.new_past(), Counter(target), toys.prompt(9)
    found = []
    for turn in range(3):
        fresh = drafter.spec_generate(target, text, seed=turn, **arguments)
        held = past.length
        counter.sizes.clear()
        out = drafter.spec_generate(target, text, seed=turn, past=past, **arguments)
        assert out.sequences.equal(fresh.sequences)
        assert out.acceptance_lengths == fresh.acceptance_lengths
        found.append((text.shape[1], held, counter.sizes[0]))
        text = more(out.sequences, 4 + turn, seed=turn)
    return found


@pytest.mark.parametrize(
    "arguments",
    [
        {}, {"temperature": 0.8}, {"num_candidates": 4}, {"num_draws": 3, "temperature": 0.8},
        {"adaptive": True},
    ],
    ids=lambda arguments: "-".join(arguments) or "greedy",
)  # fmt: skip
def test_three_turns_are_those_of_fresh_runs(arguments: dict[str, Any]) -> None:
    for length, held, ran in turns(toys.drafter(), toys.llama(), max_new_tokens=12, **arguments):
        assert ran == length - min(held, length - 1)


@pytest.mark.parametrize("name", ["qwen3", "gpt2", "gemma2", "gemma3"])
def test_targets_of_other_families(name: str) -> None:
    target = getattr(toys, name)(**({"positions": 128} if name == "gpt2" else {}))
    drafter = toys.drafter()
    for length, held, ran in turns(drafter, target, max_new_tokens=12):
        assert ran in (length - held, length)  # windows start anew where they cannot go back


@pytest.mark.skipif(not toys.IS_V5, reason="recurrent layers need transformers 5")
@pytest.mark.parametrize("name", ["qwen3_next", "lfm2"])
def test_targets_with_recurrent_layers(name: str) -> None:
    turns(toys.drafter(), getattr(toys, name)(), max_new_tokens=8)


def test_a_prompt_that_turns_off_keeps_what_is_common() -> None:
    drafter, target = toys.drafter(), toys.llama()
    past, counter = drafter.new_past(), Counter(target)
    out = drafter.spec_generate(target, toys.prompt(10), 15, past=past)
    other = out.sequences[:, :14].clone()
    other[0, 13] = (other[0, 13] + 1) % toys.VOCAB
    for text, ran in ((other, 1), (toys.prompt(6, seed=5), 6), (toys.prompt(6, seed=5), 1)):
        counter.sizes.clear()
        again = drafter.spec_generate(target, text, 10, past=past)
        assert counter.sizes[0] == ran
        assert toys.text_of(again, text) == toys.greedy(target, text, 10)


def test_a_stop_in_the_middle_of_a_block_leaves_no_later_token() -> None:
    target, ids = toys.llama(), toys.prompt(6)
    right = toys.greedy(target, ids, 12)
    drafter = toys.scripted(dict(enumerate(right, ids.shape[1])), block_size=6)
    past = drafter.new_past()
    out = drafter.spec_generate(target, ids, 12, stop_token_ids=[right[3]], past=past)
    end = right.index(right[3])
    assert toys.text_of(out, ids) == right[: end + 1]
    text = more(out.sequences, 3, seed=9)
    drafter.script = {}
    again = drafter.spec_generate(target, text, 10, past=past)
    assert toys.text_of(again, text) == toys.greedy(target, text, 10)


@pytest.mark.parametrize("drafts", [{}, {"num_candidates": 3}, {"adaptive": (0.3, 0.02)}])
def test_a_stop_string_in_the_middle_of_a_block_leaves_no_later_token(
    drafts: dict[str, Any],
) -> None:
    target, ids, words = toys.llama(), toys.prompt(6), tokenizer()
    right = toys.greedy(target, ids, 12)
    drafter = toys.scripted(dict(enumerate(right, ids.shape[1])), block_size=6)
    stop = words.decode(right)[5:7]  # from the third token to the fourth
    end = next(n for n in range(13) if stop in words.decode(right[:n]))
    past, counter = drafter.new_past(), Counter(target)
    settings: dict[str, Any] = {"stop_strings": stop, "tokenizer": words, "past": past, **drafts}
    out = drafter.spec_generate(target, ids, 12, **settings)
    assert toys.text_of(out, ids) == right[:end]
    assert out.acceptance_lengths == [end - 1]  # one pass, which the string ends
    text = more(out.sequences, 3, seed=9)
    drafter.script = {}
    counter.sizes.clear()
    again = drafter.spec_generate(target, text, 10, past=past, **drafts)
    assert counter.sizes[0] <= 4
    assert toys.text_of(again, text) == toys.greedy(target, text, 10)


def test_a_call_that_fails_leaves_nothing() -> None:
    drafter, target, ids = toys.drafter(), toys.llama(), toys.prompt(6)
    past = drafter.new_past()
    drafter.spec_generate(target, ids, 6, past=past)
    assert past.length > 6

    def fail(module: Any, args: Any) -> None:
        raise KeyboardInterrupt

    handle = target.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        drafter.spec_generate(target, more(ids, 2, 0), 6, past=past)
    handle.remove()
    assert past.length == 0
    again = drafter.spec_generate(target, ids, 12, past=past)
    assert toys.text_of(again, ids) == toys.greedy(target, ids, 12)


def test_a_stream_that_is_left_can_be_gone_on_with() -> None:
    drafter, target, ids = toys.drafter(), toys.llama(), toys.prompt(6)
    past, counter = drafter.new_past(), Counter(target)
    rounds = drafter.stream_generate(target, ids, 20, past=past)
    tokens = next(rounds).tokens + next(rounds).tokens
    rounds.close()
    text = torch.cat((ids, torch.tensor([tokens])), dim=1)
    counter.sizes.clear()
    again = drafter.spec_generate(target, text, 10, past=past)
    assert counter.sizes[0] < 3
    assert toys.text_of(again, text) == toys.greedy(target, text, 10)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_rotary_embedding_that_changes_is_run_anew(kind: str) -> None:
    drafter, target, ids = toys.drafter(), toys.scaled_rope(kind, 24), toys.prompt(10)
    past = drafter.new_past()
    drafter.spec_generate(target, ids, 8, past=past)
    text = more(ids, 5 if kind == "dynamic" else 30, seed=1)
    out = drafter.spec_generate(target, text, 8, past=past)
    assert toys.text_of(out, text) == toys.greedy(target, text, 8)


@pytest.mark.parametrize("drafts", [{}, {"num_candidates": 3}, {"adaptive": (0.3, 0.02)}])
def test_turns_of_generate_run_only_what_is_new(drafts: dict[str, Any]) -> None:
    drafter, target, text = toys.drafter(), toys.llama(), toys.prompt(9)
    decoding = {"custom_generate": drafter.flashmap_decoding, "draft_model": drafter, **drafts}
    drafter.spec_generate(target, text, 1, **drafts)  # past the trial of trees
    past, counter = drafter.new_past(), Counter(target)
    for turn in range(3):
        pads = torch.zeros(1, turn, dtype=torch.long)  # on the left, as a tokenizer may pad
        inputs = {"input_ids": torch.cat((pads, text), dim=1)}
        inputs["attention_mask"] = torch.cat((pads, torch.ones_like(text)), dim=1)
        settings = {"max_new_tokens": 12, "pad_token_id": 0, "do_sample": False}
        plain = target.generate(**inputs, **settings)
        # A last round's drafts may go on beyond the text that is returned, and are kept.
        same = [old == new for old, new in zip(past.text, text[0].tolist(), strict=False)]
        held = [*same, False].index(False)
        assert held >= text.shape[1] - 5 or turn == 0
        counter.sizes.clear()
        found = target.generate(**inputs, **settings, **decoding, past=past)
        assert found.equal(plain)
        assert counter.sizes[0] == text.shape[1] - held
        assert past.length >= text.shape[1] + 11
        text = more(found[:, turn:], 4, seed=turn)


def test_what_a_past_is_not_for() -> None:
    drafter, target, ids = toys.drafter(), toys.llama(), toys.prompt(6)
    past = drafter.new_past()
    with pytest.raises(ValueError, match=r"past is a list, expected what .* new_past\(\) makes"):
        drafter.spec_generate(target, ids, past=[])
    with pytest.raises(ValueError, match="past holds one text, input_ids holds 2"):
        drafter.spec_generate(target, torch.cat((ids, ids)), past=past)
    drafter.spec_generate(target, ids, 6, past=past)
    with pytest.raises(ValueError, match=r"past holds \d+ tokens of another target .*new_past"):
        drafter.spec_generate(toys.llama(1), ids, 6, past=past)
    with pytest.raises(ValueError, match=r"past holds \d+ tokens of another drafter .*new_past"):
        toys.drafter(2).spec_generate(target, ids, 6, past=past)
