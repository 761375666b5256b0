"""Which version of each fused operation runs on a device: Triton where it works there, else plain
PyTorch.

Every Triton kernel is tried once on a small example and compared with its reference before it is
trusted: a GPU, a driver or a Triton that miscompiles one then costs speed, not correctness.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .attention_flashmap import block_attention, context_attention
from .fused_flashmap import rope_table
from .jumps_flashmap import bank_inputs, bank_rows, next_state
from .reference_flashmap import EAGER_OPS, kv_layout
from .triton_flashmap import (
    HAS_TRITON,
    INTERPRETED,
    adaln,
    block_noise,
    gated_adaln,
    gated_norm,
    norm_rope,
    quantize_rows,
    rms_norm,
    target_norm,
    write_context,
)
from .verify_flashmap import add_linear, gated_linear, linears, rotate_into

Operation = Callable[..., Any]
logger = logging.getLogger(__name__)
CHOICES = ("auto", "eager", "triton")
LEAST_CAPABILITY = (8, 0)
# Largest difference in a trial, relative to the largest number: a few units in the last place.
_TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
TRITON_OPS = {
    operation.__name__: operation
    for operation in (
        rms_norm, target_norm, gated_norm, adaln, gated_adaln, norm_rope, block_attention,
        context_attention, write_context, linears, add_linear, gated_linear, rotate_into,
        block_noise, next_state, bank_rows, bank_inputs, quantize_rows,
    )
}  # fmt: skip


class Ops(NamedTuple):
    """One version of each operation of the reference file, and why that one was picked: `picked`
    maps an operation's name to "triton", or to "eager: " and the reason."""

    rms_norm: Operation
    target_norm: Operation
    gated_norm: Operation
    adaln: Operation
    gated_adaln: Operation
    norm_rope: Operation
    block_attention: Operation
    context_attention: Operation
    write_context: Operation
    linears: Operation
    add_linear: Operation
    gated_linear: Operation
    rotate_into: Operation
    block_noise: Operation
    next_state: Operation
    bank_rows: Operation
    bank_inputs: Operation
    quantize_rows: Operation
    picked: dict[str, str]


def select_ops(device: torch.device | str, dtype: torch.dtype, choice: str = "auto") -> Ops:
    """The operations to run on `device` in `dtype`, found out once.

    `choice` is "eager", "triton", or "auto": Triton for every operation that passes its trial, and
    the reason for each other one logged once. A trial compiles its kernel and waits for the device,
    so select before a graph is captured.

    Raises:
        ValueError: the choice is none of these, or is "triton" and cannot run.
    """
    if choice not in CHOICES:
        raise ValueError(f"kernels={choice!r} is not valid: choose one of {', '.join(CHOICES)}.")
    return _select(torch.device(device), dtype, choice)


@functools.cache
def _select(device: torch.device, dtype: torch.dtype, choice: str) -> Ops:
    if choice == "eager":
        return _ops(dict.fromkeys(EAGER_OPS, "eager: asked for"))
    reason = obstacle(device, dtype)
    if choice == "auto" and device.type == "cpu":
        reason = "the device is a CPU"
    if reason is None:
        failures = _failures(device, dtype)
        picked = {
            name: f"eager: {failures[name]}" if name in failures else "triton" for name in EAGER_OPS
        }
        reason = "; ".join(f"{name}: {why}" for name, why in failures.items()) or None
    else:
        picked = dict.fromkeys(EAGER_OPS, f"eager: {reason}")
    if reason is not None and choice == "triton":
        raise ValueError(
            f"kernels='triton' cannot run on {device} in {dtype}: {reason}. Choose 'auto' or"
            " 'eager'."
        )
    if reason is not None:
        level = logging.INFO if device.type == "cpu" else logging.WARNING
        logger.log(level, "Plain PyTorch instead of Triton on %s in %s: %s", device, dtype, reason)
    return _ops(picked)


def _ops(picked: dict[str, str]) -> Ops:
    chosen = {
        name: (TRITON_OPS if how == "triton" else EAGER_OPS)[name] for name, how in picked.items()
    }
    return Ops(**chosen, picked=picked)


def obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why no Triton kernel can run on `device` in `dtype`; None if one may."""
    if not HAS_TRITON:
        return "triton is not installed (torch's CUDA builds bring it)"
    if dtype not in _TOLERANCES:
        return f"there are kernels for {', '.join(map(str, _TOLERANCES))} only"
    if INTERPRETED:
        return None
    if device.type != "cuda" or not torch.cuda.is_available():
        return "Triton needs a GPU"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        return "compute capability {}.{} is below {}.{}".format(*capability, *LEAST_CAPABILITY)
    return None


def _failures(device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """Operations whose Triton version fails its trial, and how."""
    found = {}
    for name, trial in _trials(device, dtype).items():
        try:
            results, expected = trial(TRITON_OPS[name]), trial(EAGER_OPS[name])
        except Exception as error:  # noqa: BLE001 - Triton and its compilers raise what they like
            found[name] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            continue
        for result, right in zip(results, expected, strict=True):
            error_size = (result.double() - right.double()).abs().max()
            if not error_size <= _TOLERANCES[dtype] * right.double().abs().max():
                found[name] = f"its trial is off by {float(error_size):.2g}"
    return found


def _trials(device: torch.device, dtype: torch.dtype) -> dict[str, Callable[[Operation], Any]]:
    """A call of each operation on a small example: a function from its version to its results."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    x, weight, branch = numbers(6, 48), numbers(48), numbers(6, 48)
    heads, norm, places = numbers(6, 3, 16), numbers(16), torch.arange(6, device=device) * 3
    rope = rope_table(torch.arange(32, device=device), 16, 10000.0)
    blocks, kv, caches = numbers(2, 3, 3, 3, 16), numbers(6, 2, 2, 3, 16), numbers(2, 1, 3, 80, 16)
    lengths, seeds = torch.tensor([70], device=device), torch.tensor([5, -7], device=device)

    def written(operation: Operation) -> list[Tensor]:
        cache = torch.zeros(2, 2, 4, 5, 3, 16, device=device, dtype=dtype)
        layout = kv_layout(list(cache[:, 0]), list(cache[:, 1]))
        operation(kv, places, places, torch.stack((norm, norm)), 1e-5, rope, layout)
        return [cache]

    def rotated(operation: Operation) -> list[Tensor]:
        cache = torch.zeros(2, 2, 1, 9, 16, device=device, dtype=dtype)
        written_at = torch.tensor([[0, 1, 2], [4, 5, 6]], device=device)
        query = operation(qkv, (norm, norm), 1e-6, angles, written_at, *cache)
        return [query, cache]

    qkv, angles = numbers(2, 3, 64).split([32, 16, 16], dim=-1), numbers(2, 1, 3, 16).unbind()
    wide, weights = numbers(2, 3, 256), numbers(2, 48, 256)
    draws, counters = (x, branch, x[:, 0].float() + 4.0), (seeds, places.view(2, 3), 1)
    vectors = weights[0].T.contiguous()
    named = places[:, None] // 3 * torch.tensor([1, 2, 1], device=device), x[:, :3].float().abs()
    return {
        "rms_norm": lambda op: [op(x, weight, 1e-6)],
        "target_norm": lambda op: [op(x, weight, 1e-6)],
        "gated_norm": lambda op: [op(x, weight, 1e-6, norm[:1], branch[:1])],
        "adaln": lambda op: [op(x, weight, branch[0], 1e-6)],
        "gated_adaln": lambda op: op(x, branch, weight, weight, branch[0], 1e-6),
        "norm_rope": lambda op: [op(heads, norm, 1e-5, rope, places)],
        "block_attention": lambda op: [op(blocks, norm, norm, 1e-5, rope, places)],
        "context_attention": lambda op: [
            op(heads.view(2, 3, 3, 16), *caches, lengths, causal) for causal in (False, True)
        ],
        "write_context": written,
        "linears": lambda op: op(wide, weights.unbind(), [None, None]),
        "add_linear": lambda op: [op(qkv[0][..., :16], wide, weights[0, :16], norm)],
        "gated_linear": lambda op: [op(wide, *weights)],
        "rotate_into": rotated,
        "block_noise": lambda op: [op(seeds, places.view(2, 3), 50, 1, torch.float32)],
        "next_state": lambda op: op(wide[0].float(), wide[1], 0.0, 0.6, dtype),
        "bank_rows": lambda op: [op(seeds, places.view(2, 3), 1, 50)],
        "bank_inputs": lambda op: op(draws, vectors, places // 3, named, counters, 0.6, dtype),
        # Float8 numbers may part by one unit where the division rounds differently: compare values.
        "quantize_rows": lambda op: [op(x)[0].float() * op(x)[1]],
    }
