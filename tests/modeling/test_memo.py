"""Values computed once are never stale: after any change of weights they equal a fresh model's."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import toys
from torch import Tensor, nn

from flashmap import FlashMapDraftModel


def tensors_of(modulations: Any) -> list[Tensor]:
    per_layer, final = modulations
    return [tensor for triples in per_layer for triple in triples for tensor in triple] + [*final]


def fresh_copy(model: FlashMapDraftModel) -> FlashMapDraftModel:
    """A new model with the same weights, which has computed nothing yet."""
    new = FlashMapDraftModel(model.config).to(model.dtype)
    new.load_state_dict(model.state_dict())
    return new.eval()


def edit(model: FlashMapDraftModel) -> None:
    with torch.no_grad():
        model.time_embed.linear_1.weight.mul_(1.5)


def load(model: FlashMapDraftModel, **arguments: Any) -> None:
    model.load_state_dict(toys.drafter(seed=9).state_dict(), **arguments)


def train(model: FlashMapDraftModel, make: Callable[..., torch.optim.Optimizer]) -> None:
    """An optimizer step in evaluation mode, where values are remembered."""
    optimizer = make([weight for name, weight in model.named_parameters() if "adaln" in name])
    for weight in optimizer.param_groups[0]["params"]:
        weight.grad = torch.ones_like(weight)
    optimizer.step()


def replace(model: FlashMapDraftModel) -> None:
    old = model.layers[1].mlp_adaln.linear.weight
    model.layers[1].mlp_adaln.linear.weight = nn.Parameter(torch.full_like(old, 0.1))


CHANGES: dict[str, Callable[[FlashMapDraftModel], Any]] = {
    "to float64": lambda model: model.to(torch.float64),
    "to bfloat16": lambda model: model.to(torch.bfloat16),
    "half": lambda model: model.half(),
    "load_state_dict": load,
    "load_state_dict assign": lambda model: load(model, assign=True),
    "edit in place": edit,
    "copy_": lambda model: model.final_adaln.linear.bias.detach().copy_(torch.ones(48)),
    "index": lambda model: model.jump_embed.linear_2.bias.detach()[2:5].zero_(),
    "sgd": lambda model: train(model, lambda weights: torch.optim.SGD(weights, lr=0.1)),
    "adamw": lambda model: train(model, lambda weights: torch.optim.AdamW(weights, lr=0.1)),
    "fused adamw": lambda model: train(
        model, lambda weights: torch.optim.AdamW(weights, lr=0.1, fused=True)
    ),
    "replace a parameter": replace,
    "data replaced": lambda model: setattr(
        model.time_embed.linear_1.bias, "data", torch.full((12,), 0.5)
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_modulations_follow_the_weights(change: str) -> None:
    model = toys.drafter()
    before = [tensor.clone() for tensor in tensors_of(model.time_conditioning(0.0, 1.0))]
    CHANGES[change](model)
    found = tensors_of(model.time_conditioning(0.0, 1.0))
    expected = tensors_of(fresh_copy(model).time_conditioning(0.0, 1.0))
    assert all(a.dtype == b.dtype and a.equal(b) for a, b in zip(found, expected, strict=True))
    assert not all(a.equal(b.to(a.dtype)) for a, b in zip(found, before, strict=True))


def test_modulations_are_remembered_for_each_pair_of_times() -> None:
    model = toys.drafter()
    first, second = model.time_conditioning(0.0, 1.0), model.time_conditioning(0.0, 0.5)
    assert tensors_of(model.time_conditioning(0.0, 1.0))[0] is tensors_of(first)[0]
    assert not tensors_of(first)[0].equal(tensors_of(second)[0])
    assert not tensors_of(first)[0].requires_grad


def test_training_goes_through_the_times() -> None:
    model = toys.drafter().train()
    tensors = tensors_of(model.time_conditioning(0.0, 1.0))
    torch.stack([tensor.square().sum() for tensor in tensors]).sum().backward()
    watched = [weight for name, weight in model.named_parameters() if "_embed.linear" in name]
    assert len(watched) == 8
    assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in watched)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    after = tensors_of(model.time_conditioning(0.0, 1.0))
    assert not after[0].equal(tensors[0])
    assert tensors_of(model.eval().time_conditioning(0.0, 1.0))[0].equal(after[0])


def test_tensor_times_carry_gradients_in_any_mode() -> None:
    model = toys.drafter()
    s = torch.tensor([0.1, 0.4], requires_grad=True)
    tensors = tensors_of(model.time_conditioning(s, torch.tensor([0.7, 1.0])))
    assert tensors[0].shape == (2, 1, 16)
    tensors[0].sum().backward()
    assert s.grad is not None and s.grad.abs().min() > 0


class TestConstants:
    """The mean row and the noise factor of a target's embedding."""

    def check(self, model: FlashMapDraftModel, embedding: Tensor) -> None:
        uniform, factor = model.target_constants(embedding)
        fresh = toys.drafter().to(model.dtype)
        expected = fresh.target_constants(embedding.detach().clone())
        assert uniform.equal(expected[0])
        assert factor.equal(expected[1])
        assert factor.dtype == model.dtype
        assert uniform.dtype == embedding.dtype

    def setup_method(self) -> None:
        self.model, self.table = toys.drafter(), toys.llama().get_input_embeddings()
        self.check(self.model, self.table.weight)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
    def test_the_drafter_changes_dtype(self, dtype: torch.dtype) -> None:
        self.model.to(dtype)
        self.check(self.model, self.table.weight)

    def test_the_embedding_changes_dtype(self) -> None:
        self.table.to(torch.bfloat16)
        self.check(self.model, self.table.weight)

    def test_the_embedding_is_edited(self) -> None:
        with torch.no_grad():
            self.table.weight[3] += 2.0
        self.check(self.model, self.table.weight)
        with torch.no_grad():
            self.table.weight[:5].mul_(3.0)
        self.check(self.model, self.table.weight[:40])

    def test_the_embedding_is_trained(self) -> None:
        self.table.weight.requires_grad_(True)
        self.table(torch.arange(5)).square().sum().backward()
        torch.optim.SGD(self.table.parameters(), lr=0.1).step()
        self.check(self.model, self.table.weight)

    def test_the_embedding_is_replaced(self) -> None:
        for seed in range(5):  # memory of a freed one is often given to the next
            table = nn.Embedding(toys.VOCAB, toys.WIDTH)
            with torch.no_grad():
                table.weight.fill_(0).add_(torch.eye(toys.VOCAB, toys.WIDTH), alpha=seed + 1)
            self.check(self.model, table.weight)
            del table

    def test_the_target_is_resized(self) -> None:
        target = toys.llama()
        self.check(self.model, target.get_input_embeddings().weight)
        target.resize_token_embeddings(toys.VOCAB + 8)
        self.check(self.model, target.get_input_embeddings().weight[: toys.VOCAB])
        self.check(self.model, target.get_input_embeddings().weight)

    def test_two_ranges_of_rows_are_two_embeddings(self) -> None:
        for rows in (20, 40, 20):
            self.check(self.model, self.table.weight[:rows])

    def test_drafts_follow_the_embedding(self) -> None:
        target = toys.llama()
        table, head = target.get_input_embeddings(), target.get_output_embeddings()

        @torch.no_grad()
        def draft(model: FlashMapDraftModel) -> Tensor:
            cache = model.new_cache(1, 5)
            model.extend_context(cache, torch.ones(1, 4, 2 * toys.WIDTH))
            return model.draft(torch.tensor([2]), cache, table, head, seed=1)

        first = draft(self.model)
        with torch.no_grad():
            table.weight[7].mul_(-4.0)
        assert not draft(self.model).equal(first)
        assert draft(self.model).equal(draft(toys.drafter()))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_used_model_can_be_copied_and_pickled(duplicate: Callable[[Any], Any]) -> None:
    model, target = toys.drafter(), toys.llama()
    model.spec_generate(target, toys.prompt(4), max_new_tokens=6)
    twin = duplicate(model)
    edit(twin)
    assert twin.time_conditioning(0.0, 1.0)[1].scale.equal(
        fresh_copy(twin).time_conditioning(0.0, 1.0)[1].scale
    )
    assert not twin.time_conditioning(0.0, 1.0)[1].scale.equal(
        model.time_conditioning(0.0, 1.0)[1].scale
    )
    out = twin.spec_generate(target, toys.prompt(4), max_new_tokens=6)
    assert out.sequences[0, 4:].tolist() == toys.greedy(target, toys.prompt(4), 6)


def test_use_adds_nothing_to_the_state_dict() -> None:
    model = toys.drafter()
    before = set(model.state_dict())
    model.spec_generate(toys.llama(), toys.prompt(4), max_new_tokens=6, num_steps=2)
    model.spec_generate(toys.llama(), toys.prompt(4), max_new_tokens=6)
    assert set(model.state_dict()) == before
    assert list(model.buffers()) == []
