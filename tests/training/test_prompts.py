"""Training prompts: the count, the balance, the hold-out by topic, and the same list everywhere."""

import hashlib
import re
from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from flashmap.training import prompts as module
from flashmap.training.prompts import DOMAINS, Prompt, make_prompts

# What the hand-written parts hold at least; fewer would narrow what a drafter is trained on.
MIN_TOPICS, MIN_TEMPLATES, MIN_PASSAGES, MIN_TASKS, MIN_SNIPPETS = 600, 60, 60, 150, 40
MANY = 120_000
GOLDEN = "2551c0cde8d621d36bb1d970a2dff0770b21f71b18ad86170067acbc069fd6fb"
PASSAGE = "A bridge {x} of rope hangs over the gorge. It swings. Goats cross it without any fear."


@pytest.fixture(scope="module")
def many() -> list[Prompt]:
    return make_prompts(MANY, seed=1)


def test_the_first_thousand_are_the_same_everywhere() -> None:
    joined = "\0".join(prompt.text for prompt in make_prompts(1000, seed=0))
    assert hashlib.sha256(joined.encode()).hexdigest() == GOLDEN


def test_seeds_differ() -> None:
    assert make_prompts(60, seed=3) == make_prompts(60, seed=3)
    assert make_prompts(60, seed=3) != make_prompts(60, seed=4)


@pytest.mark.parametrize("count", [1, 5, 6, 7, 1000])
def test_the_count_is_exact_and_the_domains_are_even(count: int) -> None:
    prompts = make_prompts(count, seed=0)
    assert len(prompts) == count
    sizes = Counter(prompt.domain for prompt in prompts)
    per_domain = [sizes[domain] for domain in DOMAINS]
    assert sum(per_domain) == count
    assert max(per_domain) - min(per_domain) <= 1


def test_many_are_distinct(many: list[Prompt]) -> None:
    assert len({prompt.text for prompt in many}) == MANY
    assert Counter(prompt.domain for prompt in many) == dict.fromkeys(DOMAINS, MANY // 6)


def test_no_topic_is_on_both_sides(many: list[Prompt]) -> None:
    held_out = {prompt.topic for prompt in many if prompt.held_out}
    trained = {prompt.topic for prompt in many if not prompt.held_out}
    assert not held_out & trained
    other = {prompt.topic for prompt in make_prompts(6000, seed=9) if not prompt.held_out}
    assert not held_out & other, "the side depends on the topic alone"
    for domain in DOMAINS:
        assert any(prompt.held_out for prompt in many if prompt.domain == domain), domain


def test_the_held_out_share_is_about_what_was_asked_for(many: list[Prompt]) -> None:
    assert 0.01 < sum(prompt.held_out for prompt in many) / MANY < 0.03
    assert not any(prompt.held_out for prompt in make_prompts(600, seed=0, held_out_share=0))
    half = make_prompts(6000, seed=0, held_out_share=0.5)
    assert 0.3 < sum(prompt.held_out for prompt in half) / len(half) < 0.7


def test_no_slot_stays_empty(many: list[Prompt]) -> None:
    for prompt in many:
        assert prompt.text == prompt.text.strip() and prompt.topic
        outside_code = re.sub(r"```.*?```", "", prompt.text, flags=re.DOTALL)
        assert not set("{}") & set(outside_code), prompt


def test_every_slot_is_known() -> None:
    bank = module._load_bank()
    slots = {*bank.keys, *bank.style, *bank.numbers, *bank.snippets, "passage"}
    templates = [text for rows in bank.templates.values() for _, text in rows]
    for text in [*templates, *bank.passages]:
        for name in re.findall(r"\{(.*?)\}", text):
            assert re.sub(r"_\d$", "", name) in slots, text


def test_a_second_slot_of_a_kind_gets_another_value() -> None:
    bank = replace(module._load_bank(), keys={"sea": ["north", "south"]})
    writer = module._Writer(bank, Random(0), 0, ())
    for _ in range(20):
        text, abouts, first = writer._fill("{sea} is {sea}, not {sea_2}")
        assert text in ("North is north, not south", "South is south, not north")
        assert first == abouts[0] != abouts[1]


def test_the_parts_are_broad_enough() -> None:
    bank = module._load_bank()
    assert set(bank.templates) == set(DOMAINS) == set(bank.closers)
    for domain in DOMAINS:
        texts = [text for _, text in bank.templates[domain]]
        assert len(set(texts)) == len(texts) >= MIN_TEMPLATES, domain
    assert len(set(bank.keys["topic"])) == len(bank.keys["topic"]) >= MIN_TOPICS
    assert len(bank.keys["task"]) >= MIN_TASKS
    assert sum(map(len, bank.snippets.values())) >= MIN_SNIPPETS
    assert len(bank.passages) >= MIN_PASSAGES
    assert all(40 <= len(passage.split()) <= 120 for passage in bank.passages)


def test_the_callers_passages_are_used_as_they_are() -> None:
    prompts = make_prompts(3000, seed=0, passages=[f"  {PASSAGE}\n", " "])
    found = [prompt for prompt in prompts if PASSAGE in prompt.text]
    assert found
    assert {prompt.domain for prompt in found} == {"summaries"}
    assert "A bridge {x} of rope hangs over the" in {prompt.topic for prompt in found}


@pytest.mark.parametrize("count", [0, -3])
def test_a_count_below_one_is_an_error(count: int) -> None:
    with pytest.raises(ValueError, match=rf"count is {count}; ask for at least one"):
        make_prompts(count, seed=0)


@pytest.mark.parametrize("share", [-0.1, 1.0, 2.0, float("nan")])
def test_a_share_outside_the_range_is_an_error(share: float) -> None:
    with pytest.raises(ValueError, match=r"held_out_share is .*give a share"):
        make_prompts(6, seed=0, held_out_share=share)


def test_a_domain_that_runs_dry_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    bank = module._load_bank()
    templates = {**bank.templates, "facts": [("only", "Is {planet} large?")]}
    monkeypatch.setattr(module, "_load_bank", lambda: replace(bank, templates=templates))
    with pytest.raises(ValueError, match=r"10000 distinct prompts .*'facts', and \d+ were found"):
        make_prompts(60_000, seed=0)
