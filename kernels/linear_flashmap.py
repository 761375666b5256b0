"""A step's linear layers behind one type, their weights as they are or in eight bits.

Eight-bit weights halve what a draft reads from memory. Weights get one float32 scale an output
channel, activations one a row, both so that the largest number becomes 448, the end of
float8_e4m3fn: y = a_r s_n (x8 W8^T) + bias, summed in float32 and rounded once.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .reference_flashmap import linears, quantize_rows

FP8_CAPABILITY = (8, 9)
_FP8_MULTIPLE = 16  # the matrix unit takes widths that are multiples of this


class Linear:
    """y = x W^T + b for `weight` (out, in) and `bias` (out) or None, by a version of `linears`."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        multiply: Callable[..., list[Tensor]] = linears,
    ) -> None:
        self.weight, self.bias, self._multiply = weight, bias, multiply

    def __call__(self, x: Tensor) -> Tensor:
        """Apply to `x` (..., in)."""
        return self._multiply(x, [self.weight], [self.bias])[0]


class Fp8Linear(Linear):
    """The same with eight-bit weights.

    Raises:
        ValueError: a width is no multiple of 16, or the GPU has no eight-bit matrix unit.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        quantize: Callable[[Tensor], tuple[Tensor, Tensor]] = quantize_rows,
    ) -> None:
        if any(width % _FP8_MULTIPLE for width in weight.shape):
            raise ValueError(
                f"A weight of shape {tuple(weight.shape)} cannot be kept in eight bits: its widths"
                f" must be multiples of {_FP8_MULTIPLE}. Turn eight-bit weights off."
            )
        if weight.is_cuda and torch.cuda.get_device_capability(weight.device) < FP8_CAPABILITY:
            raise ValueError(
                f"Eight-bit weights need compute capability 8.9 or newer;"
                f" {torch.cuda.get_device_name(weight.device)} has none. Turn them off."
            )
        quantized, self.scale = quantize_rows(weight)
        super().__init__(quantized, bias)
        self._quantize = quantize

    def __call__(self, x: Tensor) -> Tensor:
        """Apply to `x` (..., in), quantised a row at a time."""
        rows, scale = self._quantize(x.flatten(0, -2))
        multiply = _scaled_product if x.is_cuda else reference_product
        out = multiply(rows, scale, self.weight, self.scale, self.bias, x.dtype)
        return out.view(*x.shape[:-1], -1)


def reference_product(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """x_scale scale (x W^T) + bias in float32, rounded once, for `x` (R, in) and `weight` (out, in)
    in eight bits, `x_scale` (R, 1) and `scale` (out, 1)."""
    out = (x.float() @ weight.float().T) * x_scale * scale.T
    return (out if bias is None else out + bias.float()).to(dtype)


def _scaled_product(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """`reference_product` on the eight-bit matrix unit, which gives bfloat16."""
    out: Tensor = torch._scaled_mm(
        x,
        weight.T,
        scale_a=x_scale,
        scale_b=scale.T,
        bias=None if bias is None else bias.bfloat16(),
        out_dtype=torch.bfloat16,
    )
    return out.to(dtype)
