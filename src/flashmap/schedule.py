"""The time schedule of the flow: at which times tokens become readable in a noisy state.

A state (1 - t) noise + t onehot(y) over V tokens shows y as its largest entry with probability
q(t) = integral of phi(z) Phi(z + t / (1 - t))^(V - 1) dz. The chance-corrected accuracy
alpha(t) = (V q(t) - 1) / (V - 1) runs from 0 to 1 (the decoding-error schedule, equation 25 of the
flow map language model paper), and nearly all of it happens in a narrow range of t that depends on
V. So times are drawn, and jumps placed, evenly in alpha.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

_LIMIT, _NODES = 13.0, 8001  # of the integral; phi is below 1e-37 outside
_ENTRIES = 4097  # of the table that times are read from
_LARGEST_RATIO = 30.0  # t / (1 - t) beyond which alpha is 1 in float64


def decoding_accuracy(times: Tensor, vocab_size: int) -> Tensor:
    """Chance-corrected probability alpha that a state at `times` (n) shows its token, float64 (n).

    Raises ValueError for a vocabulary of fewer than 2 tokens.
    """
    if vocab_size < 2:
        raise ValueError(f"vocab_size={vocab_size} has no schedule: at least 2 tokens are needed.")
    times = times.double()
    z = torch.linspace(-_LIMIT, _LIMIT, _NODES, dtype=torch.float64)
    ratios = times / (1.0 - times).clamp(min=1e-12)
    density = torch.exp(-0.5 * z.square()) / math.sqrt(2.0 * math.pi)
    power = torch.exp((vocab_size - 1) * torch.special.log_ndtr(z + ratios[:, None]))
    readable = torch.trapezoid(density * power, z, dim=-1)
    accuracy = (vocab_size * readable - 1.0) / (vocab_size - 1)
    return torch.where(ratios >= _LARGEST_RATIO, torch.ones_like(accuracy), accuracy.clamp(0, 1))


@lru_cache(maxsize=8)
def _table(vocab_size: int) -> tuple[Tensor, Tensor]:
    """Times and their accuracies, strictly increasing in both."""
    ratios = torch.linspace(0.0, _LARGEST_RATIO, _ENTRIES, dtype=torch.float64)
    times = ratios / (1.0 + ratios)
    accuracy = torch.cat([decoding_accuracy(part, vocab_size) for part in times.split(256)])
    accuracy[0] = 0.0
    kept = torch.cat((torch.tensor([True]), accuracy[1:] > accuracy[:-1].cummax(0).values))
    return times[kept], accuracy[kept]


def time_table(vocab_size: int, entries: int) -> Tensor:
    """Times at the accuracies 0, 1 / (entries - 1), ..., 1: float32 (entries), from 0 to 1."""
    times, accuracy = _table(vocab_size)
    wanted = torch.linspace(0.0, 1.0, entries, dtype=torch.float64)
    right = torch.searchsorted(accuracy, wanted).clamp(1, len(accuracy) - 1)
    low, high = accuracy[right - 1], accuracy[right]
    share = ((wanted - low) / (high - low)).clamp(0.0, 1.0)
    table = times[right - 1] + share * (times[right] - times[right - 1])
    table[0], table[-1] = 0.0, 1.0
    return table.float()


def interpolate(table: Tensor, accuracies: Tensor) -> Tensor:
    """Times at `accuracies` in [0, 1], read from a `time_table` by linear interpolation."""
    place = accuracies.clamp(0.0, 1.0) * (len(table) - 1)
    low = place.floor().long().clamp(max=len(table) - 2)
    share = place - low
    return table[low] + share * (table[low + 1] - table[low])


def jump_times(accuracies: Sequence[float], vocab_size: int) -> list[float]:
    """Times in [0, 1] at which the accuracy is each of `accuracies`, to about 1e-13 by
    bisection."""
    low = torch.zeros(len(accuracies), dtype=torch.float64)
    high = torch.full_like(low, _LARGEST_RATIO)
    wanted = torch.tensor(accuracies, dtype=torch.float64)
    for _ in range(60):
        middle = 0.5 * (low + high)
        below = decoding_accuracy(middle / (1.0 + middle), vocab_size) < wanted
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    times = (low / (1.0 + low)).tolist()
    return [
        value if accuracy in (0.0, 1.0) else time
        for accuracy, time, value in zip(accuracies, times, map(float, accuracies), strict=True)
    ]
