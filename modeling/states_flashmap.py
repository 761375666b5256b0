"""The states of a draft in several jumps: whole, or from a bank of noise without any tensor of
vocabulary size.

The state that begins a jump at time t is x = (1 - t) z + delta, with noise z and what the jumps
before predicted, delta. A bank holds, for many draws of z, all that the network asks of the noise:
z E, and at each time W / Z and log Z, with W and Z the sums of e^(a z_v) E_v and of e^(a z_v) over
the vocabulary, a = t / (1 - t). Where delta is 0 but at a few tokens, the projections of x differ
from these in a few terms: see `bank_inputs`. Three things are then approximate: predictions are cut
to their likeliest tokens, the noise at those is drawn anew, and a bank is finite. What is drafted
stays a proposal like any other, so decoding stays exact.

Legend: B sequences, M draws, K slots, R = B M K rows, V vocabulary, S draft vocabulary, H target
hidden width, P draws in a bank.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .flow_flashmap import advance
from .select_flashmap import Ops

MANY_DRAWS = 2**20  # in a bank; more are mistakes, for which memory would fail
TOP = 16  # tokens of a prediction that go on
_ROWS = 128  # of a bank that are drawn at once


class State(Protocol):
    """What a draft's jumps do with its state."""

    def projections(self, dtype: torch.dtype) -> tuple[Tensor | None, Tensor]:
        """softmax(e x) E and x E, each (R, H) in `dtype`; None at time 0, where the first is the
        same for every state."""
        ...

    def advance(self, logits: Tensor, start: float, end: float) -> None:
        """Make the jump that predicted softmax(`logits`) (R, S)."""
        ...


class WholeState:
    """States (R, V), float32, that begin at time 0; predictions are over all V tokens."""

    def __init__(self, ops: Ops, embedding: Tensor, state: Tensor) -> None:
        self._ops, self._embedding, self._state = ops, embedding, state
        self._rows = state.to(embedding.dtype)

    def projections(self, dtype: torch.dtype) -> tuple[Tensor | None, Tensor]:
        """See `State`; one product with E."""
        products = (self._rows @ self._embedding).to(dtype)
        if len(products) == len(self._state):
            return None, products
        posterior, state = products.chunk(2)
        return posterior, state

    def advance(self, logits: Tensor, start: float, end: float) -> None:
        """See `State`."""
        self._state, self._rows = self._ops.next_state(
            self._state, logits, start, end, self._embedding.dtype
        )


class NoiseBank(NamedTuple):
    """P draws of noise z over the vocabulary, projected beforehand.

    Attributes:
        noise: z E (P, H).
        means: W / Z (P, H) by the time at which a jump starts, but 0.
        log_totals: log Z (P), float32, by the same times.
    """

    noise: Tensor
    means: dict[float, Tensor]
    log_totals: dict[float, Tensor]


def check_bank(size: Any, top: Any = TOP) -> None:
    """Raise ValueError if a bank of so many draws, or so many tokens a prediction, makes no sense;
    a size of 0 means no bank."""
    for name, number, least in (("jump_bank_size", size, 0), ("jump_topk", top, 1)):
        is_whole = isinstance(number, int) and not isinstance(number, bool)
        if not is_whole or not least <= number <= MANY_DRAWS:
            raise ValueError(
                f"{name}={number!r} is not valid: it must be a whole number from {least} to"
                f" {MANY_DRAWS}; jump_bank_size=0 makes exact jumps."
            )


def noise_bank(embedding: Tensor, grid: Sequence[float], size: int) -> NoiseBank:
    """A bank of `size` draws for `embedding` E (V, H) and the jumps of a grid.

    It takes len(grid) - 1 vectors of H numbers a draw, and as many passes over E for every 128.
    """
    generator = torch.Generator(embedding.device).manual_seed(0)
    times, dtype = [*grid[1:-1]], embedding.dtype
    noise = embedding.new_empty(size, embedding.shape[1])
    means = {time: torch.empty_like(noise) for time in times}
    log_totals = {time: noise.new_empty(size, dtype=torch.float32) for time in times}
    for begin in range(0, size, _ROWS):
        rows = slice(begin, min(begin + _ROWS, size))
        shape = (rows.stop - begin, len(embedding))
        z = torch.randn(shape, generator=generator, device=embedding.device)
        noise[rows] = z.to(dtype) @ embedding
        for time in times:
            scores = z * (time / (1.0 - time))
            means[time][rows] = torch.softmax(scores, dim=-1).to(dtype) @ embedding
            log_totals[time][rows] = torch.logsumexp(scores, dim=-1)
    return NoiseBank(noise, means, log_totals)


class BankState:
    """States whose noise is a draw of a bank each, picked by seed, position and draw.

    Args:
        bank: the bank of `embedding`, made for the grid.
        embedding: E (V, H).
        ops: see `select_ops`.
        seeds: int64 (B).
        positions: of the slots, (B, K).
        num_draws: M draws a sequence, side by side.
        token_ids: the tokens (S) that predictions are over; None: all V.
        top: how many of a prediction's tokens go on.
    """

    def __init__(
        self,
        bank: NoiseBank,
        embedding: Tensor,
        ops: Ops,
        seeds: Tensor,
        positions: Tensor,
        num_draws: int,
        token_ids: Tensor | None = None,
        top: int = TOP,
    ) -> None:
        self._bank, self._embedding = bank, embedding
        self._ops, self._token_ids = ops, token_ids
        device = embedding.device
        self._counters = seeds.to(device), positions.to(device), num_draws
        self._picked: Tensor = ops.bank_rows(*self._counters, len(bank.noise))
        num_tokens = len(embedding) if token_ids is None else len(token_ids)
        self._top, self._time = min(top, num_tokens), 0.0
        self._tokens = self._picked.new_empty(len(self._picked), 0)
        self._weights = self._tokens.float()  # of the tokens in the state

    def projections(self, dtype: torch.dtype) -> tuple[Tensor | None, Tensor]:
        """See `State`."""
        bank, time = self._bank, self._time
        if time == 0.0:
            return None, bank.noise[self._picked].to(dtype)
        posterior, state = self._ops.bank_inputs(
            (bank.noise, bank.means[time], bank.log_totals[time]), self._embedding, self._picked,
            (self._tokens, self._weights), self._counters, time, dtype,
        )  # fmt: skip
        return posterior, state

    def advance(self, logits: Tensor, start: float, end: float) -> None:
        """See `State`; chances are not scaled up for the tokens that are left out."""
        logits = logits.to(self._embedding.device)
        best = torch.softmax(logits, dim=-1, dtype=torch.float32).topk(self._top)
        tokens = best.indices if self._token_ids is None else self._token_ids[best.indices]
        old = self._weights.shape[1]
        weights, chances = F.pad(self._weights, (0, self._top)), F.pad(best.values, (old, 0))
        self._weights, self._time = advance(weights, chances, start, end), end
        self._tokens = torch.cat((self._tokens, tokens), dim=1)
