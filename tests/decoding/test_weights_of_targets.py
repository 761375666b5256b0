"""Targets in other dtypes, packed, offloaded or split give the text they give alone."""

from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from support import toys
from support.toys import VOCAB, WIDTH, greedy, prompt, text_of
from torch import Tensor, nn

from flashmap.modeling import modeling_flashmap

LENGTH, NUM_TOKENS = 11, 24
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class PackedLinear(nn.Module):
    """A vocabulary head in int8 with a scale a row; inputs have to be in the scales' dtype."""

    def __init__(self, linear: nn.Linear, keep_name: bool) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(dim=1, keepdim=True) / 127
        codes = (linear.weight.detach() / scale).round().to(torch.int8)
        self.register_buffer("weight" if keep_name else "codes", codes)
        self.register_buffer("scale", scale)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        codes = self.weight if hasattr(self, "weight") else self.codes
        return nn.functional.linear(x, codes.to(self.scale.dtype) * self.scale)


class PackedEmbedding(nn.Module):
    """An embedding in int8 with one scale a row."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        scale = embedding.weight.detach().abs().amax(dim=1, keepdim=True) / 127
        self.register_buffer("codes", (embedding.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, ids: Tensor) -> Tensor:
        return self.codes[ids].to(self.scale.dtype) * self.scale[ids]


class HiddenEmbedding(nn.Module):
    """An embedding that keeps its numbers out of parameters and buffers."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self._rows = [weight]

    def forward(self, ids: Tensor) -> Tensor:
        return self._rows[0][ids]


def check(target: Any, drafter: Any = None, num_steps: int = 1) -> None:
    """Greedy text equals the target's own; the drafter is right at four positions of five."""
    ids = prompt(LENGTH)
    text = greedy(target, ids, NUM_TOKENS)
    drafter = toys.scripted({}) if drafter is None else drafter
    drafter.script = {
        LENGTH + i: token if i % 5 != 3 else (token + 1) % VOCAB for i, token in enumerate(text)
    }
    out = drafter.spec_generate(target, ids, max_new_tokens=NUM_TOKENS, num_steps=num_steps)
    assert text_of(out, ids) == text
    assert max(out.acceptance_lengths) == 4


@pytest.mark.parametrize("num_steps", [1, 2])
@pytest.mark.parametrize("drafter_dtype", DTYPES)
@pytest.mark.parametrize("target_dtype", DTYPES)
def test_any_pair_of_dtypes_decodes(
    target_dtype: torch.dtype, drafter_dtype: torch.dtype, num_steps: int
) -> None:
    target, ids = toys.llama().to(target_dtype), prompt(LENGTH)
    drafter = toys.drafter().to(drafter_dtype)
    for temperature in (0.0, 1.0):
        out = drafter.spec_generate(
            target, ids, max_new_tokens=16, num_steps=num_steps, temperature=temperature, seed=1
        )
        assert out.num_new_tokens == 16
        if temperature == 0.0 and target_dtype == torch.float32:
            assert text_of(out, ids) == greedy(target, ids, 16)


@pytest.mark.parametrize("drafter_dtype", DTYPES)
def test_draft_logits_hardly_depend_on_the_drafters_dtype(drafter_dtype: torch.dtype) -> None:
    target = toys.llama()
    modules = target.get_input_embeddings(), target.get_output_embeddings()
    features = torch.randn(1, 4, 2 * WIDTH, generator=torch.Generator().manual_seed(0))
    found = []
    for dtype in (torch.float32, drafter_dtype):
        drafter = toys.drafter().to(dtype)
        cache = drafter.new_cache(1, 5)
        with torch.no_grad():
            drafter.extend_context(cache, features)
            found.append(drafter.draft(torch.tensor([2]), cache, *modules, seed=3))
    assert found[1].dtype == torch.float32  # the head's own
    assert (found[0] - found[1]).abs().max() < 0.1 * found[0].abs().max()


@pytest.mark.parametrize("keep_name", [True, False])
def test_a_packed_vocabulary_head_is_called(keep_name: bool) -> None:
    target = toys.llama()
    target.lm_head = PackedLinear(target.lm_head, keep_name)
    check(target)
    check(target, num_steps=3)
    with_bias = toys.llama()
    with_bias.lm_head = nn.Linear(WIDTH, VOCAB)
    check(with_bias)


@pytest.mark.parametrize("num_steps", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_embedding_and_head_work_for_a_drafter_of_any_dtype(
    dtype: torch.dtype, num_steps: int
) -> None:
    target = toys.llama().to(torch.bfloat16)
    target.lm_head = PackedLinear(target.lm_head, keep_name=False)
    target.model.embed_tokens = PackedEmbedding(target.model.embed_tokens)
    out = (
        toys.drafter()
        .to(dtype)
        .spec_generate(target, prompt(LENGTH), max_new_tokens=8, num_steps=num_steps)
    )
    assert out.num_new_tokens == 8


@pytest.mark.parametrize("num_steps", [1, 2])
def test_a_packed_embedding_drafts_like_the_dense_one_it_stands_for(num_steps: int) -> None:
    target = toys.llama()
    packed = PackedEmbedding(target.model.embed_tokens)
    dense = nn.Embedding.from_pretrained(packed(torch.arange(VOCAB)))
    drafts = []
    for embedding in (dense, packed):
        drafter = toys.drafter()
        cache = drafter.new_cache(1, 5)
        with torch.no_grad():
            drafter.extend_context(cache, torch.ones(1, 4, 2 * WIDTH))
            logits = drafter.draft(
                torch.tensor([2]), cache, embedding, target.lm_head, num_steps, seed=3
            )
        drafts.append(logits)
    assert torch.allclose(*drafts, atol=1e-4)
    target.model.embed_tokens = packed
    check(target, num_steps=num_steps)


def test_two_packed_embeddings_in_turn_are_told_apart() -> None:
    head = toys.llama().lm_head
    weights = [toys.llama(seed).model.embed_tokens.weight.detach() for seed in (0, 1)]
    shared = toys.drafter()
    for weight in weights:
        drafts = []
        for drafter in (shared, toys.drafter()):
            cache = drafter.new_cache(1, 5)
            with torch.no_grad():
                drafter.extend_context(cache, torch.ones(1, 4, 2 * WIDTH))
                embedding = HiddenEmbedding(weight)
                drafts.append(drafter.draft(torch.tensor([2]), cache, embedding, head, seed=3))
        assert drafts[0].equal(drafts[1])


@pytest.mark.parametrize("kind", ["packed", "offloaded"])
def test_rows_of_an_embedding_are_looked_up_once(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    honest, calls = modeling_flashmap.look_up_rows, []

    def counted(*arguments: Any) -> Tensor:
        calls.append(1)
        return honest(*arguments)

    monkeypatch.setattr(modeling_flashmap, "look_up_rows", counted)
    target = toys.llama()
    if kind == "packed":
        target.model.embed_tokens = PackedEmbedding(target.model.embed_tokens)
    else:
        accelerate.cpu_offload(target, execution_device=torch.device("cpu"))
    out = toys.drafter().spec_generate(target, prompt(LENGTH), max_new_tokens=12)
    assert len(out.acceptance_lengths) > 3
    assert len(calls) == 1


def test_an_embedding_that_cannot_be_looked_up_is_one_clear_error() -> None:
    class Closed(nn.Module):
        def forward(self, ids: Tensor) -> Tensor:
            if ids.numel() > 20:  # serves prompts, refuses to be read out
                raise RuntimeError("kernel needs a device")
            return torch.zeros(*ids.shape, WIDTH)

    target = toys.llama()
    target.model.embed_tokens = Closed()
    with pytest.raises(ValueError, match=r"Closed.*kernel needs a device.*unquantised"):
        toys.drafter().spec_generate(target, prompt(LENGTH), max_new_tokens=4)


class TestAccelerate:
    """Weights that are elsewhere between uses: on the meta device here, loaded for each call."""

    @pytest.mark.parametrize("num_steps", [1, 2])
    @pytest.mark.parametrize("tied", [False, True])
    def test_offloaded_to_the_cpu(self, tied: bool, num_steps: int) -> None:
        target = toys.llama(3 if tied else 0, tie_word_embeddings=tied)
        text = greedy(target, prompt(LENGTH), NUM_TOKENS)
        accelerate.cpu_offload(target, execution_device=torch.device("cpu"))
        assert target.model.embed_tokens.weight.is_meta
        assert greedy(target, prompt(LENGTH), NUM_TOKENS) == text
        check(target, num_steps=num_steps)

    def test_split_between_memory_and_disk(self, tmp_path: Path) -> None:
        target = toys.llama()
        text = greedy(target, prompt(LENGTH), NUM_TOKENS)
        places = {
            "model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk",
            "model.layers.2": "disk", "model.norm": "cpu", "model.rotary_emb": "cpu",
            "lm_head": "disk",
        }  # fmt: skip
        accelerate.dispatch_model(target, places, main_device="cpu", offload_dir=tmp_path)
        assert target.lm_head.weight.is_meta
        assert greedy(target, prompt(LENGTH), NUM_TOKENS) == text
        check(target)

    def test_the_embedding_on_disk(self, tmp_path: Path) -> None:
        target = toys.llama()
        accelerate.dispatch_model(
            target, {"model": "disk", "lm_head": "cpu"}, main_device="cpu", offload_dir=tmp_path
        )
        assert target.model.embed_tokens.weight.is_meta
        check(target, num_steps=2)

    @pytest.mark.parametrize("num_steps", [1, 2])
    def test_an_offloaded_target_gets_the_drafts_of_the_same_target_in_memory(
        self, num_steps: int
    ) -> None:
        ids, runs = prompt(LENGTH), []
        for offloaded in (False, True):
            target = toys.llama()
            if offloaded:
                accelerate.cpu_offload(target, execution_device=torch.device("cpu"))
            out = toys.drafter().spec_generate(
                target, ids, max_new_tokens=40, seed=1, temperature=1.0, num_steps=num_steps
            )
            runs.append((text_of(out, ids), out.acceptance_lengths))
        assert runs[0] == runs[1]
