"""The context in sglang's pool gives the golden drafts, without an engine."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import golden
from support.golden import Golden, assert_matches
from torch import Tensor

from flashmap.kernels.paged_attention import paged_attention
from flashmap.modeling.step_flashmap import ContextRows
from flashmap.serving.sglang_plugin import context
from flashmap.serving.sglang_plugin.context import PoolContext
from flashmap.serving.sglang_plugin.model import SglangDraftModel
from flashmap.serving.weights import fold

ROWS = 64


class Pool:
    """sglang's pool: keys and values (rows, A, d) a layer."""

    def __init__(self, case: Golden, dtype: torch.dtype) -> None:
        config = case.model.config
        shape = (config.num_hidden_layers, ROWS, config.num_attention_heads, config.head_size)
        self.keys, self.values = torch.zeros(shape).to(dtype), torch.zeros(shape).to(dtype)

    def get_key_buffer(self, layer: int) -> Tensor:
        return self.keys[layer]

    def get_value_buffer(self, layer: int) -> Tensor:
        return self.values[layer]


def drafter(case: Golden, dtype: torch.dtype, num_steps: int) -> SglangDraftModel:
    """The draft model after sglang has attached the target's modules, without sglang."""
    model = SglangDraftModel.__new__(SglangDraftModel)
    torch.nn.Module.__init__(model)
    model.step = fold(
        case.model, case.embed_tokens, case.lm_head, 64, num_steps=num_steps, kernels="eager"
    )
    table = torch.zeros((5, 40), dtype=torch.int32)
    runner = SimpleNamespace(
        token_to_kv_pool=Pool(case, dtype),
        req_to_token_pool=SimpleNamespace(req_to_token=table),
    )
    model.context = PoolContext(model.step, runner, case.model.dtype)
    return model


def filled(case: Golden, model: SglangDraftModel) -> tuple[Tensor, Tensor, Tensor]:
    """The golden features, written as a prompt and a verify window of which some is rejected;
    positions and slots of the anchors (B), and the requests' rows of the table (B)."""
    features = case.value("in.target_hidden")
    rows, length = features.shape[:2]
    slots = 1 + torch.randperm(ROWS - 1, generator=torch.Generator().manual_seed(0))
    window, prompt = 5, 4
    slots = slots[: rows * (prompt + window)].view(rows, -1)
    requests = torch.tensor([3, 1, 4, 2])[:rows]
    pool: Any = model.context._runner
    pool.req_to_token_pool.req_to_token[requests, : prompt + window] = slots.int()
    first = torch.arange(prompt).repeat(rows)
    model.write_target_hidden_kv(
        target_hidden=features[:, :prompt].flatten(0, 1),
        pool=pool.token_to_kv_pool,
        positions=first,
        cache_loc=slots[:, :prompt].flatten(),
    )
    # The window's columns after the committed ones hold what was rejected: other features.
    committed = length - prompt
    wrong = torch.full((rows, window - committed, features.shape[2]), 9.0, dtype=features.dtype)
    before = pool.token_to_kv_pool.keys.clone()
    model.write_target_hidden_kv(
        target_hidden=torch.cat((features[:, prompt:], wrong), dim=1).flatten(0, 1),
        pool=pool.token_to_kv_pool,
        positions=(prompt + torch.arange(window)).repeat(rows),
        cache_loc=slots[:, prompt:].flatten(),
        cache_loc_2d=slots[:, prompt:],
        commit_lens=torch.full((rows,), committed, dtype=torch.int32),
    )
    rejected = slots[:, length:].flatten()
    assert pool.token_to_kv_pool.keys[:, rejected].equal(before[:, rejected])
    return torch.full((rows,), length), slots[:, length], requests


@torch.no_grad()
@pytest.mark.parametrize("num_steps", [1, 2])
@pytest.mark.parametrize("name", golden.CASES)
def test_golden_drafts(name: str, num_steps: int) -> None:
    case = golden.load(name)
    model = drafter(case, case.model.dtype, num_steps)
    positions, slots, requests = filled(case, model)
    model.context.begin(requests, positions)
    # As `SglangDraftModel.draft` does, with the golden noise.
    anchors = case.embed_tokens(case.value("in.anchor_ids"))
    model.step.write(model.context, anchors=ContextRows(anchors, positions, slots))
    hidden = model.step.hidden(model.context, positions, noise=case.value("in.noise"))
    expected = case.value(f"out.draft_logits.{num_steps}")
    if expected.dtype == torch.float32:
        assert_matches(model.step.logits(hidden), expected)
    elif num_steps == 1:  # the head's fold and a wider table round otherwise
        error = (case.lm_head(case.model.head(hidden)) - expected).abs().max()
        assert error <= 2**-7 * expected.abs().max()


@torch.no_grad()
def test_drafts_are_the_models_own() -> None:
    """Through `draft`, from seeds, blocks are those of the model's `draft` for the same seeds."""
    case = golden.load("tiny-fp32")
    model = drafter(case, torch.float32, 1)
    positions, slots, requests = filled(case, model)
    hidden = model.draft(case.value("in.anchor_ids"), positions, slots, requests)
    draft = case.model.draft(
        case.value("in.anchor_ids"), case.filled_cache(), case.embed_tokens, case.lm_head,
        seed=[0] * len(positions),
    )  # fmt: skip
    assert_matches(model.step.logits(hidden), draft)


@torch.no_grad()
def test_tokens_that_only_the_target_has_are_not_drafted() -> None:
    case = golden.load("tiny-fp32")
    model = drafter(case, torch.float32, 1)
    model._logits_width = case.model.config.vocab_size + 3
    hidden = torch.randn(4, case.model.config.hidden_size)
    logits, _ = model.compute_base_logits(hidden)
    assert logits[:, :-3].equal(model.step.logits(hidden))
    assert logits[:, -3:].eq(float("-inf")).all()


@torch.no_grad()
def test_a_pool_in_eight_bits_drafts_nearly_the_same() -> None:
    case = golden.load("tiny-fp32")
    found = []
    for dtype in (torch.float32, torch.float8_e4m3fn):
        model = drafter(case, dtype, 1)
        positions, slots, requests = filled(case, model)
        hidden = model.draft(case.value("in.anchor_ids"), positions, slots, requests)
        found.append(model.step.logits(hidden))
    error = (found[1] - found[0]).abs().max() / found[0].abs().max()
    assert 0.0 < error < 0.05


def test_a_pool_of_another_dtype_is_refused() -> None:
    case = golden.load("tiny-fp32")
    model = drafter(case, torch.float16, 1)
    with pytest.raises(ValueError, match=r"float16, and this drafter computes in torch.float32"):
        model.context.layout()


def test_an_attention_that_is_wrong_fails_its_trial() -> None:
    query, key = torch.zeros(3, 4, 2, 16), torch.zeros(9, 2, 16)
    assert context._trial(paged_attention, query, key) is None
    shifted = context._trial(lambda *inputs: paged_attention(*inputs) + 0.1, query, key)
    assert shifted is not None and "off by" in shifted
