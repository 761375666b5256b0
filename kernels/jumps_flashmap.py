"""What lies between two jumps as Triton kernels: the state and its posterior over the vocabulary,
or their projections from a bank of noise.

PyTorch's softmax gives a row to one processor, so a block of sixteen keeps sixteen of a GPU's 132
busy, and every product and sum is a pass over a tensor of vocabulary size. Here a row is cut into
tiles: three passes, which share the tiles' largest numbers and sums.

Legend: R rows, V vocabulary, H target hidden width, N tokens that predictions name.
"""

import torch
from torch import Tensor

from .flow_flashmap import sharpness
from .fused_flashmap import Stream
from .triton_flashmap import ROUNDED, padded, tl, triton, uniform

_TILE = 4096
_COLUMNS = 128  # of an embedding's row, a program
_NOISE = tl.constexpr(int(Stream.NOISE))
_BANK = tl.constexpr(int(Stream.BANK))


@triton.jit
def _store_part(score, inside, most_ptr, sum_ptr):
    """The largest number of this program's tile and the sum of exponentials beside it."""
    part = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    score = tl.where(inside, score, -float("inf"))
    most = tl.max(score, axis=0)
    tl.store(most_ptr + part, most)
    tl.store(sum_ptr + part, tl.sum(tl.exp(score - most), axis=0))


@triton.jit
def _joined(most_ptr, sum_ptr, TILES: tl.constexpr):
    """The largest number and the sum of a whole row, from those of its tiles."""
    tile = tl.arange(0, TILES)
    part = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tile
    inside = tile < tl.num_programs(1)
    most = tl.load(most_ptr + part, mask=inside, other=-float("inf"))
    sums = tl.load(sum_ptr + part, mask=inside, other=0.0)
    largest = tl.max(most, axis=0)
    return largest, tl.sum(sums * tl.exp(most - largest), axis=0)


@triton.jit
def _logits_kernel(logits_ptr, most_ptr, sum_ptr, width, TILE: tl.constexpr):
    """One tile of one row a program, here and in the next two."""
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < width
    address = logits_ptr + tl.program_id(0).to(tl.int64) * width + column
    logits = tl.load(address, mask=inside, other=0.0).to(tl.float32)
    _store_part(logits, inside, most_ptr, sum_ptr)


@triton.jit
def _advance_kernel(
    state_ptr, logits_ptr, most_ptr, sum_ptr, out_ptr, next_most_ptr, next_sum_ptr, width, kept,
    gained, left, sharp, TILES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """(kept state + gained softmax(logits)) / left, and the parts of the sum of e^(sharp that)."""
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < width
    place = tl.program_id(0).to(tl.int64) * width + column
    largest, total = _joined(most_ptr, sum_ptr, TILES)
    logits = tl.load(logits_ptr + place, mask=inside, other=0.0).to(tl.float32)
    prediction = tl.exp(logits - largest) / total
    state = tl.load(state_ptr + place, mask=inside, other=0.0)
    state = (kept * state + gained * prediction) / left
    tl.store(out_ptr + place, state, mask=inside)
    _store_part(state * sharp, inside, next_most_ptr, next_sum_ptr)


@triton.jit
def _rows_kernel(
    state_ptr, most_ptr, sum_ptr, rows_ptr, width, sharp, TILES: tl.constexpr, TILE: tl.constexpr
):
    """The posterior and the state in the dtype of their product with the embedding."""
    dtype = rows_ptr.dtype.element_ty
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < width
    place = tl.program_id(0).to(tl.int64) * width + column
    largest, total = _joined(most_ptr, sum_ptr, TILES)
    state = tl.load(state_ptr + place, mask=inside, other=0.0)
    posterior = tl.exp(state * sharp - largest) / total
    tl.store(rows_ptr + place, posterior.to(dtype), mask=inside)
    below = tl.num_programs(0).to(tl.int64) * width
    tl.store(rows_ptr + below + place, state.to(dtype), mask=inside)


@triton.jit
def _place_of(row, seeds_ptr, positions_ptr, num_slots, num_draws):
    """Seed, position and draw of a row (sequence, draw, slot)."""
    sequence = row // (num_slots * num_draws)
    position = tl.load(positions_ptr + sequence * num_slots + row % num_slots)
    draw = row // num_slots % num_draws
    return tl.load(seeds_ptr + sequence), position.to(tl.int32), draw.to(tl.int32)


@triton.jit
def _bank_rows_kernel(seeds_ptr, positions_ptr, out_ptr, num_slots, num_draws, size):
    """One row a program."""
    row = tl.program_id(0).to(tl.int64)
    seed, position, draw = _place_of(row, seeds_ptr, positions_ptr, num_slots, num_draws)
    zero = position * 0
    word, _, _, _ = tl.philox(seed, zero, position, draw, zero + _BANK)
    tl.store(out_ptr + row, word.to(tl.int64) % size)


@triton.jit
def _bank_inputs_kernel(
    noise_ptr, mean_ptr, log_total_ptr, embedding_ptr, picked_ptr, tokens_ptr, weights_ptr,
    seeds_ptr, positions_ptr, posterior_ptr, state_ptr, num_slots, num_draws, num_named, width,
    embedding_stride, kept, odds, sharp, NAMED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some columns of one row a program; each finds the weights of the named tokens anew."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, NAMED)
    is_named = place < num_named
    token = tl.load(tokens_ptr + row * num_named + place, mask=is_named, other=0)
    weight = tl.load(weights_ptr + row * num_named + place, mask=is_named, other=0.0)
    same = token[:, None] == token[None, :]
    raised = sharp * tl.sum(tl.where(same, weight[None, :], 0.0), axis=1)
    before = same & (place[None, :] < place[:, None])
    is_counted = is_named & (tl.sum(before.to(tl.int32), axis=1) == 0)

    seed, position, draw = _place_of(row, seeds_ptr, positions_ptr, num_slots, num_draws)
    index = (token // 4).to(tl.int32)
    zero = index * 0
    x0, x1, x2, x3 = tl.philox(seed, index, zero + position, zero + draw, zero + _NOISE)
    is_low, is_even = token % 4 < 2, token % 2 == 0
    angle = uniform(tl.where(is_low, x1, x3)) * 6.283185307179586
    fresh = tl.sqrt(-2.0 * tl.log(uniform(tl.where(is_low, x0, x2))))
    fresh *= tl.where(is_even, tl.cos(angle), tl.sin(angle))

    picked = tl.load(picked_ptr + row)
    score = fresh * odds - tl.load(log_total_ptr + picked) + raised
    score = tl.where(is_counted, score, -float("inf"))
    largest = tl.maximum(tl.max(score, axis=0), 0.0)
    own = tl.exp(-largest)
    added = tl.exp(score - largest) * (1.0 - tl.exp(-raised))
    total = own + tl.sum(added, axis=0)

    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    address = embedding_ptr + token.to(tl.int64)[:, None] * embedding_stride + column[None, :]
    vectors = tl.load(address, mask=is_named[:, None] & inside[None, :], other=0.0).to(tl.float32)
    source, target = picked * width + column, row * width + column
    mean = tl.load(mean_ptr + source, mask=inside, other=0.0).to(tl.float32)
    noise = tl.load(noise_ptr + source, mask=inside, other=0.0).to(tl.float32)
    posterior = (own * mean + tl.sum(added[:, None] * vectors, axis=0)) / total
    state = kept * noise + tl.sum(weight[:, None] * vectors, axis=0)
    dtype = state_ptr.dtype.element_ty
    tl.store(posterior_ptr + target, posterior.to(dtype), mask=inside)
    tl.store(state_ptr + target, state.to(dtype), mask=inside)


# Launches


def next_state(
    state: Tensor, logits: Tensor, start: float, end: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """See the reference."""
    state, logits = state.contiguous(), logits.contiguous()
    num_rows, width = state.shape
    grid = (num_rows, -(-width // _TILE))
    parts = state.new_empty(4, *grid)
    moved, rows = torch.empty_like(state), state.new_empty(2 * num_rows, width, dtype=dtype)
    tiles, sharp = {"TILES": padded(grid[1]), "TILE": _TILE, "num_warps": 8}, sharpness(end)
    _logits_kernel[grid](logits, *parts[:2].unbind(), width, TILE=_TILE, num_warps=8)
    _advance_kernel[grid](
        state, logits, *parts[:2].unbind(), moved, *parts[2:].unbind(), width, 1.0 - end,
        end - start, 1.0 - start, sharp, **tiles, **ROUNDED,
    )  # fmt: skip
    _rows_kernel[grid](moved, *parts[2:].unbind(), rows, width, sharp, **tiles, **ROUNDED)
    return moved, rows


def bank_rows(seeds: Tensor, positions: Tensor, num_draws: int, size: int) -> Tensor:
    """See the reference."""
    out = seeds.new_empty(num_draws * positions.numel())
    _bank_rows_kernel[(len(out),)](
        seeds, positions.contiguous(), out, positions.shape[1], num_draws, size, num_warps=1
    )
    return out


def bank_inputs(
    draws: tuple[Tensor, Tensor, Tensor],
    embedding: Tensor,
    picked: Tensor,
    named: tuple[Tensor, Tensor],
    counters: tuple[Tensor, Tensor, int],
    start: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """See the reference; rows of `embedding` lie side by side."""
    tokens, weights = (part.contiguous() for part in named)
    seeds, positions, num_draws = counters
    num_rows, width = len(picked), embedding.shape[1]
    posterior, state = embedding.new_empty(2, num_rows, width, dtype=dtype).unbind()
    _bank_inputs_kernel[(num_rows, -(-width // _COLUMNS))](
        *draws, embedding, picked, tokens, weights, seeds, positions.contiguous(), posterior,
        state, positions.shape[1], num_draws, tokens.shape[1], width, embedding.stride(0),
        1.0 - start, start / (1.0 - start), sharpness(start), NAMED=padded(tokens.shape[1], 2),
        COLUMNS=_COLUMNS, num_warps=4, **ROUNDED,
    )  # fmt: skip
    return posterior, state
