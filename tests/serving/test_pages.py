"""The context in vLLM's pages gives the golden drafts, without an engine."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import golden
from support.golden import Golden, assert_matches
from torch import Tensor

from flashmap.modeling.step_flashmap import ContextRows, FusedStep
from flashmap.serving.vllm_plugin.model import VllmContext

PAGE, BLOCKS = 4, 12


def paged(case: Golden, step: FusedStep) -> tuple[VllmContext, Tensor]:
    """The golden features and anchors in shuffled pages, written in two pieces; and the anchors'
    positions."""
    config, features = case.model.config, case.value("in.target_hidden")
    rows, length = features.shape[:2]
    shape = (BLOCKS, config.num_attention_heads, PAGE, 2 * config.head_size)
    layers = [
        SimpleNamespace(kv_cache=torch.zeros(shape, dtype=case.model.dtype))
        for _ in range(config.num_hidden_layers)
    ]
    context = VllmContext(step, layers)
    pages = -(-(length + 1) // PAGE)
    order = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(0))
    table = order[: rows * pages].view(rows, pages)
    positions = torch.full((rows,), length)
    places = torch.arange(length + 1).expand(rows, -1)
    slots = table.gather(1, places // PAGE) * PAGE + places % PAGE
    metadata = SimpleNamespace(
        block_table=table.int(),
        # vLLM counts the block's own rows too.
        seq_lens=(positions + config.block_size).int(),
        max_seq_len=length + config.block_size,
    )
    context.begin(metadata, positions)

    def rows_of(begin: int, end: int) -> ContextRows:
        part = (slice(None), slice(begin, end))
        states = step.combine(features[part].flatten(0, 1))
        return ContextRows(states, places[part].flatten(), slots[part].flatten(), combined=True)

    anchors = case.embed_tokens(case.value("in.anchor_ids"))
    step.write(context, rows_of(0, 4))
    step.write(context, rows_of(4, length), ContextRows(anchors, positions, slots[:, length]))
    return context, positions


@torch.no_grad()
@pytest.mark.parametrize("num_steps", [1, 2])
@pytest.mark.parametrize("name", golden.CASES)
def test_golden_drafts(name: str, num_steps: int) -> None:
    case = golden.load(name)
    length = case.value("in.target_hidden").shape[1]
    step = FusedStep(
        case.model, case.embedding, case.lm_head, length + 1, num_steps=num_steps, kernels="eager"
    )
    context, positions = paged(case, step)
    hidden = step.hidden(context, positions, noise=case.value("in.noise"))
    expected = case.value(f"out.draft_logits.{num_steps}")
    if expected.dtype == torch.float32:
        assert_matches(step.logits(hidden), expected)
    elif num_steps == 1:  # the head's fold alone rounds otherwise
        assert_matches(case.lm_head(case.model.head(hidden)), expected)


def test_a_layout_follows_caches_that_move() -> None:
    layers = [SimpleNamespace(kv_cache=torch.zeros(3, 2, PAGE, 8)) for _ in range(2)]
    context = VllmContext(SimpleNamespace(), layers)  # type: ignore[arg-type]
    before: Any = context.layout()
    assert context.layout() is before
    layers[1].kv_cache = torch.ones(3, 2, PAGE, 8)
    assert context.layout() is not before
    assert context.layout().keys[1].eq(1.0).all()
