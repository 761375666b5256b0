"""The draft model takes weights by name, and says what does not belong."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from support import toys
from torch import Tensor, nn

from flashmap.serving.vllm_plugin.model import VllmDraftModel
from flashmap.serving.weights import dense_head


@pytest.fixture
def model() -> VllmDraftModel:
    """The draft model before its weights are loaded, without the engine that it is built in."""
    made = VllmDraftModel.__new__(VllmDraftModel)
    nn.Module.__init__(made)
    made.drafter, made.tables = toys.drafter(seed=1), {}
    return made


def weights(**changes: Tensor | None) -> Iterable[tuple[str, Tensor]]:
    """Another drafter's weights, some of them changed or left out."""
    named = dict(toys.drafter(seed=2).state_dict()) | {
        name.replace("__", "."): tensor for name, tensor in changes.items()
    }
    return [(name, tensor) for name, tensor in named.items() if tensor is not None]


def test_weights_and_tables_are_taken(model: VllmDraftModel) -> None:
    extra = {"t2d": torch.ones(4), "ids": torch.arange(3), "lm_head__weight": torch.ones(2, 2)}
    found = model.load_weights(weights(**extra))
    assert found == {name for name, _ in model.named_parameters()}
    expected = dict(weights())
    for name, tensor in model.drafter.state_dict().items():
        assert tensor.equal(expected[name])
    assert model.tables.keys() == {"t2d"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fc__weight": None}, "1 tensors .*missing: fc.weight"),
        ({"fc__bias": torch.ones(3)}, "1 tensors .*unknown: fc.bias"),
        ({"head__bias": torch.ones(3)}, r"head.bias is \(3,\), expected \(24,\)"),
    ],
)
def test_weights_that_do_not_belong(changes: Any, words: str, model: VllmDraftModel) -> None:
    with pytest.raises(ValueError, match=words):
        model.load_weights(weights(**changes))


def test_a_dense_head_is_a_linear_layer() -> None:
    head = nn.Embedding(6, 4)
    head.bias = nn.Parameter(torch.ones(6))
    linear, x = dense_head(head), torch.randn(2, 4)
    assert isinstance(linear, nn.Linear)
    assert torch.allclose(linear(x), x @ head.weight.T + 1.0)
    head.weight = nn.Parameter(torch.zeros(6, 4, dtype=torch.int8), requires_grad=False)
    assert dense_head(head) is head
