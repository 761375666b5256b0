"""The draft model takes weights by name, and says what does not belong."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from support import golden, toys
from torch import Tensor, nn

from flashmap.serving.vllm_plugin.model import VllmDraftModel
from flashmap.serving.weights import dense_head, fold


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


def test_rows_beyond_the_vocabulary_are_left_out() -> None:
    """Engines pad a target's embedding and head."""
    case = golden.load("tiny-fp32")
    vocab, width = case.embedding.shape
    embedding, head = (nn.Embedding(vocab + 5, width) for _ in range(2))
    with torch.no_grad():
        embedding.weight[:vocab], head.weight[:vocab] = case.embedding, case.lm_head.weight
        padded = fold(case.model, embedding, head, 16, kernels="eager")
        plain = fold(case.model, case.embed_tokens, case.lm_head, 16, kernels="eager")
        hidden = torch.randn(3, case.model.config.hidden_size)
        assert padded.logits(hidden).equal(plain.logits(hidden))
        assert padded.embedding.shape == (vocab, width)


def test_a_quantised_embedding_is_refused() -> None:
    case = golden.load("tiny-fp32")
    packed = nn.Embedding(4, 4)
    packed.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match="embedding is quantised"):
        fold(case.model, packed, case.lm_head, 16)
