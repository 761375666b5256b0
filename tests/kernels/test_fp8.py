"""Eight-bit linear layers: the stated quantisation, and an error within what eight bits allow."""

import pytest
import torch
from torch import Tensor

from flashmap.kernels.linear_flashmap import Fp8Linear, Linear
from flashmap.kernels.reference_flashmap import EAGER_OPS
from flashmap.kernels.select_flashmap import TRITON_OPS

FP8 = torch.float8_e4m3fn


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("columns", [16, 40, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_fill_the_range_of_eight_bits(columns: int, dtype: torch.dtype, device: str) -> None:
    x = (numbers(5, columns) * torch.tensor([1e-3, 1, 30, 0, 1e3])[:, None]).to(device, dtype)
    for ops in (EAGER_OPS, TRITON_OPS):
        quantized, scale = ops["quantize_rows"](x)
        assert quantized.dtype == FP8 and scale.shape == (5, 1)
        largest = x.double().abs().amax(dim=1, keepdim=True)
        exact_scale = largest.clamp(min=1e-12) / 448
        assert ((scale - exact_scale).abs() <= 1e-6 * exact_scale).all()
        restored = quantized.double() * scale.double()
        allowed = x.double().abs() / 16 + exact_scale * 2.0**-10  # half a unit of three bits
        assert ((restored - x.double()).abs() <= allowed).all()
        full = quantized.float().abs().amax(dim=1).tolist()
        assert full == [448, 448, 448, 0, 448]


def test_triton_quantises_to_the_same_bits(device: str) -> None:
    x = numbers(3, 1000).to(device, torch.bfloat16)
    found, expected = TRITON_OPS["quantize_rows"](x), EAGER_OPS["quantize_rows"](x)
    assert found[0].float().equal(expected[0].float()) and found[1].equal(expected[1])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_linear_layer(bias: bool, where: str) -> None:
    weight, x = numbers(32, 64, seed=1).to(where), numbers(2, 3, 64, seed=2).to(where)
    offset = numbers(32, seed=3).to(where, torch.bfloat16) if bias else None
    exact = x.double() @ weight.double().T + (0 if offset is None else offset.double())
    found = Fp8Linear(weight.bfloat16(), offset)(x.bfloat16())
    assert found.dtype == torch.bfloat16 and found.shape == (2, 3, 32)
    # Each product is off by up to 2 x 2^-4 of itself; 64 random errors add up to about 8 of them.
    assert (found.double() - exact).abs().max() <= 8 * 2.0**-3
    assert (found.double() - exact).abs().mean() > 1e-3, "nothing was quantised"
    plain = Linear(weight.bfloat16(), offset)(x.bfloat16())
    assert (plain.double() - exact).abs().max() <= 0.2


@pytest.mark.gpu
def test_the_matrix_unit_agrees_with_the_reference() -> None:
    weight, x = numbers(4096, 2048).bfloat16(), numbers(17, 2048, seed=1).bfloat16()
    on_cpu, on_gpu = Fp8Linear(weight)(x), Fp8Linear(weight.cuda())(x.cuda()).cpu()
    assert (on_cpu.float() - on_gpu.float()).abs().max() <= 2.0**-7 * on_cpu.float().abs().max()


def test_widths_that_the_matrix_unit_does_not_take() -> None:
    with pytest.raises(ValueError, match="multiples of 16"):
        Fp8Linear(numbers(24, 64))
