"""Greedy text in float32 is, token for token, what `generate(do_sample=False)` gives."""

import functools
from typing import Any

import pytest
import torch
from support import toys
from support.toys import VOCAB, greedy, prompt, text_of

from flashmap.modeling.decoding_flashmap import FlashMapGenerateOutput

LONGEST = 40
PROMPT_LENGTH = 11  # past the sliding windows of 8

FAMILIES: dict[str, Any] = {
    "llama": toys.llama,
    "llama-tied": lambda: toys.llama(3, tie_word_embeddings=True),
    "qwen3": toys.qwen3,
    "gemma2": toys.gemma2,
    "gemma3": toys.gemma3,
    "gpt2": toys.gpt2,
}
# Layers with a recurrent or convolutional state, which transformers 4 cannot roll back.
RECURRENT: dict[str, Any] = {
    "qwen3_next": toys.qwen3_next,
    "lfm2": toys.lfm2,
    "falcon_h1": toys.falcon_h1,
    "mamba": toys.mamba,
    "mamba2": toys.mamba2,
    "rwkv": toys.rwkv,
    "jamba": toys.jamba,
    "recurrent_gemma": toys.recurrent_gemma,
}
EXACT = [*FAMILIES, *(["qwen3_next", "lfm2", "falcon_h1"] if toys.IS_V5 else [])]


@functools.cache
def family(name: str) -> Any:
    return {**FAMILIES, **RECURRENT}[name]()


@functools.cache
def plain_text(name: str, length: int = PROMPT_LENGTH, num_tokens: int = LONGEST) -> list[int]:
    return greedy(family(name), prompt(length), num_tokens)


def half_right(text: list[int], length: int) -> dict[int, int]:
    """A script that is right at four positions of five: rounds accept none, some and all."""
    wrong = {position: (token + 1) % VOCAB for position, token in enumerate(text)}
    return {
        length + position: wrong[position] if position % 5 == 3 else token
        for position, token in enumerate(text)
    }


@pytest.mark.parametrize("block_size", [1, 2, 3, 8, 16])
@pytest.mark.parametrize("name", EXACT)
def test_text_is_the_targets_own(name: str, block_size: int) -> None:
    ids, text = prompt(PROMPT_LENGTH), plain_text(name)
    script = half_right(text, PROMPT_LENGTH)
    drafter = toys.scripted(script, block_size=block_size)
    out = drafter.spec_generate(family(name), ids, max_new_tokens=LONGEST)
    assert text_of(out, ids) == text
    assert len(set(text)) > 4, "a text this dull tests nothing"
    if block_size > 1:
        assert len(set(out.acceptance_lengths)) > 1


@pytest.mark.parametrize("num_steps", [None, 1, 2, 3, 4])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_text_does_not_depend_on_the_drafter_or_its_jumps(name: str, num_steps: int) -> None:
    ids = prompt(PROMPT_LENGTH)
    for seed in (1, 2):
        drafter = toys.drafter(seed)
        out = drafter.spec_generate(family(name), ids, max_new_tokens=24, num_steps=num_steps)
        assert text_of(out, ids) == plain_text(name)[:24]


@pytest.mark.parametrize("length", [1, 2, 3, 5, 7, 8, 9])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "gpt2", *EXACT[6:]])
def test_short_prompts_and_prompts_at_the_edge_of_the_window(name: str, length: int) -> None:
    ids, text = prompt(length), plain_text(name, length, 20)
    drafter = toys.scripted(half_right(text, length))
    assert text_of(drafter.spec_generate(family(name), ids, max_new_tokens=20), ids) == text


def test_a_prompt_of_4096_tokens() -> None:
    target = toys.llama(num_hidden_layers=2, max_position_embeddings=8192)
    ids = prompt(4096)
    text = greedy(target, ids, 12)
    drafter = toys.scripted(half_right(text, 4096))
    assert text_of(drafter.spec_generate(target, ids, max_new_tokens=12), ids) == text


def test_the_context_grows_beyond_its_first_allocation() -> None:
    target = toys.llama(num_hidden_layers=2, max_position_embeddings=1024)
    num_tokens = 35 * 17 + 1
    ids, text = prompt(3), greedy(target, prompt(3), num_tokens)
    drafter = toys.scripted({3 + i: token for i, token in enumerate(text)}, block_size=16)
    out = drafter.spec_generate(target, ids, max_new_tokens=num_tokens)
    assert text_of(out, ids) == text
    assert out.acceptance_lengths == [17] * 35


@pytest.mark.parametrize("num_tokens", range(1, 2 * 3 + 2))
@pytest.mark.parametrize("right", [True, False])
def test_exactly_as_many_tokens_as_asked(num_tokens: int, right: bool) -> None:
    ids, text = prompt(PROMPT_LENGTH), plain_text("llama")
    script = {PROMPT_LENGTH + i: token for i, token in enumerate(text)} if right else {}
    out = toys.scripted(script).spec_generate(family("llama"), ids, max_new_tokens=num_tokens)
    assert out.num_new_tokens == num_tokens
    assert text_of(out, ids) == text[:num_tokens]
    assert sum(out.acceptance_lengths) + 1 >= num_tokens


@pytest.mark.parametrize("block_size", [1, 2, 3, 8])
@pytest.mark.parametrize("name", EXACT)
def test_a_drafter_that_knows_the_text_has_every_draft_accepted(name: str, block_size: int) -> None:
    ids, text = prompt(PROMPT_LENGTH), plain_text(name)
    script = {PROMPT_LENGTH + i: token for i, token in enumerate(text)}
    drafter = toys.scripted(script, block_size=block_size)
    num_tokens = 3 * (block_size + 1) + 1
    out = drafter.spec_generate(family(name), ids, max_new_tokens=num_tokens)
    assert text_of(out, ids) == text[:num_tokens]
    assert out.acceptance_lengths == [block_size + 1] * 3
    assert out.acceptance_length == block_size + 1
    assert drafter.calls == 3


@pytest.mark.parametrize("name", EXACT)
def test_a_drafter_that_is_always_wrong_changes_nothing(name: str) -> None:
    ids, text = prompt(PROMPT_LENGTH), plain_text(name)
    script = {PROMPT_LENGTH + i: (token + 1) % VOCAB for i, token in enumerate(text)}
    out = toys.scripted(script).spec_generate(family(name), ids, max_new_tokens=16)
    assert text_of(out, ids) == text[:16]
    assert out.acceptance_lengths == [1] * 15


def test_a_drafter_of_nan_changes_nothing() -> None:
    drafter = toys.drafter()
    with torch.no_grad():
        drafter.head.weight.fill_(float("nan"))
    ids = prompt(PROMPT_LENGTH)
    out = drafter.spec_generate(family("llama"), ids, max_new_tokens=8)
    assert text_of(out, ids) == plain_text("llama")[:8]


class TestVocabulary:
    @pytest.mark.parametrize("tied", [True, False])
    def test_padded_target_rows_are_decoded_and_never_drafted(self, tied: bool) -> None:
        target = toys.llama(5, vocab_size=VOCAB + 7, tie_word_embeddings=tied)
        if not tied:  # make it say padded tokens often
            with torch.no_grad():
                target.lm_head.weight[VOCAB:] *= 2
        ids = torch.cat((prompt(6), torch.tensor([[VOCAB + 6, 3]])), dim=1)
        text = greedy(target, ids, 30)
        assert tied or max(text) >= VOCAB
        proposed: list[torch.Size] = []

        class Shapes(toys.Scripted):
            def draft(self, *args: Any, **kwargs: Any) -> torch.Tensor:
                logits = super().draft(*args, **kwargs)
                proposed.append(logits.shape)
                return logits

        drafter = toys.drafter(cls=Shapes)
        drafter.script = {8 + i: token for i, token in enumerate(text) if token < VOCAB}
        out = drafter.spec_generate(target, ids, max_new_tokens=30)
        assert text_of(out, ids) == text
        assert set(proposed) == {(1, 3, VOCAB)}
        assert max(out.acceptance_lengths) > 1

    def test_fewer_rows_than_the_drafters_vocabulary_are_refused(self) -> None:
        target = toys.llama(vocab_size=VOCAB - 1)
        with pytest.raises(ValueError, match=rf"\b{VOCAB - 1} rows.*\b{VOCAB} tokens"):
            toys.drafter().spec_generate(target, prompt(3, vocab=VOCAB - 1))


class TestFeatures:
    @pytest.mark.parametrize("name", EXACT)
    def test_taps_are_the_outputs_of_their_layers(self, name: str) -> None:
        target, ids = family(name), prompt(9)
        drafter = toys.drafter(target_layer_ids=[0, 1])
        with torch.no_grad(), drafter.target_features(target) as features:
            states = target(ids, output_hidden_states=True).hidden_states
            seen = features()
        assert seen.shape == (1, 9, 2 * toys.WIDTH)
        assert seen.equal(torch.cat((states[1], states[2]), dim=-1))
        assert seen.equal(drafter.select_target_hidden(states))

    @pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
    def test_a_tap_on_the_last_layer_comes_before_the_final_norm(self, name: str) -> None:
        target, ids = family(name), prompt(9)
        drafter = toys.scripted(half_right(plain_text(name), PROMPT_LENGTH), target_layer_ids=[2])
        body = target.transformer if name == "gpt2" else target.model
        norm = body.ln_f if name == "gpt2" else body.norm
        with torch.no_grad(), drafter.target_features(target) as features:
            states = target(ids, output_hidden_states=True).hidden_states
            assert torch.allclose(norm(features()), states[-1], atol=1e-5)
        with pytest.raises(ValueError, match="final norm"):
            drafter.select_target_hidden(states)
        out = drafter.spec_generate(target, prompt(PROMPT_LENGTH), max_new_tokens=20)
        assert text_of(out, prompt(PROMPT_LENGTH)) == plain_text(name)[:20]


class Watched(toys.Scripted):
    """Keeps what it knew at every draft: the anchor and a copy of the context."""

    def draft(self, anchor_ids: Any, cache: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        context = cache.kv[..., : cache.length, :].clone()
        self.seen = [*getattr(self, "seen", []), (int(anchor_ids[0]), context)]
        return super().draft(anchor_ids, cache, *args, **kwargs)


@pytest.mark.parametrize("name", EXACT)
def test_every_draft_knows_the_features_of_all_tokens_before_its_anchor(name: str) -> None:
    target, ids, text = family(name), prompt(PROMPT_LENGTH), plain_text(name)
    drafter = toys.drafter(cls=Watched)
    drafter.script = half_right(text, PROMPT_LENGTH)
    drafter.spec_generate(target, ids, max_new_tokens=24)
    tokens = torch.cat((ids, torch.tensor([text])), dim=1)
    with torch.no_grad(), drafter.target_features(target) as features:
        target(tokens[:, : PROMPT_LENGTH + 24])
        exact = drafter.new_cache(1, PROMPT_LENGTH + 24)
        drafter.extend_context(exact, features())
    assert len(drafter.seen) > 5
    for anchor, context in drafter.seen:
        length = context.shape[-2]
        assert anchor == tokens[0, length]
        assert torch.allclose(context, exact.kv[..., :length, :], atol=1e-3)


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_targets_are_exact_or_refused(name: str) -> None:
    # Never wrong text and never a crash deep inside: some of these cannot be rolled back, some not
    # even be given several tokens on top of a state.
    target, ids, text = family(name), prompt(PROMPT_LENGTH), plain_text(name)
    drafter = toys.scripted(half_right(text, PROMPT_LENGTH))
    try:
        out = drafter.spec_generate(target, ids, max_new_tokens=24)
    except ValueError as error:
        assert name not in EXACT
        assert type(target).__name__ in str(error)
    else:
        assert text_of(out, ids) == text[:24]


@pytest.mark.skipif(toys.IS_V5, reason="transformers 5 can roll these layers back")
@pytest.mark.parametrize(
    ("name", "layers"),
    [("qwen3_next", "linear_attention"), ("lfm2", "conv"), ("jamba", "mamba")],
)
def test_a_target_that_cannot_be_rolled_back_is_refused_by_its_layers(
    name: str, layers: str
) -> None:
    with pytest.raises(ValueError, match=layers):
        toys.drafter().check_target(family(name))


class TestPositions:
    def test_gpt2_runs_up_to_its_last_position(self) -> None:
        target, ids = family("gpt2"), prompt(PROMPT_LENGTH)
        num_tokens = 64 - PROMPT_LENGTH
        text = greedy(target, ids, num_tokens)
        for script in ({}, {PROMPT_LENGTH + i: token for i, token in enumerate(text)}):
            for block_size in (3, 16):
                drafter = toys.scripted(script, block_size=block_size)
                out = drafter.spec_generate(target, ids, max_new_tokens=num_tokens)
                assert text_of(out, ids) == text

    def test_gpt2_beyond_its_positions_is_refused_with_the_numbers(self) -> None:
        with pytest.raises(ValueError, match=r"11 prompt tokens.*max_new_tokens=54.*64 positions"):
            toys.drafter().spec_generate(family("gpt2"), prompt(11), max_new_tokens=54)

    def test_beyond_a_rotary_targets_positions_there_is_one_warning(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        target = toys.llama(max_position_embeddings=16)
        ids, text = prompt(14), greedy(target, prompt(14), 12)
        for _ in range(2):
            out = toys.drafter().spec_generate(target, ids, max_new_tokens=12)
            assert text_of(out, ids) == text
        warned = [record for record in caplog.records if "16 positions" in record.getMessage()]
        assert len(warned) == 1


@pytest.mark.parametrize("seed", range(4))
def test_bfloat16_differs_from_plain_decoding_only_at_near_ties(seed: int) -> None:
    target = toys.llama(seed).to(torch.bfloat16)
    ids, num_tokens = prompt(PROMPT_LENGTH), 64
    drafter = toys.drafter().to(torch.bfloat16)
    out: FlashMapGenerateOutput = drafter.spec_generate(target, ids, max_new_tokens=num_tokens)
    plain = target.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_tokens,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    text, expected = text_of(out, ids), plain.sequences[0, PROMPT_LENGTH:].tolist()
    split = next((i for i in range(num_tokens) if text[i] != expected[i]), None)
    if split is not None:
        top = plain.logits[split][0].float().topk(2)
        assert text[split] in top.indices
        assert float(top.values[0] - top.values[1]) <= 2**-7 * float(top.values[0].abs())
