"""Whole blocks drawn in one pass follow softmax(logits / T), and greedy rows take the largest."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.chi_square import p_value
from torch import Tensor

from flashmap.serving.options import DraftOptions
from flashmap.serving.sglang_plugin.sampler import BlockSampler

GAMMA, VOCAB, REQUESTS = 3, 9, 2000
TOKENS = torch.tensor([1, 2, 5, 7])


def reference_draw(
    *, step_logits: Tensor, temperatures: Tensor, greedy_mask: Tensor, exp_noise: Tensor
) -> Tensor:
    """What sglang's own draw is said to be."""
    noise = torch.where(greedy_mask[:, None], 1.0, exp_noise)
    return (torch.softmax(step_logits / temperatures[:, None], -1) / noise).argmax(-1)


def made(fused: bool, folded: bool = True) -> BlockSampler:
    """A sampler of a model whose hidden states are its logits."""
    engine: Any = SimpleNamespace(
        gamma=GAMMA, out=torch.zeros(REQUESTS * GAMMA, dtype=torch.int64), folded_sampling=folded,
        temperatures=torch.ones(REQUESTS) if folded else None,
        greedy_mask=torch.zeros(REQUESTS, dtype=torch.bool) if folded else None,
        corrected_out=torch.zeros(REQUESTS * GAMMA, VOCAB) if folded else None, exp_noise="held",
    )  # fmt: skip
    step = SimpleNamespace(logits=lambda hidden: hidden, token_ids=TOKENS)
    model: Any = SimpleNamespace(step=step, options=DraftOptions(fused_sampler=fused))
    return BlockSampler(engine, model)


@pytest.fixture(autouse=True)
def sglangs_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sglang's draw, where it is not installed."""
    name = "sglang.kernels.ops.speculative.dspark.dspark_draft_model"
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        module = SimpleNamespace(SampleStepTokens=SimpleNamespace(execute=reference_draw))
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), module)


@pytest.mark.parametrize("fused", [False, True])
def test_blocks_have_the_distribution_of_each_requests_temperature(fused: bool) -> None:
    torch.manual_seed(0)
    drawn = made(fused)
    assert drawn.temperatures is not None and drawn.greedy_mask is not None
    drawn.temperatures[REQUESTS // 2 :] = 0.5
    drawn.greedy_mask[0] = True
    logits = torch.tensor([[0.3, 2.0, 1.0, -1.0], [1.0, 0.0, 0.5, 2.0], [0.0, 0.1, 0.2, 0.3]])
    drawn(logits.repeat(REQUESTS, 1), torch.zeros(REQUESTS * GAMMA, dtype=torch.int64))
    blocks = drawn.out.view(REQUESTS, GAMMA)
    assert blocks[0].tolist() == TOKENS[logits.argmax(dim=1)].tolist()
    for part, temperature in ((blocks[1 : REQUESTS // 2], 1.0), (blocks[REQUESTS // 2 :], 0.5)):
        for column in range(GAMMA):
            counts = torch.bincount(part[:, column], minlength=VOCAB)
            chances = torch.zeros(VOCAB, dtype=torch.float64)
            chances[TOKENS] = torch.softmax(logits[column].double() / temperature, dim=0)
            assert p_value(counts, chances) > 1e-3
    # Requests and slots draw for themselves.
    assert len({tuple(block) for block in blocks[1:200].tolist()}) > 20


def test_verification_sees_the_logits_of_all_tokens() -> None:
    drawn = made(fused=True)
    logits = torch.randn(2 * GAMMA, len(TOKENS))
    drawn(logits, torch.zeros(2 * GAMMA, dtype=torch.int64))
    assert drawn.corrected_out is not None
    seen = drawn.corrected_out[: 2 * GAMMA]
    assert seen[:, TOKENS].equal(logits)
    others = torch.ones(VOCAB, dtype=torch.bool)
    others[TOKENS] = False
    assert seen[:, others].eq(float("-inf")).all()


def test_without_room_for_sampling_every_row_is_greedy() -> None:
    drawn = made(fused=False, folded=False)
    logits = torch.randn(2 * GAMMA, len(TOKENS))
    drawn(logits, torch.zeros(2 * GAMMA, dtype=torch.int64))
    assert drawn.out[: 2 * GAMMA].equal(TOKENS[logits.argmax(dim=1)])
