"""rms_norm and rotary embedding: the float64 formula, and the stated rounding order in bfloat16."""

import pytest
import torch
from torch import Tensor

from flashmap.kernels.fused_flashmap import apply_rope, rms_norm, rope_table


def numbers(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def close(found: Tensor, exact: Tensor) -> bool:
    return bool((found.double() - exact).abs().max() <= 1e-6 * exact.abs().max())


@pytest.mark.parametrize("eps", [1e-6, 1e-2])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
def test_rms_norm_is_the_formula(scale: float, eps: float) -> None:
    x, weight = numbers(3, 5, 16, scale=scale), numbers(16, seed=1)
    exact = (
        x.double() * weight.double() / (x.double().square().mean(dim=-1, keepdim=True) + eps).sqrt()
    )
    found = rms_norm(x, weight, eps)
    assert found.dtype == torch.float32
    assert close(found, exact)


def test_rms_norm_of_zeros_is_zero() -> None:
    assert rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6).equal(torch.zeros(2, 8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rms_norm_rounds_weight_over_rms_once_then_the_product(dtype: torch.dtype) -> None:
    x, weight = numbers(64, 32).to(dtype), (1 + numbers(32, seed=1)).to(dtype)
    inverse = 1 / (x.float().square().mean(dim=-1, keepdim=True) + 1e-6).sqrt()
    factor = (weight.float() * inverse).to(dtype)
    stated = (x.float() * factor.float()).to(dtype)
    found = rms_norm(x, weight, 1e-6)
    assert found.dtype == dtype
    assert (found != stated).float().mean() < 1e-3  # rsqrt may differ in its last bit
    other_order = ((x.float() * inverse).to(dtype).float() * weight.float()).to(dtype)
    assert (found != other_order).float().mean() > 0.05


def test_rope_table_is_the_formula() -> None:
    positions, theta, head_dim = torch.tensor([[0, 1, 7], [100, 2047, 3]]), 10000.0, 12
    cos, sin = rope_table(positions, head_dim, theta)
    assert cos.shape == sin.shape == (2, 3, 6)
    assert cos.dtype == sin.dtype == torch.float32
    frequency = theta ** (-torch.arange(0, head_dim, 2).double() / head_dim)
    angle = positions.double()[..., None] * frequency
    assert (cos - angle.cos()).abs().max() < 2e-4  # float32 angles of up to 2047
    assert (sin - angle.sin()).abs().max() < 2e-4
    early = angle < 110
    assert (cos - angle.cos()).abs()[early].max() < 1e-5


def test_rope_rotates_interleaved_pairs() -> None:
    x = numbers(2, 3, 4, 8)
    angle = numbers(2, 3, 4, seed=1).double()
    pairs = torch.view_as_complex(x.double().unflatten(-1, (4, 2)).contiguous())
    turned = pairs * torch.polar(torch.ones_like(angle), angle)[:, :, None]
    exact = torch.view_as_real(turned).flatten(-2)
    found = apply_rope(x, angle.cos().float(), angle.sin().float())
    assert close(found, exact)


def test_rope_makes_scores_depend_on_distance_only() -> None:
    query, key = numbers(1, 1, 1, 16), numbers(1, 1, 1, 16, seed=1)

    def score(first: int, second: int) -> float:
        turned = [
            apply_rope(x, *rope_table(torch.tensor([[position]]), 16, 10000.0))
            for x, position in ((query, first), (key, second))
        ]
        return float((turned[0] * turned[1]).sum())

    assert score(3, 10) == pytest.approx(score(103, 110), abs=1e-4)
    assert score(3, 10) != pytest.approx(score(3, 11), abs=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rope_rounds_once(dtype: torch.dtype) -> None:
    x, angle = numbers(2, 3, 4, 8).to(dtype), numbers(2, 3, 4, seed=1)
    found = apply_rope(x, angle.cos(), angle.sin())
    assert found.dtype == dtype
    assert found.equal(apply_rope(x.float(), angle.cos(), angle.sin()).to(dtype))
    rounded_tables = apply_rope(x, angle.cos().to(dtype).float(), angle.sin().to(dtype).float())
    assert not found.equal(rounded_tables)
