"""Walking along finished texts counts what the real loop would have committed."""

import itertools
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import toys
from torch import Tensor

from flashmap.modeling.decoding_flashmap import spec_generate
from flashmap.training import walk as walking
from flashmap.training.blocks import Target
from flashmap.training.documents import Document, Documents, pack
from flashmap.training.walk import Walk, mean_length, slot_rates, walk

VOCAB, BLOCK = 3, 3  # few tokens, so that drafts are often right by chance
PROMPTS = [toys.prompt(length, seed, VOCAB) for seed, length in enumerate((2, 5, 3, 7, 4, 6))]


def models(seed: int = 0, vocab: int = VOCAB) -> tuple[Any, Any, Target]:
    target = toys.llama(seed, vocab_size=vocab)
    model = toys.drafter(seed + 1, vocab_size=vocab)
    embedding = target.get_input_embeddings().weight.detach()
    return target, model, Target(target, list(model.config.target_layer_ids), embedding)


def loop(model: Any, target: Any, prompt: Tensor, **options: Any) -> tuple[list[int], list[int]]:
    """New tokens and acceptance lengths of the real loop."""
    out = spec_generate(model, target, prompt, **{"stop_token_ids": [], **options})
    return toys.text_of(out, prompt), out.acceptance_lengths


def one(prompt: Tensor, answer: Sequence[int], vocab: int = VOCAB) -> Documents:
    return pack([Document(prompt[0].tolist(), list(answer), 0.0, False)], vocab)


# At temperature 0


@pytest.mark.parametrize("num_steps", [1, 2])
@pytest.mark.parametrize("seed", [0, 3])
def test_greedy_lengths_are_those_of_the_loop(num_steps: int, seed: int) -> None:
    target, model, reader = models(seed)
    found, limit = [], 14
    for prompt in PROMPTS:
        text = toys.greedy(target, prompt, limit + BLOCK + 1)
        _, wanted = loop(
            model, target, prompt, max_new_tokens=limit, num_steps=num_steps, seed=seed
        )
        result = walk(
            model, reader, one(prompt, text), temperature=0.0, num_steps=num_steps, seed=seed,
            max_new_tokens=limit,
        )  # fmt: skip
        assert result.lengths == [wanted]
        assert result.num_rounds == len(wanted)
        assert result.acceptance_length == sum(wanted) / len(wanted)
        found += wanted
    assert len(set(found)) > 2, "the drafts should be right now and then"


def test_texts_side_by_side_are_walked_as_if_each_were_alone() -> None:
    target, model, reader = models()
    documents, alone = [], []
    with torch.no_grad():
        model.noise_gate.zero_()  # which noise a text gets does not matter
    for prompt, size in zip(PROMPTS, (9, 17, 4, 2, 13, 6), strict=True):
        text = toys.greedy(target, prompt, size)
        documents.append(Document(prompt[0].tolist(), text, 0.0, False))
        alone += walk(model, reader, one(prompt, text), temperature=0.0).lengths
    assert walk(model, reader, pack(documents, VOCAB), temperature=0.0).lengths == alone
    assert len(alone) == len(PROMPTS)


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 8])
def test_the_round_that_crosses_the_limit_counts_in_full(limit: int) -> None:
    target, model, reader = models()
    for prompt in PROMPTS:
        text = toys.greedy(target, prompt, limit + BLOCK + 1)
        _, wanted = loop(model, target, prompt, max_new_tokens=limit, seed=0)
        found = walk(
            model, reader, one(prompt, text), temperature=0.0, max_new_tokens=limit
        ).lengths[0]
        assert found == wanted
        assert sum(found) >= limit - 1


def test_without_a_limit_the_answers_end_cuts_the_last_round() -> None:
    target, model, reader = models()
    for prompt, size in itertools.product(PROMPTS, (2, 5, 9)):
        text = toys.greedy(target, prompt, size)
        lengths = walk(model, reader, one(prompt, text), temperature=0.0).lengths[0]
        assert sum(lengths) == size - 1  # the prompt's pass committed the first
        _, wanted = loop(model, target, prompt, max_new_tokens=size, seed=0)
        assert lengths[:-1] == wanted[:-1]
        assert lengths[-1] <= wanted[-1]


def test_an_end_token_ends_the_last_round_as_in_the_loop() -> None:
    found = 0
    for seed, prompt in itertools.product(range(2), PROMPTS):
        target, model, reader = models(seed)
        stop = {"stop_token_ids": [0], "max_new_tokens": 30, "seed": 0}
        text, wanted = loop(model, target, prompt, **stop)
        if text[-1] == 0 and len(text) > 1:
            assert walk(model, reader, one(prompt, text), temperature=0.0).lengths == [wanted]
            found += 1
    assert found > 3


def test_first_tokens_drafted_and_real_are_counted() -> None:
    target, model, reader = models(vocab=7)
    text = toys.greedy(target, PROMPTS[0], 20)
    document = one(PROMPTS[0], text, 7)
    result = walk(model, reader, document, temperature=0.0)
    places = [1 + sum(result.lengths[0][:i]) for i in range(result.num_rounds)]
    assert result.distinct_first[1] == len({text[place] for place in places})
    with torch.no_grad():
        model.head.weight.zero_()  # now it says the same everywhere
    assert walk(model, reader, document, temperature=0.0).distinct_first[0] == 1


# Above temperature 0, with tables in place of networks


class Tables:
    """A first-order target and a drafter whose blocks depend on anchor and noise draw alone.

    p(next | last) = softmax(target[last] / temperature); logits of a block are
    `drafts[draw][anchor]` (K, V).
    """

    def __init__(self, num_draws: int, scale: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(4)
        self.target = torch.randn(VOCAB, VOCAB, generator=generator)
        shape = (num_draws, VOCAB, BLOCK, VOCAB)
        self.drafts = torch.randn(shape, generator=generator) * scale
        self.embedding = torch.zeros(VOCAB, 1)
        self.config = SimpleNamespace(block_size=BLOCK, grid=lambda steps: [0.0, 1.0])
        self.dtype = torch.float32

    def read(self, drafter: Any, ids: Tensor, *, logits: bool) -> tuple[Tensor, Tensor]:
        return torch.zeros(*ids.shape, 1), self.target[ids]

    def embed(self, ids: Tensor) -> Tensor:
        return torch.zeros(*ids.shape, 1)

    def context_entries(self, features: Tensor, positions: Tensor) -> Any:
        return [(features[:, None], features[:, None])]

    anchor_entries = context_entries

    def samples(self, count: int, size: int, temperature: float) -> list[list[int]]:
        """Texts after the token 0, drawn from the target."""
        generator = torch.Generator().manual_seed(8)
        p = torch.softmax(self.target / temperature, dim=-1)
        text = [torch.zeros(count, dtype=torch.long)]
        for _ in range(size):
            text.append(torch.multinomial(p[text[-1]], 1, generator=generator)[:, 0])
        drawn: list[list[int]] = torch.stack(text[1:], dim=1).tolist()
        return drawn

    def exact(self, anchor: int, temperature: float) -> float:
        """Mean number of accepted drafts after `anchor`, by counting up all blocks in float64."""
        p = torch.softmax(self.target.double() / temperature, dim=-1).tolist()
        q = torch.softmax(self.drafts.double() / temperature, dim=-1)[:, anchor].tolist()
        total = 0.0
        for size in range(1, BLOCK + 1):
            for block in itertools.product(range(VOCAB), repeat=size):
                both = 1.0
                for k, token in enumerate(block):
                    before = [math.prod(d[j][block[j]] for j in range(k)) for d in q]
                    weighted = zip(before, q, strict=True)
                    proposed = math.fsum(w * d[k][token] for w, d in weighted) / math.fsum(before)
                    both *= min(p[block[k - 1] if k else anchor][token], proposed)
                total += both
        return total


def patch_jumps(monkeypatch: pytest.MonkeyPatch, tables: Tables) -> None:
    def jumps(self: Any, active: Tensor, positions: Tensor, context: Any, draw: int) -> Tensor:
        anchors = self.ids[active].gather(1, positions[:, :1] - 1)[:, 0]
        return tables.drafts[draw, anchors]

    monkeypatch.setattr(walking._Walker, "_jumps", jumps)


def walk_tables(tables: Any, texts: list[list[int]], temperature: float, draws: int) -> Walk:
    documents = pack([Document([0], text, temperature, False) for text in texts], VOCAB)
    return walk(
        tables, tables, documents, temperature=temperature, num_draws=draws, max_new_tokens=2
    )


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("draws", [1, 2, 4])
def test_sampled_texts_accept_what_counting_up_all_blocks_says(
    draws: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables, count = Tables(draws), 20_000
    patch_jumps(monkeypatch, tables)
    monkeypatch.setattr(walking, "TEXTS_AT_ONCE", count)
    texts = tables.samples(count, BLOCK + 2, temperature)
    lengths = walk_tables(tables, texts, temperature, draws).lengths
    assert all(len(rounds) == 1 for rounds in lengths)
    accepted = torch.tensor([rounds[0] - 1 for rounds in lengths], dtype=torch.float64)
    anchors = torch.tensor([text[0] for text in texts])
    for anchor in range(VOCAB):
        chosen = accepted[anchors == anchor]
        error = float(chosen.std()) / math.sqrt(len(chosen))
        exact = tables.exact(anchor, temperature)
        assert abs(float(chosen.mean()) - exact) < 4.0 * error, (anchor, exact)


def test_no_group_of_texts_repeats_the_coins_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of a mean over many groups would not shrink otherwise."""
    tables, size = Tables(1, scale=2.0), walking.TEXTS_AT_ONCE
    patch_jumps(monkeypatch, tables)
    text = tables.samples(1, BLOCK + 2, 1.0)[0]
    found = walk_tables(tables, [text] * 2 * size, 1.0, 1).lengths
    assert len({rounds[0] for rounds in found}) > 1
    assert found[:size] != found[size:]


def test_no_group_of_texts_repeats_the_noise_of_another() -> None:
    target, model, reader = models()
    size = walking.TEXTS_AT_ONCE
    text = toys.greedy(target, PROMPTS[0], BLOCK + 2)
    documents = pack([Document(PROMPTS[0][0].tolist(), text, 0.0, False)] * 2 * size, VOCAB)
    found = walk(model, reader, documents, temperature=0.0, max_new_tokens=2).lengths
    assert len({rounds[0] for rounds in found}) > 1
    assert found[:size] != found[size:]


def test_a_texts_noise_does_not_depend_on_the_texts_beside_it() -> None:
    """The text with index i draws from the seed `seed` + i, so that the loop can repeat it."""
    target, model, reader = models()
    documents, wanted = [], []
    for row, (prompt, size) in enumerate(zip(PROMPTS, (13, 21, 12, 16, 14, 24), strict=True)):
        text = toys.greedy(target, prompt, size)
        documents.append(Document(prompt[0].tolist(), text, 0.0, False))
        _, lengths = loop(model, target, prompt, max_new_tokens=8, seed=40 + row)
        wanted.append(lengths)
    found = walk(
        model, reader, pack(documents, VOCAB), temperature=0.0, seed=40, max_new_tokens=8
    ).lengths
    assert found == wanted


# Above temperature 0, against the loop


@pytest.mark.parametrize("num_steps", [1, 2])
def test_sampled_acceptance_agrees_with_the_loops(num_steps: int) -> None:
    target, model, reader = models(2, vocab=5)
    prompt, limit, count = PROMPTS[2], 8, 60
    with torch.no_grad():
        target.lm_head.weight.mul_(0.5)
    documents, real = [], []
    for seed in range(count):
        text, lengths = loop(
            model, target, prompt, max_new_tokens=limit + BLOCK + 1, temperature=1.0, seed=seed,
            num_steps=num_steps,
        )  # fmt: skip
        ends = list(itertools.accumulate(lengths))
        rounds = next(i for i, end in enumerate(ends) if end >= limit - 1) + 1
        documents.append(Document(prompt[0].tolist(), text, 1.0, False))
        real.append(ends[rounds - 1] / rounds)
    means = []
    for seed in range(4):  # the same texts with other noise and coins
        found = walk(
            model, reader, pack(documents, 5), temperature=1.0, num_steps=num_steps,
            seed=1000 * (seed + 1), max_new_tokens=limit,
        )  # fmt: skip
        means.append([sum(lengths) / len(lengths) for lengths in found.lengths])
    # Given a text, the loop's rounds and the walk's have one distribution.
    gaps = torch.tensor(real) - torch.tensor(means).mean(dim=0)
    error = float(gaps.std()) / math.sqrt(count)
    assert error < 0.1
    assert abs(float(gaps.mean())) < 4.0 * error
    assert 1.2 < sum(real) / count < 1 + BLOCK


# Counting


def test_rates_and_means_by_hand() -> None:
    lengths = [[1, 3, 4], [2], [], [4, 1]]  # accepted: 0, 2, 3; 1; none; 3, 0
    assert mean_length(lengths) == 15 / 6
    # Reached: slot 1 by 6 rounds, 2 by the 4 that accepted one, 3 by the 3 that accepted two.
    assert slot_rates(lengths, 3) == [4 / 6, 3 / 4, 2 / 3]
    assert slot_rates([[1, 1]], 3) == [0.0, None, None]
    assert mean_length([]) is None
    assert mean_length([[], []]) is None
    assert slot_rates([], 2) == [None, None]
    assert Walk(lengths, (1, 2)).num_rounds == 6
    assert Walk([[]], (0, 0)).acceptance_length is None
