"""Do jump grids belong to a vocabulary? Compares them with the definition: the jump times at which
the chance-corrected accuracy is i / n (see `flashmap.schedule`).

Grids come in two modes. "exact" follows the definition as far as float64 goes; "compat" holds the
published constants, which are float32 numbers up to 3e-7 from it.
"""

import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache

from flashmap.schedule import decoding_accuracy

EXACT, COMPAT, OTHER = "exact", "compat", "other"
EXACT_ERROR, LARGEST_ERROR = 1e-11, 1e-6
_STEP = 1e-6  # of the slope


def grid_error(grids: Mapping[str, Sequence[float]], vocab_size: int) -> tuple[float, str]:
    """About the largest distance of a time in ``grids`` from the definition, and where it is.

    The distance is one Newton step: how far the accuracy at the time is from i / n, over its slope.
    """
    return _error(tuple((key, tuple(grid)) for key, grid in grids.items()), vocab_size)


@lru_cache(maxsize=8)  # asked by the build, by the card and by the check
def _error(grids: tuple[tuple[str, tuple[float, ...]], ...], vocab_size: int) -> tuple[float, str]:
    import torch

    places = [
        (key, i, time)
        for key, grid in grids
        for i, time in enumerate(grid)
        if 0 < i < len(grid) - 1
    ]
    if not places:
        return 0.0, "no times between 0 and 1"
    times = torch.tensor([time for *_, time in places], dtype=torch.float64)
    wanted = torch.tensor([i / int(key) for key, i, _ in places], dtype=torch.float64)
    both = decoding_accuracy(torch.cat((times, times + _STEP)), vocab_size)
    found, above = both.split(len(times))
    slope = ((above - found) / _STEP).clamp(min=1e-9)
    errors = (found - wanted).abs() / slope
    worst = int(errors.argmax())
    key, i, time = places[worst]
    accuracy = f"accuracy {float(found[worst]):.9f} instead of {i}/{key}"
    return float(errors[worst]), f"jump_grids[{key!r}][{i}] = {time!r} has {accuracy}"


def grid_mode(grids: Mapping[str, Sequence[float]], vocab_size: int) -> str:
    """exact, compat, or other: grids that belong to another vocabulary or schedule."""
    error, _ = grid_error(grids, vocab_size)
    if error <= EXACT_ERROR:
        return EXACT
    single = all(struct.unpack("f", struct.pack("f", t))[0] == t for g in grids.values() for t in g)
    return COMPAT if single and error <= LARGEST_ERROR else OTHER
