"""Triton's interpreter, mended where it computes something else than a GPU does.

It cuts float32 down to bfloat16 instead of rounding, loses carries when it rounds to float8, and
multiplies matrices of bfloat16 as if their bits were integers. Here torch converts, and products
are float32, which holds every product of two bfloat16 numbers exactly.
"""

from typing import Any

import numpy as np
import pytest
import torch

TORCH_DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
}
BITS = {8: np.uint8, 16: np.uint16, 32: np.uint32}


def _convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
    """Bits of `data` in another floating-point type, rounded to nearest even."""
    width = BITS[source.primitive_bitwidth]
    bits = torch.from_numpy(np.ascontiguousarray(data).view(width).copy())
    numbers = bits.view(TORCH_DTYPES[source.name]).to(TORCH_DTYPES[target.name])
    return numbers.view(getattr(torch, np.dtype(BITS[target.primitive_bitwidth]).name)).numpy()


def mend(patch: pytest.MonkeyPatch) -> None:
    """Mend the interpreter until `patch` is undone."""
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    multiply, float32 = builder.create_dot, interpreter.tl.float32

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        if a.dtype.scalar == interpreter.tl.bfloat16:
            a, b = (self.create_fp_ext(side, float32) for side in (a, b))
        return multiply(self, a, b, *rest)

    patch.setattr(interpreter, "_convert_float", _convert)
    patch.setattr(builder, "create_dot", create_dot)
