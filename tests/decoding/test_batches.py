"""A sequence in a batch is what it is alone: tokens, acceptance lengths and seed."""

import functools
import itertools
from typing import Any

import pytest
import torch
import transformers
from support import toys
from support.oracle import Seer, alone, oracle, padded, seen_texts, texts_of, together
from support.toys import greedy, hook_count, prompt

from flashmap.modeling import runner_flashmap
from flashmap.modeling.runner_flashmap import TargetRunner

LENGTHS = (9, 1, 17, 4)
SEEDS = [3, 10, 8, 6]
LONGEST = 130


def gemma(seed: int = 0) -> Any:
    """A Gemma target: scaled embedding, no windows."""
    config = transformers.GemmaConfig(**toys._sizes(head_dim=12))
    return toys.liven(transformers.GemmaForCausalLM(config), seed, embedding_std=0.1)


FAMILIES: dict[str, Any] = {
    "llama": toys.llama,
    "qwen3": toys.qwen3,
    "gpt2": lambda: toys.gpt2(positions=160),
    "gemma": gemma,
}


@functools.cache
def family(name: str) -> Any:
    return FAMILIES[name]()


@functools.cache
def plain(name: str, length: int, num_tokens: int = LONGEST) -> list[int]:
    return greedy(family(name), prompt(length, seed=length), num_tokens)


PROMPTS = [prompt(length, seed=length) for length in LENGTHS]


def knowing(name: str, block_size: int) -> Any:
    drafter = oracle(block_size)
    drafter.texts = {
        seed: ids[0].tolist() + plain(name, ids.shape[1])
        for seed, ids in zip(SEEDS, PROMPTS, strict=True)
    }
    return drafter


@pytest.mark.parametrize(("side", "num_steps"), [("left", 1), ("right", 2)])
@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_rows_are_what_they_are_alone(name: str, num_steps: int, side: str) -> None:
    drafter = knowing(name, 5)
    arguments = {"max_new_tokens": 32, "num_steps": num_steps}
    found = together(drafter, family(name), PROMPTS, SEEDS, side, **arguments)
    assert [row[0] for row in found] == [plain(name, length)[:32] for length in LENGTHS]
    assert found == alone(drafter, family(name), PROMPTS, SEEDS, **arguments)
    assert len({tuple(row[1]) for row in found}) == 4
    assert {1, 6} <= set(itertools.chain(*(row[1] for row in found)))


@pytest.mark.parametrize("num_tokens", range(1, 8))
def test_any_number_of_tokens(num_tokens: int) -> None:
    drafter = knowing("llama", 3)
    for side in ("left", "right"):
        found = together(drafter, family("llama"), PROMPTS, SEEDS, side, max_new_tokens=num_tokens)
        assert [row[0] for row in found] == [plain("llama", n)[:num_tokens] for n in LENGTHS]
        assert found == alone(drafter, family("llama"), PROMPTS, SEEDS, max_new_tokens=num_tokens)


@pytest.mark.parametrize("seeds", [7, [5, 5 + 2**40, -3, 11]])
@pytest.mark.parametrize("name", FAMILIES)
def test_sampled_rows_are_what_they_are_alone(name: str, seeds: Any) -> None:
    listed = [seeds + row for row in range(4)] if isinstance(seeds, int) else seeds
    drafter, target = toys.drafter(), family(name)
    for side, num_steps in (("left", 1), ("right", 2)):
        arguments = {"max_new_tokens": 16, "num_steps": num_steps, "temperature": 0.8}
        found = together(drafter, target, PROMPTS, seeds, side, **arguments)
        assert found == alone(drafter, target, PROMPTS, listed, **arguments)
        assert [row[3] for row in found] == listed


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_sampled_rows_with_high_and_uneven_acceptance(name: str) -> None:
    drafter, target = oracle(4, cls=Seer), family(name)
    arguments: dict[str, Any] = {"max_new_tokens": 24, "temperature": 0.15}
    with seen_texts(drafter, target):
        found = together(drafter, target, PROMPTS, SEEDS, "left", **arguments)
        assert found == alone(drafter, target, PROMPTS, SEEDS, **arguments)
    accepted = list(itertools.chain(*(row[1] for row in found)))
    assert sum(accepted) / len(accepted) > 1.3
    assert len(set(accepted)) >= 4, accepted


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("more", [0, 5])
@pytest.mark.parametrize("side", ["left", "right"])
def test_one_row_with_padding(side: str, more: int, temperature: float) -> None:
    drafter, target = toys.drafter(), family("llama")
    ids, mask = padded(PROMPTS[:1], side, pad=60, more=more)
    arguments = {"max_new_tokens": 12, "temperature": temperature}
    out = drafter.spec_generate(target, ids, attention_mask=mask, seed=4, **arguments)
    assert texts_of(out, ids) == alone(drafter, target, PROMPTS[:1], [4], **arguments)
    assert isinstance(out.num_new_tokens, int)


def test_rows_of_one_length_need_no_mask() -> None:
    prompts = [prompt(6, seed=seed) for seed in range(3)]
    for temperature in (0.0, 1.0):
        arguments = {"max_new_tokens": 20, "temperature": temperature}
        out = toys.drafter().spec_generate(
            family("llama"), torch.cat(prompts), seed=[1, 2, 3], **arguments
        )
        found = texts_of(out, torch.cat(prompts))
        assert found == alone(toys.drafter(), family("llama"), prompts, [1, 2, 3], **arguments)


def test_rows_that_stop_at_different_rounds_leave_the_batch() -> None:
    target, drafter, sizes = family("llama"), knowing("llama", 3), []
    # A row ends with its 3rd, 11th, 23rd and 40th token at the latest.
    stops = [plain("llama", n)[end] for n, end in zip(LENGTHS, (3, 11, 23, 40), strict=True)]
    handle = target.model.embed_tokens.register_forward_pre_hook(
        lambda module, args: sizes.append(tuple(args[0].shape))
    )
    found = together(
        drafter, target, PROMPTS, SEEDS, "left", max_new_tokens=50, stop_token_ids=stops
    )
    handle.remove()
    for (tokens, *_), length in zip(found, LENGTHS, strict=True):
        text = plain("llama", length)
        end = next(place for place, token in enumerate(text) if token in stops)
        assert tokens == text[: end + 1]
    passes = [shape for shape in sizes if shape[1] == 4]
    expected = [sum(len(row[1]) > turn for row in found) for turn in range(len(passes))]
    assert [shape[0] for shape in passes] == expected == drafter.batch_sizes
    assert len(set(expected)) > 1
    drafter.batch_sizes = []
    singly = alone(drafter, target, PROMPTS, SEEDS, max_new_tokens=50, stop_token_ids=stops)
    assert found == singly
    assert hook_count(target) == 0


def test_one_pass_of_the_target_a_round_for_all_rows() -> None:
    target, passes = family("qwen3"), []
    drafter = knowing("qwen3", 3)  # asks the target for its texts
    handle = target.lm_head.register_forward_hook(lambda *args: passes.append(1))
    drafter.draft = lambda anchors, *a, **k: torch.zeros(len(anchors), 3, toys.VOCAB)
    found = together(drafter, target, PROMPTS, SEEDS, "right", max_new_tokens=20)
    handle.remove()
    assert len(passes) == 1 + max(len(row[1]) for row in found)


def test_shorter_rows_are_filled_with_padding() -> None:
    target = toys.llama()
    target.generation_config.pad_token_id = 59
    text = plain("llama", 9)
    ids, mask = padded([PROMPTS[0], PROMPTS[2]], "left")
    out = toys.drafter().spec_generate(
        target, ids, attention_mask=mask, max_new_tokens=12, stop_token_ids=[text[2]]
    )
    assert out.num_new_tokens[0] == text.index(text[2]) + 1
    assert set(out.sequences[0, ids.shape[1] + out.num_new_tokens[0] :].tolist()) <= {59}


def test_identical_prompts_part_when_sampled_and_agree_when_greedy() -> None:
    ids = prompt(5).expand(6, -1)
    for temperature, num_texts in ((0.0, 1), (1.0, 6)):
        out = toys.drafter().spec_generate(
            family("llama"), ids, max_new_tokens=16, temperature=temperature, seed=1
        )
        assert len({tuple(row[0]) for row in texts_of(out, ids)}) == num_texts


def test_acceptance_length_is_the_mean_over_all_rows() -> None:
    ids, mask = padded(PROMPTS, "left")
    out = knowing("llama", 3).spec_generate(
        family("llama"), ids, attention_mask=mask, max_new_tokens=20, seed=SEEDS
    )
    flat = list(itertools.chain(*out.acceptance_lengths))
    assert out.acceptance_length == pytest.approx(sum(flat) / len(flat))


class TestHoles:
    """Rejected entries stay in the cache as holes until they are closed."""

    def closings(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        found: list[int] = []
        honest = TargetRunner._close_holes

        def close(runner: Any) -> None:
            before = runner._cache.get_seq_length()
            honest(runner)
            if runner._cache.get_seq_length() < before:
                found.append(before - runner._cache.get_seq_length())

        monkeypatch.setattr(TargetRunner, "_close_holes", close)
        return found

    @pytest.mark.parametrize(
        ("name", "most"),
        [("llama", 0), ("llama", 1), ("llama", 64), ("qwen3", 1), ("gpt2", 7), ("gemma", 0)],
    )
    def test_long_texts(self, name: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(runner_flashmap, "MOST_HOLES", most)
        closed = self.closings(monkeypatch)
        drafter = knowing(name, 16)
        found = together(drafter, family(name), PROMPTS, SEEDS, "left", max_new_tokens=LONGEST)
        assert len(closed) >= (8 if most < 7 else 1)
        assert [row[0] for row in found] == [plain(name, length) for length in LENGTHS]
        assert found == alone(drafter, family(name), PROMPTS, SEEDS, max_new_tokens=LONGEST)

    def test_holes_are_closed_several_times(self, monkeypatch: pytest.MonkeyPatch) -> None:
        closed, name = self.closings(monkeypatch), "llama"
        seeds, prompts, num_tokens = [3, 6, 9], PROMPTS[:3], 360
        drafter = oracle(16)
        texts = [plain(name, ids.shape[1], num_tokens) for ids in prompts]
        for seed, ids, text in zip(seeds, prompts, texts, strict=True):
            drafter.texts[seed] = ids[0].tolist() + text
        found = together(drafter, family(name), prompts, seeds, "right", max_new_tokens=num_tokens)
        assert [row[0] for row in found] == texts
        assert sum(size > runner_flashmap.MOST_HOLES for size in closed) >= 2

    def test_sampled(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(runner_flashmap, "MOST_HOLES", 1)
        drafter, target = toys.drafter(), family("llama")
        arguments: dict[str, Any] = {"max_new_tokens": 40, "temperature": 0.6}
        found = together(drafter, target, PROMPTS, SEEDS, "left", **arguments)
        assert found == alone(drafter, target, PROMPTS, SEEDS, **arguments)


class TestTheEndOfAPositionTable:
    """Blocks get shorter where the table ends, for the row that is there and for no other."""

    PROMPTS = (prompt(20, seed=1), prompt(4))

    def test_a_row_there_leaves_the_others_as_they_are(self) -> None:
        target, drafter = toys.gpt2(positions=32), oracle(8)
        texts = [greedy(target, self.PROMPTS[0], 12), greedy(target, self.PROMPTS[1], 24)]
        for seed in range(2, 32, 3):
            seeds = [seed, seed + 1]  # the first row has most drafts accepted
            for one, ids, text in zip(seeds, self.PROMPTS, texts, strict=True):
                drafter.texts[one] = ids[0].tolist() + text
            found = together(drafter, target, self.PROMPTS, seeds, "left", max_new_tokens=12)
            assert [row[0] for row in found] == [text[:12] for text in texts]
            assert found == alone(drafter, target, self.PROMPTS, seeds, max_new_tokens=12), seed

    def test_a_row_there_leaves_sampled_rows_as_they_are(self) -> None:
        target, drafter = toys.gpt2(positions=32), oracle(8, cls=Seer)
        with seen_texts(drafter, target):
            for seed in (26, 32, 35):
                arguments: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0.15}
                seeds = [seed, seed + 1]
                found = together(drafter, target, self.PROMPTS, seeds, "left", **arguments)
                assert found == alone(drafter, target, self.PROMPTS, seeds, **arguments), seed


def mpt() -> Any:
    config = transformers.MptConfig(
        vocab_size=toys.VOCAB, d_model=toys.WIDTH, n_heads=2, n_layers=3, max_seq_len=256
    )
    return toys.liven(transformers.MptForCausalLM(config), 0)


def bloom() -> Any:
    config = transformers.BloomConfig(
        vocab_size=toys.VOCAB, hidden_size=toys.WIDTH, n_layer=3, n_head=2,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return toys.liven(transformers.BloomForCausalLM(config), 0)


@pytest.mark.parametrize("make", [mpt, bloom])
def test_targets_that_take_no_positions_are_refused_or_right(make: Any) -> None:
    target, drafter = make(), oracle(8)
    texts = [greedy(target, ids, 60) for ids in PROMPTS]
    for seed, ids, text in zip(SEEDS, PROMPTS, texts, strict=True):
        drafter.texts[seed] = ids[0].tolist() + text
    try:
        found = together(drafter, target, PROMPTS, SEEDS, "left", max_new_tokens=60)
    except ValueError:
        return
    assert [row[0] for row in found] == texts


def test_a_batch_with_a_prompt_beyond_the_original_length_of_longrope() -> None:
    target, prompts = toys.scaled_rope("longrope", 24), [prompt(30, seed=1), prompt(4, seed=2)]
    try:
        found = together(toys.drafter(), target, prompts, 0, "left", max_new_tokens=10)
    except ValueError:
        return
    assert found == alone(toys.drafter(), target, prompts, [0, 1], max_new_tokens=10)
