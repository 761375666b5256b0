"""`stream_generate` gives the text of `spec_generate` round by round, and leaves nothing behind."""

import gc
import time
from typing import Any

import pytest
import torch
from support import toys
from support.toys import greedy, hook_count, prompt, text_of

LENGTH, NUM_TOKENS = 11, 22


def half_right() -> Any:
    """A drafter that some rounds agree with in full, some in part, some not at all."""
    text = greedy(toys.llama(), prompt(LENGTH), NUM_TOKENS)
    script = {LENGTH + place: token for place, token in enumerate(text) if place % 5 != 3}
    return toys.scripted(script)


@pytest.mark.parametrize("stop", [[], 5])
@pytest.mark.parametrize("num_tokens", [1, 2, 4, NUM_TOKENS])
@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0])
def test_rounds_add_up_to_the_text(temperature: float, num_tokens: int, stop: Any) -> None:
    target, ids, drafter = toys.llama(), prompt(LENGTH), half_right()
    if stop:
        stop = greedy(target, ids, NUM_TOKENS)[stop]
    arguments: dict[str, Any] = {
        "max_new_tokens": num_tokens, "temperature": temperature, "seed": 3, "stop_token_ids": stop,
    }  # fmt: skip
    rounds = list(drafter.stream_generate(target, ids, **arguments))
    out = drafter.spec_generate(target, ids, **arguments)
    assert [token for one in rounds for token in one.tokens] == text_of(out, ids)
    assert len(rounds) == 1 + len(out.acceptance_lengths)
    assert (rounds[0].accepted, rounds[0].bonus) == (0, rounds[0].tokens[0])
    for one in rounds:
        assert len(one.tokens) == one.accepted + (one.bonus is not None)
        assert one.bonus is None or one.bonus == one.tokens[-1]
        assert one.seconds > 0.0
    for one, length in list(zip(rounds[1:], out.acceptance_lengths, strict=True))[:-1]:
        assert len(one.tokens) == length
        assert one.bonus is not None
    assert hook_count(target) == 0


def test_a_block_that_is_cut_has_no_bonus() -> None:
    target, ids = toys.llama(), prompt(LENGTH)
    text = greedy(target, ids, 8)
    drafter = toys.scripted({LENGTH + place: token for place, token in enumerate(text)})
    for arguments in ({"max_new_tokens": 3}, {"stop_token_ids": text[2], "max_new_tokens": 8}):
        *_, last = drafter.stream_generate(target, ids, **arguments)
        assert (last.tokens, last.accepted, last.bonus) == (text[1:3], 2, None)
    *_, last = drafter.stream_generate(target, ids, max_new_tokens=5)
    assert (last.tokens, last.accepted, last.bonus) == (text[1:5], 3, text[4])


def test_seconds_are_those_since_the_round_before() -> None:
    start = time.perf_counter()
    rounds = list(half_right().stream_generate(toys.llama(), prompt(LENGTH), NUM_TOKENS))
    assert sum(one.seconds for one in rounds) <= time.perf_counter() - start


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_k": 3}, "top_k"),
        ({"temperature": 1.0, "top_p": 2.0}, "top_p"),
        ({"num_steps": 9}, "num_steps"),
        ({"seed": "x"}, "seed"),
        ({"stop_token_ids": "x"}, "stop_token_ids"),
        ({"attention_mask": torch.ones(1, 2)}, "attention_mask"),
    ],
)
def test_arguments_are_checked_at_the_call(arguments: Any, named: str) -> None:
    target = toys.llama()
    with pytest.raises(ValueError, match=named):
        toys.drafter().stream_generate(target, prompt(LENGTH), **arguments)
    assert hook_count(target) == 0


def test_two_prompts_are_refused_at_the_call() -> None:
    with pytest.raises(ValueError, match="input_ids holds 2"):
        toys.drafter().stream_generate(toys.llama(), prompt(LENGTH).expand(2, -1))


def test_nothing_runs_before_the_first_round_is_asked_for() -> None:
    target, passes = toys.llama(), []
    handle = target.lm_head.register_forward_hook(lambda *args: passes.append(1))
    rounds = toys.drafter().stream_generate(target, prompt(LENGTH), max_new_tokens=8)
    handle.remove()
    assert hook_count(target) == 0
    rounds.close()  # type: ignore[attr-defined]
    assert hook_count(target) == 0
    assert not passes


@pytest.mark.parametrize("num_rounds", [1, 3])
@pytest.mark.parametrize("way", ["close", "drop", "break"])
def test_hooks_come_off_when_the_reader_leaves(way: str, num_rounds: int) -> None:
    target = toys.llama()
    rounds: Any = toys.drafter().stream_generate(target, prompt(LENGTH), max_new_tokens=20)
    for _ in range(num_rounds):
        next(rounds)
    assert hook_count(target) > 0
    if way == "close":
        rounds.close()
        assert list(rounds) == []
    elif way == "drop":
        del rounds
        gc.collect()
    else:
        for _ in rounds:
            break
        del rounds
        gc.collect()
    assert hook_count(target) == 0
    ids = prompt(LENGTH)
    out = toys.drafter().spec_generate(target, ids, max_new_tokens=8)
    assert text_of(out, ids) == greedy(target, ids, 8)


@pytest.mark.parametrize("num_passes", [0, 1, 4])
def test_hooks_come_off_when_the_target_fails(num_passes: int) -> None:
    target, passes = toys.llama(), iter(range(num_passes))

    def fail(*args: Any) -> None:
        if next(passes, None) is None:
            raise RuntimeError("out of memory")

    handle = target.model.layers[-1].register_forward_hook(fail)
    found = []
    with pytest.raises(RuntimeError, match="out of memory"):
        for one in toys.drafter().stream_generate(target, prompt(LENGTH), max_new_tokens=20):
            found.append(one)
    handle.remove()
    assert len(found) == num_passes
    assert hook_count(target) == 0


def test_hooks_come_off_when_the_reader_throws() -> None:
    target = toys.llama()
    rounds: Any = toys.drafter().stream_generate(target, prompt(LENGTH), max_new_tokens=20)
    next(rounds)
    with pytest.raises(KeyboardInterrupt):
        rounds.throw(KeyboardInterrupt)
    assert hook_count(target) == 0


@pytest.mark.parametrize("mode", [True, False])
def test_the_readers_grad_mode_is_left_alone(mode: bool) -> None:
    target, drafter = toys.llama(), toys.drafter()
    with torch.set_grad_enabled(mode):
        rounds: Any = drafter.stream_generate(target, prompt(LENGTH), max_new_tokens=12)
        for _ in rounds:
            assert torch.is_grad_enabled() is mode
            weight = torch.ones(1, requires_grad=True)
            assert (weight * 2).requires_grad is mode
        assert torch.is_grad_enabled() is mode
        rounds = drafter.stream_generate(target, prompt(LENGTH), max_new_tokens=12)
        next(rounds)
        rounds.close()
        assert torch.is_grad_enabled() is mode
    assert all(weight.grad is None for weight in target.parameters())


def test_a_reader_that_changes_the_grad_mode_keeps_its_choice() -> None:
    rounds: Any = toys.drafter().stream_generate(toys.llama(), prompt(LENGTH), max_new_tokens=12)
    next(rounds)
    with torch.no_grad():
        next(rounds)
        assert not torch.is_grad_enabled()
    next(rounds)
    assert torch.is_grad_enabled()


def test_two_streams_of_one_target_do_not_disturb_each_other() -> None:
    target, drafter = toys.llama(), half_right()
    prompts = [prompt(LENGTH), prompt(7, seed=4)]
    streams = [drafter.stream_generate(target, ids, max_new_tokens=12) for ids in prompts]
    texts: list[list[int]] = [[], []]
    for _ in range(13):  # the last one ends them
        for text, stream in zip(texts, streams, strict=True):
            one = next(stream, None)
            text += one.tokens if one else []
    assert texts == [greedy(target, ids, 12) for ids in prompts]
    assert hook_count(target) == 0


def test_a_padded_prompt_streams_as_it_is_without() -> None:
    target, ids = toys.llama(), prompt(LENGTH)
    padded = torch.cat((torch.zeros(1, 4, dtype=torch.long), ids), dim=1)
    mask = (torch.arange(LENGTH + 4) >= 4).long()[None]
    rounds = toys.drafter().stream_generate(target, padded, 9, attention_mask=mask)
    assert [token for one in rounds for token in one.tokens] == greedy(target, ids, 9)
