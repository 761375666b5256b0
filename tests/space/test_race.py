"""The race: both sides decode what they should, in turns by their own clocks, and end when
asked."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support import pair_folders, toys
from support.space_pairs import Watched, toy_pair

import race as module
from race import (
    FLASHMAP,
    GPU_MOST_S,
    PLAIN,
    PROMPT_LIMIT,
    Parting,
    Settings,
    Side,
    Step,
    encode,
    frames,
    gpu_seconds,
    race,
    warm_up,
)

pytestmark = pytest.mark.skipif(not toys.IS_V5, reason="the Space pins transformers 5")

PROMPT = toys.prompt(9).tolist()[0]


def run(pair: Any, **settings: Any) -> tuple[dict[str, Side], list[Parting]]:
    sides: dict[str, Side] = {PLAIN: Side(), FLASHMAP: Side()}
    partings = []
    for event in race(pair, PROMPT, Settings(**settings)):
        if isinstance(event, Parting):
            partings.append(event)
        else:
            sides[event.side].add(event)
    return sides, partings


@pytest.mark.parametrize("num_tokens", [1, 2, 17])
def test_greedy_texts_are_the_targets_own(num_tokens: int) -> None:
    text = toys.greedy(toy_pair().target, torch.tensor([PROMPT]), num_tokens)
    places = {len(PROMPT) + place: token for place, token in enumerate(text) if place % 4 != 3}
    pair = toy_pair(toys.scripted(places, vocab_size=pair_folders.ROWS))
    sides, partings = run(pair, max_new_tokens=num_tokens)
    assert sides[PLAIN].tokens == sides[FLASHMAP].tokens == text
    assert not partings
    assert len(sides[PLAIN].steps) == num_tokens
    assert len(sides[FLASHMAP].steps) <= num_tokens - num_tokens // 3
    ours = sides[FLASHMAP]
    assert ours.acceptance_length == (len(text) - 1) / max(len(ours.steps) - 1, 1)
    assert ours.rate == pytest.approx(num_tokens / sum(step.seconds for step in ours.steps))


def test_both_sides_end_after_a_stop_token() -> None:
    pair = toy_pair()
    text = toys.greedy(pair.target, torch.tensor([PROMPT]), 12)
    stop = next(token for place, token in enumerate(text) if place > 3)
    expected = text[: text.index(stop) + 1]
    for stops in (stop, [pair_folders.ROWS - 1, stop]):
        pair.target.generation_config.eos_token_id = stops
        sides, _ = run(pair, max_new_tokens=12)
        assert sides[PLAIN].tokens == sides[FLASHMAP].tokens == expected


def test_plain_sampling_draws_from_the_targets_distribution() -> None:
    pair, num_draws = toy_pair(), 600
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        expected = (pair.target(ids).logits[0, -1] / 0.7).softmax(dim=-1) * num_draws
    counts = torch.zeros_like(expected)
    for seed in range(num_draws):
        (((token,), _),) = module._plain(pair.target, ids, Settings(0, 0, 0.7, 1, seed))
        counts[token] += 1
    large = expected >= 5
    pairs = zip(
        [*counts[large], counts[~large].sum()], [*expected[large], expected[~large].sum()],
        strict=True,
    )  # fmt: skip
    statistic = float(sum((seen - due) ** 2 / due for seen, due in pairs))
    freedom = int(large.sum())
    assert freedom > 5
    p = float(torch.special.gammaincc(torch.tensor(freedom / 2), torch.tensor(statistic / 2)))
    assert p > 1e-3


def test_a_seed_repeats_a_sampled_race() -> None:
    pair, settings = toy_pair(), {"temperature": 1.0, "max_new_tokens": 24}
    texts = [
        {name: side.tokens for name, side in run(pair, seed=seed, **settings)[0].items()}
        for seed in (3, 3, 4)
    ]
    assert texts[0] == texts[1]
    assert all(texts[0][side] != texts[2][side] for side in (PLAIN, FLASHMAP))


def test_the_side_with_less_time_on_its_clock_goes_next(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def turns(seconds: list[float]) -> Iterator[tuple[list[int], int]]:
        for one in seconds:
            now[0] += one
            yield [7], 0

    class Draft:
        def stream_generate(self, *args: Any, **kwargs: Any) -> Any:
            return turns([3.0, 3.0, 5.0])

    monkeypatch.setattr(module, "_now", lambda device: now[0])
    monkeypatch.setattr(module, "_plain", lambda *args: turns([2.0] * 3))
    events = []
    for event in race(toy_pair(Draft()), PROMPT, Settings()):
        events.append(event)
        now[0] += 100.0  # what the page does between turns is on no clock
    # Clocks before each turn, FlashMap's first: 0 0, 3 0, 3 2, 3 4, 6 4, 6 6; then plain has ended.
    order = [FLASHMAP, PLAIN, PLAIN, FLASHMAP, PLAIN, FLASHMAP]
    assert [event.side for event in events] == order  # type: ignore[union-attr]
    assert [event.seconds for event in events] == [3.0, 2.0, 2.0, 3.0, 2.0, 5.0]  # type: ignore[union-attr]


@pytest.mark.parametrize("num_events", [1, 5])
def test_leaving_ends_the_work_of_both_sides(num_events: int) -> None:
    draft = Watched()
    pair = toy_pair(draft)
    events = race(pair, PROMPT, Settings(max_new_tokens=50))
    for _ in range(num_events):
        next(events)
    events.close()
    rounds = draft.rounds
    assert list(events) == []
    assert (draft.rounds, draft.closed) == (rounds, 1)
    assert toys.hook_count(pair.target) == 0


def test_an_error_of_a_round_comes_out_and_leaves_nothing_behind() -> None:
    pair = toy_pair(Watched(fail_at=2))
    with pytest.raises(RuntimeError, match="wires"):
        list(race(pair, PROMPT, Settings()))
    assert toys.hook_count(pair.target) == 0


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"num_steps": 9}, "num_steps"),
        ({"num_draws": 0}, "num_draws"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"temperature": -1.0}, "temperature"),
    ],
)
def test_settings_out_of_range_are_named(settings: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        list(race(toy_pair(), PROMPT, Settings(**settings)))


def drafter_that_says(text: list[int]) -> Any:
    """A drafter whose stream is this text, a token a round."""

    def turns() -> Iterator[tuple[list[int], int]]:
        yield from (([token], 0) for token in text)

    class Draft:
        def stream_generate(self, *args: Any, **kwargs: Any) -> Any:
            return turns()

    return Draft()


def test_texts_that_part_end_in_what_the_target_says_there() -> None:
    target, ids, place = toy_pair().target, torch.tensor([PROMPT]), 4
    text = toys.greedy(target, ids, 8)
    with torch.no_grad():
        logits = target(torch.tensor([PROMPT + text[:place]])).logits[0, -1].double()
    chances = logits.softmax(dim=-1)
    for rank in (1, 200):
        token = int(logits.argsort(descending=True)[rank])
        other = toy_pair(drafter_that_says([*text[:place], token, *text[place + 1 :]]))
        _, (parting,) = run(other, max_new_tokens=8)
        assert (parting.place, parting.tokens) == (place, (text[place], token))
        expected = [float(chances[text[place]]), float(chances[token])]
        assert parting.probabilities == pytest.approx(expected, rel=1e-4)
        gap = float(logits[text[place]] - logits[token])
        size = max(abs(float(logits[text[place]])), abs(float(logits[token])))
        # The distance to the next float32 is the spacing that rounding has there.
        spacing = math.ulp(size) * 2.0**29
        assert parting.rounding_steps == pytest.approx(gap / spacing, rel=1e-3)
        assert not parting.is_near_tie
    assert parting._replace(rounding_steps=3.9).is_near_tie


def test_a_process_warms_both_sides_up_once() -> None:
    draft = Watched()
    pair = toy_pair(draft)
    warm_up(pair, PROMPT)
    rounds = draft.rounds
    assert rounds > 0 and pair.is_warm
    warm_up(pair, PROMPT)
    assert draft.rounds == rounds


def test_a_prompt_is_a_turn_of_the_chat() -> None:
    pair = toy_pair()
    text = pair.tokenizer.decode(encode(pair, "Why? "))
    assert text == "<|user|>Why? <|assistant|>"
    pair.tokenizer.chat_template = None
    assert pair.tokenizer.decode(encode(pair, "Why? ")) == "Why? "


def test_prompts_that_are_refused() -> None:
    pair = toy_pair()
    with pytest.raises(ValueError, match="empty"):
        encode(pair, " \n")
    fits = "a" * (PROMPT_LIMIT - 2)  # a token a byte, and two for the turns
    assert len(encode(pair, fits)) == PROMPT_LIMIT
    with pytest.raises(ValueError, match="1,025 tokens, and this page takes 1,024"):
        encode(pair, fits + "a")


def test_gpu_time_scales_and_stays_legal() -> None:
    asked = [gpu_seconds(PROMPT, Settings(max_new_tokens=n)) for n in (16, 128, 256, 384, 10_000)]
    assert asked == sorted(asked) and asked[0] < asked[1] < asked[2]
    assert all(isinstance(one, int) and 0 < one <= 60 for one in asked)
    assert GPU_MOST_S <= 60  # what every visitor of ZeroGPU may ask for


def test_frames_bundle_events_and_lose_none(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [50.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])

    def events() -> Iterator[Step]:
        for number in range(7):
            yield Step(PLAIN, [number], 0, 0.1)
            now[0] += 0.1

    bundles = [[event.tokens[0] for event in bundle] for bundle in frames(events(), 0.25)]  # type: ignore[union-attr]
    assert bundles == [[0], [1, 2, 3], [4, 5, 6]]


def test_what_came_before_an_error_is_shown_before_it() -> None:
    def events() -> Iterator[Step]:
        yield from (Step(PLAIN, [number], 0, 0.1) for number in range(3))
        raise RuntimeError("the wires are crossed")

    seen: list[Any] = []
    with pytest.raises(RuntimeError, match="wires"):
        for bundle in frames(events(), 60.0):
            seen += bundle
    assert [event.tokens for event in seen] == [[0], [1], [2]]
