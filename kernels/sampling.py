"""Draft tokens from logits without a buffer of noise: the serving engines' sampler, its reference
and its Triton version.

A greedy row takes the largest logit, a sampled one the largest logit / T - log(-log u), which is a
draw from softmax(logits / T); ties go to the lowest token. Each u is a counter-based number of the
row's seed, its position and the token, so a row draws the same token in any batch and any draft
vocabulary.

Legend: R rows, S draft vocabulary (sorted tokens), V vocabulary.
"""

import torch
from torch import Tensor

from .fused_flashmap import Stream, as_uniform, philox
from .triton_flashmap import padded, tl, triton, uniform

_TILE = 4096
_GUMBEL = tl.constexpr(int(Stream.GUMBEL))


def gumbel_noise(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """-log(-log u), float32 (R, S), for int64 `seeds` (R), `positions` (R) and `token_ids` (S):
    token v takes word v % 4 of the counter v // 4 of the GUMBEL stream."""
    zero = torch.zeros((), dtype=torch.int64, device=seeds.device)
    words = philox(
        token_ids // 4, positions.unsqueeze(1), zero, zero + int(Stream.GUMBEL), seeds.unsqueeze(1)
    )
    word = torch.stack(words).gather(0, (token_ids % 4).expand_as(words[0]).unsqueeze(0))[0]
    return -torch.log(-torch.log(as_uniform(word)))


def sample_tokens(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, token_ids: Tensor
) -> Tensor:
    """Tokens, int64 (R), of `logits` (R, S): the largest where `temperatures` (R), float32, is 0,
    else a draw. `positions` (R) are those of the drafted tokens."""
    greedy = temperatures.unsqueeze(1) == 0.0
    scaled = logits.float() / torch.where(greedy, 1.0, temperatures.unsqueeze(1))
    noise = gumbel_noise(seeds, positions, token_ids)
    return token_ids[torch.where(greedy, logits.float(), scaled + noise).argmax(dim=1)]


def scatter_rows(
    source: Tensor, requests: Tensor, columns: Tensor, token_ids: Tensor, out: Tensor
) -> None:
    """out[requests[r], columns[r], token_ids[j]] = source[r, j] for `source` (R, S) and `out`
    (requests, columns, V), in place and cast to its dtype; rows with a request below 0 are skipped
    and other tokens are not touched."""
    kept = requests >= 0
    rows = torch.where(kept, torch.arange(len(kept), device=kept.device), kept.int().argmax())
    place = (requests[rows].clamp(min=0).unsqueeze(1), columns[rows].unsqueeze(1), token_ids)
    out[place] = torch.where(kept[rows].unsqueeze(1), source[rows].to(out.dtype), out[place])


@triton.jit
def _best_of_tile_kernel(
    logits_ptr, temperatures_ptr, seeds_ptr, positions_ptr, token_ids_ptr, best_ptr, index_ptr,
    width, SAMPLED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The largest (noisy) logit of one row in one tile, and the lowest index that has it."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tile * TILE + tl.arange(0, TILE)
    inside = column < width
    score = tl.load(logits_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
    if SAMPLED:
        temperature = tl.load(temperatures_ptr + row)
        if temperature > 0.0:
            token = tl.load(token_ids_ptr + column, mask=inside, other=0).to(tl.int32)
            zero = token * 0
            position = tl.load(positions_ptr + row).to(tl.int32)
            x0, x1, x2, x3 = tl.philox(
                tl.load(seeds_ptr + row), token // 4, zero + position, zero, zero + _GUMBEL
            )
            low, high = tl.where(token % 2 == 0, x0, x1), tl.where(token % 2 == 0, x2, x3)
            u = uniform(tl.where(token % 4 < 2, low, high))
            score = tl.div_rn(score, temperature) - tl.log(-tl.log(u))
    score = tl.where(inside, score, -float("inf"))
    best, index = tl.max(score, axis=0, return_indices=True)
    place = row * tl.num_programs(1) + tile
    tl.store(best_ptr + place, best)
    tl.store(index_ptr + place, tile * TILE + index)


@triton.jit
def _best_of_row_kernel(
    best_ptr, index_ptr, token_ids_ptr, out_ptr, num_tiles, TILES: tl.constexpr
):
    """The token of one row's best tile; the first of equal ones."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILES)
    best = tl.load(best_ptr + row * num_tiles + tile, mask=tile < num_tiles, other=-float("inf"))
    index = tl.load(index_ptr + row * num_tiles + tl.argmax(best, axis=0))
    tl.store(out_ptr + row, tl.load(token_ids_ptr + index).to(tl.int64))


@triton.jit
def _scatter_rows_kernel(
    source_ptr, requests_ptr, columns_ptr, token_ids_ptr, out_ptr, width, request_stride,
    column_stride, TILE: tl.constexpr,
):  # fmt: skip
    """One tile of one row a program."""
    row = tl.program_id(0).to(tl.int64)
    request = tl.load(requests_ptr + row).to(tl.int64)
    column = tl.load(columns_ptr + row).to(tl.int64)
    place = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = place < tl.where(request >= 0, width, 0)
    token = tl.load(token_ids_ptr + place, mask=inside, other=0)
    numbers = tl.load(source_ptr + row * width + place, mask=inside, other=0.0)
    address = out_ptr + request * request_stride + column * column_stride + token
    tl.store(address, numbers.to(out_ptr.dtype.element_ty), mask=inside)


def _best_tokens(logits: Tensor, token_ids: Tensor, sampling: tuple[Tensor, ...] | None) -> Tensor:
    logits = logits.contiguous()
    rows, width = logits.shape
    tiles = -(-width // _TILE)
    best = torch.empty((rows, tiles), dtype=torch.float32, device=logits.device)
    index = torch.empty((rows, tiles), dtype=torch.int32, device=logits.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _best_of_tile_kernel[(rows, tiles)](
        logits, *(sampling or (logits, logits, logits)), token_ids, best, index, width,
        SAMPLED=sampling is not None, TILE=_TILE, num_warps=8,
    )  # fmt: skip
    _best_of_row_kernel[(rows,)](best, index, token_ids, out, tiles, TILES=padded(tiles))
    return out


def triton_argmax_tokens(logits: Tensor, token_ids: Tensor) -> Tensor:
    """token_ids[logits.argmax(1)], ties to the lowest, with many programs a row."""
    return _best_tokens(logits, token_ids, None)


def likeliest(logits: Tensor, token_ids: Tensor) -> Tensor:
    """token_ids[logits.argmax(1)], int64 (R), the fastest way on the device of `logits` (R, S)."""
    if logits.is_cuda:
        return triton_argmax_tokens(logits, token_ids)
    return token_ids[logits.argmax(dim=1)]


def triton_sample_tokens(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, token_ids: Tensor
) -> Tensor:
    """See `sample_tokens`."""
    return _best_tokens(logits, token_ids, (temperatures, seeds, positions))


def triton_scatter_rows(
    source: Tensor, requests: Tensor, columns: Tensor, token_ids: Tensor, out: Tensor
) -> None:
    """See `scatter_rows`; the last dimension of `out` is contiguous."""
    source = source.contiguous()
    rows, width = source.shape
    _scatter_rows_kernel[(rows, -(-width // _TILE))](
        source, requests, columns, token_ids, out, width, out.stride(0), out.stride(1),
        TILE=_TILE, num_warps=8,
    )  # fmt: skip
