"""Text ends where `generate` ends it under the same criteria, also in the middle of a block."""

import functools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import toys
from support.oracle import alone, oracle, together
from support.toys import greedy, hook_count, prompt, text_of
from support.words import tokenizer
from torch import Tensor
from transformers import (
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

LENGTH, NUM_TOKENS, BLOCK = 11, 20, 3


@functools.cache
def target() -> Any:
    return toys.llama()


@functools.cache
def text() -> list[int]:
    return greedy(target(), prompt(LENGTH), NUM_TOKENS)


def knowing() -> Any:
    """Every draft is accepted: token 0 is the prefill's, blocks are 1-4, 5-8, 9-12."""
    return toys.scripted({LENGTH + i: token for i, token in enumerate(text())}, block_size=BLOCK)


class AtLength(StoppingCriteria):
    """Ends at a length, and remembers what it saw."""

    def __init__(self, length: int) -> None:
        self.length, self.seen = length, []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.seen.append(input_ids.tolist())
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length)


class Bool(StoppingCriteria):
    """Ends once the sum of the text is a multiple of a number; says so with a plain bool."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        return int(input_ids.sum()) % self.number == 0


class Multiple(Bool):
    """The same in the form that `generate` asks for."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return input_ids.sum(dim=1) % self.number == 0


def plain(criteria: Any, ids: Tensor, **arguments: Any) -> list[int]:
    """What `generate` gives."""
    out = target().generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_TOKENS,
        stopping_criteria=criteria, pad_token_id=0, **arguments,
    )  # fmt: skip
    new: list[int] = out[0, ids.shape[1] :].tolist()
    return new


def check(make: Callable[[], Any], **arguments: Any) -> list[int]:
    """Check that drafters good and bad end where `generate` does; returns the text."""
    ids = prompt(LENGTH)
    expected = plain(StoppingCriteriaList([make()]), ids, **arguments)
    for drafter in (knowing(), toys.drafter()):
        out = drafter.spec_generate(
            target(),
            ids,
            max_new_tokens=NUM_TOKENS,
            stopping_criteria=StoppingCriteriaList([make()]),
        )
        assert text_of(out, ids) == expected
        assert sum(out.acceptance_lengths) + 1 >= len(expected)
    return expected


@pytest.mark.parametrize("count", range(1, 11))
def test_a_criterion_that_fires_at_each_place_of_a_block(count: int) -> None:
    assert check(lambda: AtLength(LENGTH + count)) == text()[:count]
    assert check(lambda: MaxLengthCriteria(LENGTH + count)) == text()[:count]


@pytest.mark.parametrize("number", [3, 5, 7, 11])
def test_a_criterion_of_the_whole_text(number: int) -> None:
    expected = check(lambda: Multiple(number))
    ids = prompt(LENGTH)
    out = knowing().spec_generate(target(), ids, NUM_TOKENS, stopping_criteria=[Bool(number)])
    assert text_of(out, ids) == expected


def test_a_criterion_sees_every_prefix_once_and_none_beyond_the_end() -> None:
    criterion, ids = AtLength(LENGTH + 7), prompt(LENGTH)
    knowing().spec_generate(target(), ids, NUM_TOKENS, stopping_criteria=[criterion])
    expected = [[ids[0].tolist() + text()[: count + 1]] for count in range(7)]
    assert criterion.seen == expected


def test_a_cut_round_is_counted_as_far_as_the_cut() -> None:
    ids = prompt(LENGTH)
    out = knowing().spec_generate(
        target(), ids, NUM_TOKENS, stopping_criteria=[AtLength(LENGTH + 7)]
    )
    assert out.acceptance_lengths == [4, 2]
    assert out.num_new_tokens == 7


def test_any_of_several_criteria_and_stop_tokens_ends_the_text() -> None:
    ids = prompt(LENGTH)
    for token, count, length in ((text()[6], 9, 7), (text()[8], 3, 3)):
        end = min(length, text().index(token) + 1)
        out = knowing().spec_generate(
            target(), ids, NUM_TOKENS, stop_token_ids=token,
            stopping_criteria=[AtLength(LENGTH + 15), AtLength(LENGTH + count)],
        )  # fmt: skip
        assert text_of(out, ids) == text()[:end]


@pytest.mark.parametrize("kind", ["int", "list", "tensor", "model"])
def test_end_tokens_are_generates(kind: str) -> None:
    ids, eos, own = prompt(LENGTH), text()[6], toys.llama()
    stop: Any = {"int": eos, "list": [60, eos], "tensor": torch.tensor([eos]), "model": None}[kind]
    given = {"eos_token_id": [60, eos] if kind == "list" else eos}
    if kind == "model":
        own.generation_config.eos_token_id = eos
    expected = plain(None, ids, **given)
    for drafter in (knowing(), toys.drafter()):
        out = drafter.spec_generate(own, ids, NUM_TOKENS, stop_token_ids=stop)
        assert text_of(out, ids) == expected


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_every_row_of_a_batch_has_its_own_end(temperature: float) -> None:
    prompts, seeds = [prompt(n, seed=n) for n in (2, 9, 5)], [2, 3, 4]
    drafter = oracle(BLOCK)
    for seed, ids in zip(seeds, prompts, strict=True):
        drafter.texts[seed] = ids[0].tolist() + greedy(target(), ids, NUM_TOKENS)
    for makes in ([lambda: Multiple(7)], [lambda: AtLength(13), lambda: Multiple(11)]):
        arguments: dict[str, Any] = {"max_new_tokens": NUM_TOKENS, "temperature": temperature}
        criteria = StoppingCriteriaList([make() for make in makes])
        found = together(
            drafter, target(), prompts, seeds, "left", stopping_criteria=criteria, **arguments
        )
        assert found == alone(
            drafter, target(), prompts, seeds, stopping_criteria=criteria, **arguments
        )
        assert len({row[2] for row in found}) > 1
        if not temperature:
            assert [row[0] for row in found] == [plain(criteria, ids) for ids in prompts]


def test_sampled_text_is_cut_and_not_changed() -> None:
    ids = prompt(LENGTH)
    ends = set()
    for seed in range(8):
        arguments: dict[str, Any] = {"temperature": 0.8, "seed": seed, "max_new_tokens": NUM_TOKENS}
        free = text_of(knowing().spec_generate(target(), ids, **arguments), ids)
        out = knowing().spec_generate(target(), ids, stopping_criteria=[Bool(6)], **arguments)
        sums = [(int(ids.sum()) + sum(free[: end + 1])) % 6 for end in range(NUM_TOKENS)]
        end = next((place for place, rest in enumerate(sums) if rest == 0), NUM_TOKENS - 1)
        assert text_of(out, ids) == free[: end + 1]
        ends.add(end)
    assert len(ends) > 3


class TestTime:
    def test_no_time_left_is_one_token(self) -> None:
        criteria = StoppingCriteriaList([MaxTimeCriteria(1.0, time.time() - 5.0)])
        ids = prompt(LENGTH)
        out = knowing().spec_generate(target(), ids, NUM_TOKENS, stopping_criteria=criteria)
        assert text_of(out, ids) == text()[:1] == plain(criteria, ids)

    def test_time_enough_changes_nothing(self) -> None:
        criteria, ids = StoppingCriteriaList([MaxTimeCriteria(1e6)]), prompt(LENGTH)
        out = knowing().spec_generate(target(), ids, NUM_TOKENS, stopping_criteria=criteria)
        assert text_of(out, ids) == text()

    def test_time_that_runs_out_ends_all_rows(self) -> None:
        criterion = MaxTimeCriteria(0.3)
        prompts = [prompt(n, seed=n) for n in (2, 9)]
        found = together(
            toys.drafter(), target(), prompts, 1, "left", max_new_tokens=480,
            stopping_criteria=[criterion],
        )  # fmt: skip
        assert all(0 < row[2] < 480 for row in found)


@pytest.mark.parametrize("place", range(1, 10))
def test_stop_strings_end_the_text_where_generate_does(place: int) -> None:
    words = tokenizer()
    spelled = "".join(words.convert_ids_to_tokens(text()))
    stop = spelled[2 * place - 1 : 2 * place + 2]  # from the middle of one token to that of another
    expected = check(lambda: StopStringCriteria(words, [stop, "zz"]))
    assert stop in "".join(words.convert_ids_to_tokens(expected))
    assert len(expected) <= place + 1


def test_a_criterion_that_fails_leaves_no_hooks() -> None:
    class Fails(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            if input_ids.shape[1] > LENGTH + 4:
                raise KeyError("lost")
            return torch.zeros(1, dtype=torch.bool)

    with pytest.raises(KeyError, match="lost"):
        toys.drafter().spec_generate(
            target(), prompt(LENGTH), NUM_TOKENS, stopping_criteria=[Fails()]
        )
    assert hook_count(target()) == 0


class TestConveniences:
    """`max_time` and `stop_strings` are the criteria of these names."""

    @pytest.mark.parametrize("place", [1, 4, 9])
    def test_stop_strings(self, place: int) -> None:
        words, ids = tokenizer(), prompt(LENGTH)
        stop = "".join(words.convert_ids_to_tokens(text()))[2 * place - 1 : 2 * place + 2]
        expected = plain(None, ids, stop_strings=["zz", stop], tokenizer=words)
        assert len(expected) <= place + 1
        given = {"stop_strings": ["zz", stop], "tokenizer": words}
        for drafter in (knowing(), toys.drafter()):
            out = drafter.spec_generate(target(), ids, NUM_TOKENS, **given)
            assert text_of(out, ids) == expected
        given["stop_strings"] = stop
        rounds = knowing().stream_generate(target(), ids, NUM_TOKENS, **given)
        assert [token for one in rounds for token in one.tokens] == expected

    def test_max_time(self) -> None:
        ids = prompt(LENGTH)
        out = knowing().spec_generate(target(), ids, NUM_TOKENS, max_time=1e-9)
        assert text_of(out, ids) == text()[:1] == plain(None, ids, max_time=1e-9)
        out = knowing().spec_generate(target(), ids, NUM_TOKENS, max_time=1e6)
        assert text_of(out, ids) == text()
        (one,) = knowing().stream_generate(target(), ids, NUM_TOKENS, max_time=1e-9)
        assert one.tokens == text()[:1]

    def test_they_go_with_criteria(self) -> None:
        ids = prompt(LENGTH)
        out = knowing().spec_generate(
            target(), ids, NUM_TOKENS, max_time=1e6, stopping_criteria=[AtLength(LENGTH + 3)]
        )
        assert text_of(out, ids) == text()[:3]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"max_time": 0}, "max_time=0 is not valid: pass a number of seconds above 0"),
            ({"max_time": "x"}, "max_time='x' is not valid"),
            ({"stop_strings": "ab"}, "stop_strings='ab' needs the target's tokenizer"),
            ({"stop_strings": [], "tokenizer": "t"}, "stop_strings=[] is not valid"),
            ({"stop_strings": ["a", ""], "tokenizer": "t"}, "stop_strings=['a', ''] is not valid"),
            ({"stop_strings": [5], "tokenizer": "t"}, "stop_strings=[5] is not valid"),
        ],
    )
    def test_bad_ones_are_named(self, arguments: Any, message: str) -> None:
        for call in (toys.drafter().spec_generate, toys.drafter().stream_generate):
            with pytest.raises(ValueError) as caught:
                call(target(), prompt(LENGTH), NUM_TOKENS, **arguments)
            assert message in str(caught.value)

    def test_an_unknown_setting_is_named(self) -> None:
        with pytest.raises(TypeError, match="no setting topk"):
            toys.drafter().spec_generate(target(), prompt(LENGTH), topk=3)
