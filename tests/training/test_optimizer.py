"""Steps of the flat optimizer equal PyTorch's own, matrix by matrix."""

import pytest
import torch
from torch import nn

from flashmap.training.muon import Muon, orthogonalise
from flashmap.training.optimizer import Optimizer
from flashmap.training.recipe import RunRecipe

SHAPES = [torch.Size(shape) for shape in ((8, 8), (16, 8), (8, 16), (8, 8), (16, 8))]


def test_orthogonalised_matrices_keep_their_singular_vectors() -> None:
    generator = torch.Generator().manual_seed(0)
    matrices = torch.randn(3, 16, 8, generator=generator)
    found = orthogonalise(matrices).float()
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    inside = left.mT @ found @ right.mT
    sizes = torch.diagonal(inside, dim1=1, dim2=2)
    assert float(sizes.min()) > 0.5 and float(sizes.max()) < 1.3
    off = inside - torch.diag_embed(sizes)
    assert float(off.abs().max()) < 0.05


def test_muon_steps_as_pytorch_does() -> None:
    generator = torch.Generator().manual_seed(0)
    starts = [torch.randn(shape, generator=generator) for shape in SHAPES]
    parameters = [nn.Parameter(start.clone()) for start in starts]
    theirs = torch.optim.Muon(parameters, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    flat = torch.cat([start.flatten() for start in starts])
    ours = Muon(flat, SHAPES, weight_decay=0.1)
    for _ in range(5):
        gradients = [torch.randn(shape, generator=generator) for shape in SHAPES]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        theirs.step()
        ours.step(torch.cat([gradient.flatten() for gradient in gradients]), 0.02)
    expected = torch.cat([parameter.detach().flatten() for parameter in parameters])
    moved = (expected - torch.cat([start.flatten() for start in starts])).abs().max()
    assert float((flat - expected).abs().max()) < 0.03 * float(moved)  # both round to bfloat16


class Net(nn.Module):
    """A matrix that Muon takes, one that it does not, and a vector."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(6, 6)])
        self.head = nn.Linear(6, 3, bias=False)


def steps(optimizer: Optimizer, first: int, count: int) -> None:
    generator = torch.Generator().manual_seed(first)
    for step in range(first, first + count):
        optimizer.slopes.copy_(torch.randn(optimizer.slopes.shape, generator=generator))
        optimizer.update(step, optimizer.take_gradients())


def test_adamw_steps_as_pytorch_does_with_the_schedule_and_clipping() -> None:
    recipe = RunRecipe(steps=10, rate=0.1, warm_up=0.2, clip=0.5, weight_decay=0.1, beta2=0.9)
    net, other = Net(), Net()
    optimizer = Optimizer(net, recipe)
    by_decay = [[p for p in other.parameters() if (p.dim() > 1) == flag] for flag in (True, False)]
    theirs = torch.optim.AdamW(
        [{"params": by_decay[0], "weight_decay": 0.1}, {"params": by_decay[1], "weight_decay": 0}],
        betas=(0.9, 0.9),
    )
    generator = torch.Generator().manual_seed(1)
    for step in range(4):
        for name, parameter in other.named_parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            dict(net.named_parameters())[name].grad.copy_(parameter.grad)  # type: ignore[union-attr]
        norm = optimizer.update(step, optimizer.take_gradients())
        assert float(norm) == pytest.approx(
            float(nn.utils.clip_grad_norm_(other.parameters(), 0.5)), rel=1e-5
        )
        for group in theirs.param_groups:
            group["lr"] = optimizer.rate(step)
        theirs.step()
    for name, parameter in other.named_parameters():
        torch.testing.assert_close(dict(net.named_parameters())[name], parameter)


def test_the_rate_rises_and_falls_to_its_share() -> None:
    recipe = RunRecipe(steps=100, rate=2.0, warm_up=0.1, final_rate=0.05)
    optimizer = Optimizer(Net(), recipe)
    rates = [optimizer.rate(step) for step in range(101)]
    assert rates[0] == pytest.approx(0.2, rel=1e-2)
    assert max(rates) == pytest.approx(2.0, rel=0.05)
    assert rates.index(max(rates)) in range(9, 12)
    assert rates[100] == pytest.approx(0.1)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_loaded_state_goes_on_bit_for_bit(kind: str) -> None:
    recipe = RunRecipe(steps=10, rate=0.1, optimizer=kind)
    whole, first, second = (Optimizer(Net(), recipe) for _ in range(3))
    steps(whole, 0, 3)
    steps(whole, 3, 3)
    steps(first, 0, 3)
    second.load({name: tensor.clone() for name, tensor in first.state().items()}, 3)
    steps(second, 3, 3)
    for name, tensor in whole.state().items():
        assert torch.equal(tensor, second.state()[name]), name


def test_the_average_follows_and_can_be_lent_to_the_model() -> None:
    net = Net()
    optimizer = Optimizer(net, RunRecipe(steps=10, rate=0.1, average=0.5))
    before = net.head.weight.detach().clone()
    steps(optimizer, 0, 5)
    trained = net.head.weight.detach().clone()
    with optimizer.averaged():
        assert torch.equal(net.head.weight, optimizer.averages()["head.weight"])
        assert not torch.equal(net.head.weight, trained)
    assert torch.equal(net.head.weight, trained)
    assert not torch.equal(trained, before)
