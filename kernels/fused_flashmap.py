"""The operations the drafter itself uses, written in plain PyTorch: the specification that faster
versions must meet.

Every operation states its formula and its rounding order, because the weights were trained with
exactly these roundings: another order moves bfloat16 results by one unit in the last place.

Random numbers are counter-based (Philox4x32-10, Salmon et al., "Parallel random numbers: as easy as
1, 2, 3", 2011): a number is a pure function of the sequence's seed, the token's position and the
number's purpose. So a sequence draws the same numbers whatever is batched with it, on any device,
in eager mode or in a captured graph.

Legend: B sequences, K slots, T positions, A heads, d head dimension, C columns.
"""

import math
from collections.abc import Sequence
from enum import IntEnum
from typing import TypeVar

import torch
from torch import Tensor

__all__ = [
    "Stream",
    "apply_rope",
    "as_uniform",
    "coin",
    "draw_seeds",
    "philox",
    "rms_norm",
    "rope_table",
    "seeded_normal",
    "seeded_normal_at",
    "seeded_uniform",
]

Word = TypeVar("Word", int, Tensor)
_WORD = 0xFFFFFFFF
_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_PHILOX_ROUNDS = 10


class Stream(IntEnum):
    """What a random number is for: the last word of the Philox counter, so that no two purposes
    share a number.
    """

    NOISE = 1
    DRAFT = 2
    ACCEPT = 3
    BONUS = 4
    FIRST = 5
    GUMBEL = 6
    BANK = 7


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale the last dimension of `x` to unit root mean square, times `weight`.

    `weight / rms` is formed in float32 and cast to the dtype of `x` before it meets `x`:
    y = x * cast(w * rsqrt(mean(x^2) + eps)).
    """
    inverse_rms = torch.rsqrt(x.float().square().mean(dim=-1, keepdim=True) + eps)
    return x * (weight.float() * inverse_rms).to(x.dtype)


def rope_table(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding, float32 (..., head_dim / 2), for integer
    `positions` (...).
    """
    exponents = (
        torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    )
    angles = positions.float().unsqueeze(-1) * (1.0 / theta**exponents)
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the interleaved pairs (x_0, x_1), (x_2, x_3), ... of `x` (B, T, A, d) in float32 and
    cast back once.

    `cos` and `sin` are (B, T, d / 2), the same for every head.
    """
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(dim=-1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return (
        torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
        .flatten(-2)
        .to(x.dtype)
    )


def philox(
    index: Word, position: Word, draw: Word, stream: Word, seed: Word
) -> tuple[Word, Word, Word, Word]:
    """Four random 32-bit words for each counter (index, position, draw, stream) under a 64-bit
    `seed`.

    All arguments are Python integers, or all are int64 tensors that broadcast together. Words are
    in [0, 2^32). int64 products wrap modulo 2^64, which leaves both halves of an unsigned 32 x 32
    bit product exact.
    """
    c0, c1, c2, c3 = index & _WORD, position & _WORD, draw & _WORD, stream & _WORD
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(_PHILOX_ROUNDS):
        p0, p1 = c0 * _PHILOX_MULTIPLIERS[0], c2 * _PHILOX_MULTIPLIERS[1]
        c0, c1 = ((p1 >> 32) & _WORD) ^ c1 ^ k0, p1 & _WORD
        c2, c3 = ((p0 >> 32) & _WORD) ^ c3 ^ k1, p0 & _WORD
        k0, k1 = (k0 + _PHILOX_KEY_STEPS[0]) & _WORD, (k1 + _PHILOX_KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def coin(seed: int, position: int, stream: Stream) -> float:
    """One uniform number in (0, 1) with 52 random bits, for a decision that must not be biased by
    float32 rounding.
    """
    x0, x1, _, _ = philox(0, position, 0, int(stream), seed)
    return ((x0 << 20) + (x1 >> 12) + 0.5) * 2.0**-52


def as_uniform(words: Tensor) -> Tensor:
    """Uniform numbers in (0, 1), float32, from random 32-bit words: u(x) = min(float32(x) 2^-32 +
    2^-33, 1 - 2^-24)."""
    return (words.to(torch.float32) * 2.0**-32 + 2.0**-33).clamp(max=1.0 - 2.0**-24)


def seeded_uniform(
    seeds: Tensor, positions: Tensor, num_columns: int, stream: Stream, draw: int = 0
) -> Tensor:
    """Uniform numbers in (0, 1), float32 (B, K, C), for int64 `seeds` (B) and absolute token
    `positions` (B, K).

    Column c is word c % 4 of the counter c // 4.
    """
    index = torch.arange(-(-num_columns // 4), device=positions.device)
    zero = index.new_zeros(())  # a number copied from the host would end a graph's capture
    words = torch.stack(
        philox(
            index,
            positions.unsqueeze(-1),
            zero + draw,
            zero + int(stream),
            seeds.to(positions.device)[:, None, None],
        ),
        dim=-1,
    )
    return as_uniform(words).flatten(-2)[..., :num_columns]


def seeded_normal(seeds: Tensor, positions: Tensor, num_columns: int, draw: int = 0) -> Tensor:
    """Standard normal noise, float32 (B, K, C), for int64 `seeds` (B) and absolute token
    `positions` (B, K).

    Box-Muller on pairs of words: columns (4i, 4i+1) are sqrt(-2 ln u(x0)) (cos, sin)(2 pi u(x1)),
    and (4i+2, 4i+3) the same from x2 and x3. `draw` numbers independent noises for the same
    positions.
    """
    padded = -(-num_columns // 4) * 4
    uniforms = seeded_uniform(seeds, positions, padded, Stream.NOISE, draw)
    return _box_muller(uniforms)[..., :num_columns]


def seeded_normal_at(seeds: Tensor, positions: Tensor, draws: Tensor, columns: Tensor) -> Tensor:
    """Single numbers of `seeded_normal`, float32 (R, L): row r has the `columns` (R, L) of its own
    seed, position and draw, each (R)."""
    stream = columns.new_zeros(()) + int(Stream.NOISE)
    counters = (positions.unsqueeze(1), draws.unsqueeze(1), stream, seeds.unsqueeze(1))
    words = philox(columns // 4, *counters)
    normals = _box_muller(as_uniform(torch.stack(words, dim=-1)))
    return normals.gather(-1, (columns % 4).unsqueeze(-1)).squeeze(-1)


def _box_muller(uniforms: Tensor) -> Tensor:
    """Standard normal numbers of neighbouring uniform ones (..., even), as many."""
    radius, angle = uniforms.unflatten(-1, (-1, 2)).unbind(dim=-1)
    radius, angle = torch.sqrt(-2.0 * torch.log(radius)), angle * (2.0 * math.pi)
    return torch.stack((radius * angle.cos(), radius * angle.sin()), dim=-1).flatten(-2)


def draw_seeds(
    batch_size: int, seed: int | Sequence[int] | None, generator: torch.Generator | None
) -> list[int]:
    """One 64-bit seed a sequence: from `seed` (an integer gives row b `seed + b`, a list one a
    row), else from `generator`.

    Without either, seeds come from torch's default CPU generator, so `torch.manual_seed` makes a
    run repeatable.

    Raises:
        ValueError: both are given, one is of another kind, or a list has another length than the
            batch.
    """
    if generator is not None and not isinstance(generator, torch.Generator):
        raise ValueError(
            f"generator is a {type(generator).__name__}, expected a torch.Generator: pass a number"
            " as seed."
        )
    if seed is None:
        device = generator.device if generator is not None else "cpu"
        drawn: list[int] = torch.randint(
            -(2**63), 2**63 - 1, (batch_size,), generator=generator, device=device
        ).tolist()
        return drawn
    if generator is not None:
        raise ValueError(
            "seed and generator are both given: pass one of them, since each decides the random"
            " numbers."
        )
    seeds = [seed + row for row in range(batch_size)] if isinstance(seed, int) else seed
    listed = isinstance(seeds, Sequence) and not isinstance(seed, bool)
    if not listed or any(not isinstance(one, int) or isinstance(one, bool) for one in seeds):
        raise ValueError(
            f"seed={seed!r} is not valid: pass an integer, or a list of integers, one a sequence."
        )
    if len(seeds) != batch_size:
        raise ValueError(
            f"seed holds {len(seeds)} values for {batch_size} sequences: pass one a sequence."
        )
    return [(value + 2**63) % 2**64 - 2**63 for value in seeds]
