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

# Of the integral: phi is below 1e-18 outside. The trapezoid rule converges geometrically on such an
# integrand: for up to ten million tokens these nodes and a hundred times as many agree to 1e-15.
_LIMIT, _NODES = 9.0, 301
_ENTRIES = 4097  # of the table that times are read from
_LARGEST_RATIO = 30.0  # t / (1 - t) beyond which alpha is 1 in float64
_SECANTS = 4  # steps from a table's entry to the last bits of a time
_PUBLISHED_ENTRIES = 4001  # of the table that the published constants were read from

MODES = ("exact", "compat")
MOST_STEPS, MOST_TOKENS = 64, 1_000_000  # what grids are verified for


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
    accuracy = decoding_accuracy(times, vocab_size)
    accuracy[0] = 0.0
    kept = torch.cat((torch.tensor([True]), accuracy[1:] > accuracy[:-1].cummax(0).values))
    return times[kept], accuracy[kept]


def time_table(vocab_size: int, entries: int) -> Tensor:
    """Times at the accuracies 0, 1 / (entries - 1), ..., 1: float32 (entries), from 0 to 1."""
    times, accuracy = _table(vocab_size)
    wanted = torch.linspace(0.0, 1.0, entries, dtype=torch.float64)
    table = _invert(times, accuracy, wanted)
    table[0], table[-1] = 0.0, 1.0
    return table.float()


def _invert(times: Tensor, accuracy: Tensor, wanted: Tensor) -> Tensor:
    """Times at the accuracies `wanted`, linearly between the entries of a table."""
    right = torch.searchsorted(accuracy, wanted).clamp(1, len(accuracy) - 1)
    low, high = accuracy[right - 1], accuracy[right]
    share = ((wanted - low) / (high - low)).clamp(0.0, 1.0)
    return times[right - 1] + share * (times[right] - times[right - 1])


def interpolate(table: Tensor, accuracies: Tensor) -> Tensor:
    """Times at `accuracies` in [0, 1], read from a `time_table` by linear interpolation."""
    place = accuracies.clamp(0.0, 1.0) * (len(table) - 1)
    low = place.floor().long().clamp(max=len(table) - 2)
    share = place - low
    return table[low] + share * (table[low + 1] - table[low])


def jump_times(accuracies: Sequence[float], vocab_size: int) -> list[float]:
    """Times in [0, 1] at which the accuracy is each of `accuracies`, to about 1e-15.

    A table gives the entries on either side, secants the rest; 0 and 1 are exact.
    """
    times, accuracy = _table(vocab_size)
    wanted = torch.tensor(accuracies, dtype=torch.float64)
    right = torch.searchsorted(accuracy, wanted).clamp(1, len(accuracy) - 1)
    low, high = times[right - 1], times[right]
    before, now, error_before = low, high, accuracy[right - 1] - wanted
    for count in range(_SECANTS):
        error = (decoding_accuracy(now, vocab_size) if count else accuracy[right]) - wanted
        slope = (error - error_before) / (now - before)
        step = torch.where(slope > 0, error / slope, 0.0)  # no slope: the two have met
        before, error_before = now, error
        now = (now - step).clamp(low, high)
    return _with_exact_ends(accuracies, now)


def jump_grids(vocab_size: int, num_steps: int, mode: str = "exact") -> dict[str, list[float]]:
    """Times of the jumps of a draft, for 1 to `num_steps` of them: `jump_grids` of a configuration.

    A jump ends where the accuracy is i / n. Mode "exact" solves for that; "compat" repeats the
    published constants bit for bit: float32 numbers, read from a coarser table.

    Raises ValueError for a number of steps or tokens outside what grids are verified for.
    """
    if mode not in MODES:
        raise ValueError(f"mode {mode!r} is not known; use {' or '.join(MODES)}")
    if type(num_steps) is not int or not 1 <= num_steps <= MOST_STEPS:
        raise ValueError(f"{num_steps!r} steps: grids are made for 1 to {MOST_STEPS} jumps a draft")
    if type(vocab_size) is not int or not 2 <= vocab_size <= MOST_TOKENS:
        raise ValueError(
            f"a vocabulary of {vocab_size!r} tokens: grids are made for 2 to {MOST_TOKENS:,}; give"
            " the number of rows of the target's embedding (vocab_size in its config.json)"
        )
    grids = {n: [i / n for i in range(n + 1)] for n in range(1, num_steps + 1)}
    accuracies = sorted({accuracy for grid in grids.values() for accuracy in grid})
    solve = jump_times if mode == "exact" else _published_times
    times = dict(zip(accuracies, solve(accuracies, vocab_size), strict=True))
    return {str(n): [times[accuracy] for accuracy in grid] for n, grid in grids.items()}


def _published_times(accuracies: Sequence[float], vocab_size: int) -> list[float]:
    times = torch.linspace(0.0, 1.0, _PUBLISHED_ENTRIES, dtype=torch.float64)
    accuracy = decoding_accuracy(times, vocab_size)
    accuracy[0], accuracy[-1] = 0.0, 1.0
    rising = accuracy.cummax(0).values
    found = _invert(times, rising, torch.tensor(accuracies, dtype=torch.float64))
    return _with_exact_ends(accuracies, found.float())


def _with_exact_ends(accuracies: Sequence[float], times: Tensor) -> list[float]:
    return [
        float(accuracy) if accuracy in (0.0, 1.0) else time
        for accuracy, time in zip(accuracies, times.tolist(), strict=True)
    ]
