"""What is drawn and what is accepted: one sequence's sampler.

Drafts y are accepted with probability min(1, p(y) / q(y)), and the first that is not is replaced by
a draw from the residual max(p - q, 0), which leaves the target's distribution p whatever the
drafter's q (Leviathan et al., 2023; Chen et al., 2023). Logits processors (penalties, top-k, top-p)
act on both, each time with the tokens that really stand before, so p is the processed target's.

Legend: K slots of a block, m tokens of a pass, p position of the anchor, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from .fused_flashmap import Stream, coin

Processor = Callable[[Tensor, Tensor], Tensor]
_LIKELIEST = 1024  # tokens among which a top-p set is looked for before all are sorted


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        temperature: 0 takes the likeliest.
        processors: transformers' logits processors, before the temperature.
        truncations: those after it, which look at the scores alone (top-k, top-p, min-p).
    """

    temperature: float = 0.0
    processors: tuple[Processor, ...] = ()
    truncations: tuple[Processor, ...] = ()

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the likeliest token of the bare logits is taken."""
        return self.temperature == 0.0 and not self.processors

    def probabilities(self, scores: Tensor) -> Tensor:
        """Float32 distribution (..., V) of `scores` after the processors, at the temperature, or at
        1 where the likeliest are taken."""
        scores = scores.float()
        # Largest score 0: a temperature near 0 must not overflow.
        scaled = (scores - scores.amax(-1, keepdim=True)) / (self.temperature or 1.0)
        return torch.softmax(self.truncated(scaled), dim=-1)

    def truncated(self, scores: Tensor) -> Tensor:
        """Scores (..., V) after the truncations."""
        if not self.truncations:
            return scores
        rows = scores.reshape(-1, scores.shape[-1])
        nothing = torch.zeros(len(rows), 0, dtype=torch.long, device=rows.device)
        for truncation in self.truncations:
            if type(truncation) is TopPLogitsWarper and rows.device.type == "cpu":
                rows = nucleus(truncation, rows)
            else:
                rows = truncation(nothing, rows)
        return rows.view_as(scores)


def nucleus(warper: TopPLogitsWarper, rows: Tensor) -> Tensor:
    """What a top-p `warper` makes of scores (n, V), looked for among the likeliest: to sort the
    whole vocabulary takes a CPU longer than to draft a block. Which of equal scores are in, where
    not all are, is as arbitrary as there."""
    top, tokens = rows.topk(min(_LIKELIEST, rows.shape[-1]))
    chances = (top - rows.logsumexp(dim=-1, keepdim=True)).exp()
    before = chances.cumsum(dim=-1) - chances
    taken = before < warper.top_p
    taken[:, : warper.min_tokens_to_keep] = True
    kept = top.masked_fill(~taken, warper.filter_value)
    out = torch.full_like(rows, warper.filter_value).scatter_(-1, tokens, kept)
    flat = taken[:, -1]  # more may belong
    if bool(flat.any()):
        out[flat] = warper(rows.new_zeros(int(flat.sum()), 0, dtype=torch.long), rows[flat])
    return out


def make_sampling(
    temperature: float,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    processors: tuple[Processor, ...] = (),
) -> Sampling:
    """How `spec_generate`'s arguments ask for tokens.

    Raises ValueError for a truncation out of its range, or without a temperature to sample at.
    """
    made: list[Processor] = []
    for name, value, nothing, warper in (
        ("top_k", top_k, 0, TopKLogitsWarper),
        ("top_p", top_p, 1.0, TopPLogitsWarper),
        ("min_p", min_p, 0.0, MinPLogitsWarper),
    ):
        if value is None or (value == nothing and not isinstance(value, bool)):
            continue
        if isinstance(value, bool) or value != value:
            raise ValueError(f"{name}={value!r} is not valid: pass a number.")
        if temperature == 0.0:
            raise ValueError(
                f"{name}={value} narrows down what is sampled, but temperature 0 takes the"
                f" likeliest token: give a temperature above 0, or leave {name} out."
            )
        make: Any = warper
        try:
            made.append(make(value))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name}={value!r} is not valid: {error}") from error
    return Sampling(temperature, processors, tuple(made))


@dataclass(frozen=True)
class Place:
    """Where processors and criteria find a sequence: those of `generate` may know the batch by its
    rows and count padding as text, so they are shown a batch of this one sequence.

    Attributes:
        row, num_rows: the sequence's number in the batch, and how many there are.
        padding: token ids in front of it.
    """

    row: int = 0
    num_rows: int = 1
    padding: tuple[int, ...] = ()

    def show(self, text: Sequence[int], device: torch.device) -> Tensor:
        """Token ids (num_rows, padding and text)."""
        return torch.tensor([[*self.padding, *text]], device=device).repeat(self.num_rows, 1)

    def pick(self, rows: Tensor) -> Tensor:
        """The sequence's own of `rows`, or the one that stands for all."""
        return rows[self.row if len(rows) > 1 else 0]


class Sampler:
    """Draws and decisions of one sequence, from the seed's own random numbers; where the likeliest
    token of the bare logits is taken, the loop does without.

    Args:
        sampling: how tokens are chosen.
        seed: of every random number.
        text: token ids before the next one, prompt included; grows as tokens are committed.
        place: where processors find the sequence.
    """

    def __init__(
        self, sampling: Sampling, seed: int, text: list[int], place: Place | None = None
    ) -> None:
        self.sampling, self.seed, self.text = sampling, seed, text
        self.place = place or Place()
        self.width = 0  # of the target's logits, once they have been seen

    def first(self, logits: Tensor) -> int:
        """The token after the prompt, from its logits (V)."""
        self.width = len(logits)
        scores = self._processed(logits[None], [])[0]
        if self.sampling.temperature == 0.0:
            return int(scores.argmax())
        return self._draw(self._probabilities(scores), len(self.text), Stream.FIRST)

    def propose(self, logits: Tensor, position: int) -> tuple[list[int], Tensor]:
        """Draft tokens of the slots after `position`, and what they are drawn from, (K, V):
        distributions, or scores where the likeliest are taken of one draw.

        `logits` are (K, V), or (M, K, V) for M noise draws. Their proposal is the mixture of the
        draws' products over slots: Q(v | drafts before) = sum_m r_m q_m(v), where r_m grows with
        how likely draw m thought the drafts before.
        """
        if logits.dim() == 3:
            return self._propose_mixture(logits, position)
        if not self.sampling.processors and self.sampling.temperature > 0.0:
            q_KV = self._probabilities(logits)
            return [self._draft(q, position + slot) for slot, q in enumerate(q_KV, 1)], q_KV
        drafts: list[int] = []
        rows = []
        for slot, scores in enumerate(logits, 1):
            row = self._processed(scores[None], drafts)[0]
            if self.sampling.temperature == 0.0:
                drafts.append(int(row.argmax()))
            else:
                row = self._probabilities(row)
                drafts.append(self._draft(row, position + slot))
            rows.append(row)
        return drafts, torch.stack(rows)

    def _propose_mixture(self, logits_MKV: Tensor, position: int) -> tuple[list[int], Tensor]:
        drafts: list[int] = []
        rows = []
        log_shares = torch.zeros(len(logits_MKV), device=logits_MKV.device)
        for slot in range(logits_MKV.shape[1]):
            q_MV = self._probabilities(self._processed(logits_MKV[:, slot], drafts))
            mixed = torch.softmax(log_shares, dim=0) @ q_MV
            greedy = self.sampling.temperature == 0.0
            token = int(mixed.argmax()) if greedy else self._draft(mixed, position + slot + 1)
            drafts.append(token)
            rows.append(mixed)
            # A draw that ruled the token out is out; were all, they would start anew.
            log_shares = log_shares + q_MV[:, token].log()
            if not bool(torch.isfinite(log_shares).any()):
                log_shares = torch.zeros_like(log_shares)
        return drafts, torch.stack(rows)

    def judge(
        self, drafts: Sequence[int], q_KV: Tensor, logits: Tensor, position: int
    ) -> tuple[int, int]:
        """Number of accepted drafts, and the bonus token after them.

        `q_KV` is what `propose` gave, `logits` (m, V) are the target's at anchor and drafts.
        """
        if self.sampling.temperature == 0.0:
            return self._judge_greedily(drafts, logits)
        p_of = self._target_probabilities(drafts, logits)
        for slot, draft in enumerate(drafts):
            p, q = p_of(slot), q_KV[slot].to(logits.device)
            chance_q, chance_p = torch.stack((q[draft], p[draft])).tolist()
            if not coin(self.seed, position + slot + 1, Stream.ACCEPT) * chance_q < chance_p:
                return slot, self._draw(residual(p, q), position + slot + 1, Stream.BONUS)
        end = len(drafts)
        return end, self._draw(p_of(end), position + end + 1, Stream.BONUS)

    def best_after(self, logits: Tensor, row: int, drafts: Sequence[int]) -> int:
        """The likeliest token after these drafts, whose logits are this row of (m, V)."""
        return int(self._processed(logits[row : row + 1], drafts)[0].argmax())

    def chances(self, logits_MKV: Tensor) -> Tensor:
        """Distributions of the slots in every draw; processors see the text before the block."""
        rows = logits_MKV.flatten(0, 1)
        return self._probabilities(self._processed(rows, [])).view_as(logits_MKV)

    def agreement(self, logits_MV: Tensor, logits: Tensor) -> tuple[float, float]:
        """Chances that the target, whose logits after the anchor are (1, V), accepts the first
        draft: of one draw, on average over M, and of the draws' mixture."""
        q_MV = self._probabilities(self._processed(logits_MV, []))
        p = self._probabilities(self._processed(logits, []))[0].to(q_MV.device)
        if self.sampling.temperature == 0.0:
            token = p.argmax()
            alone, mixed = q_MV.argmax(dim=-1) == token, q_MV.mean(dim=0).argmax() == token
            return float(alone.float().mean()), float(mixed)
        p = p[: q_MV.shape[-1]]
        alone, mixed = torch.minimum(q_MV, p), torch.minimum(q_MV.mean(dim=0), p)
        return float(alone.sum(dim=-1).mean()), float(mixed.sum())

    def _judge_greedily(self, drafts: Sequence[int], logits: Tensor) -> tuple[int, int]:
        for slot in range(len(drafts) + 1):
            best = self.best_after(logits, slot, drafts[:slot])
            if slot == len(drafts) or best != drafts[slot]:
                return slot, best
        raise AssertionError("logits are one more than drafts")

    def _target_probabilities(
        self, drafts: Sequence[int], logits: Tensor
    ) -> Callable[[int], Tensor]:
        """The target's distribution (V) after so many drafts, computed no sooner than needed where
        a processor has to look at the tokens before."""
        if not self.sampling.processors:
            together = self._probabilities(logits)
            return lambda slot: together[slot]
        return lambda slot: self._probabilities(
            self._processed(logits[slot][None], drafts[:slot])[0]
        )

    def _processed(self, logits: Tensor, drafts: Sequence[int]) -> Tensor:
        """Scores (n, V) after the processors, which see the text and the drafts before."""
        if not self.sampling.processors:
            return logits
        before = self.place.show([*self.text, *drafts], logits.device)
        # Processors may remember the target's width, which can exceed the drafter's vocabulary.
        size = logits.shape[-1]
        padded = F.pad(logits.float(), (0, max(self.width - size, 0)), value=float("-inf"))
        rows = []
        for row in padded:
            scores = row.repeat(self.place.num_rows, 1)
            for processor in self.sampling.processors:
                scores = processor(before, scores)
            rows.append(self.place.pick(scores)[:size])
        return torch.stack(rows)

    def scores(self, tokens: Sequence[int], logits: Tensor) -> Tensor:
        """Float32 scores (m, V) that the next `tokens` are chosen by: the target's `logits` (m, V)
        before each, processed and truncated."""
        rows = [self._processed(row[None], tokens[:place]) for place, row in enumerate(logits)]
        return self.sampling.truncated(torch.cat(rows).float())

    def _probabilities(self, scores: Tensor) -> Tensor:
        return self.sampling.probabilities(scores)

    def _draft(self, q: Tensor, position: int) -> int:
        return self._draw(q, position, Stream.DRAFT)

    def _draw(self, weights: Tensor, position: int, stream: Stream) -> int:
        return int(draw(weights, coin(self.seed, position, stream)))


def draw(weights: Tensor, share: Tensor | float) -> Tensor:
    """Smallest token (...) at which the sum of `weights` (..., V) exceeds a share (..., 1) of the
    total."""
    cumulative = weights.double().cumsum(dim=-1)
    reached = (cumulative > share * cumulative[..., -1:]) & (weights > 0)
    return reached.int().argmax(dim=-1)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Weights (..., V) of the token in the place of a rejected draft: max(p - q, 0) for `p` (...,
    V) and `q` over its first tokens."""
    weights = p.clone()
    weights[..., : q.shape[-1]] -= q
    weights = weights.clamp(min=0.0)
    # p and q agree to rounding and the draft was rejected all the same: any choice but p would be
    # biased.
    return torch.where(weights.sum(dim=-1, keepdim=True) > 0, weights, p)


def require_numbers(logits: Tensor, sampling: Sampling) -> None:
    """Raise ValueError if the target's logits (..., V) hold NaN, or infinity when sampling."""
    highest = float(logits.max())
    if highest != highest or (sampling.temperature > 0.0 and highest == float("inf")):
        found = "infinity" if highest == float("inf") else "NaN"
        raise ValueError(
            f"The target's logits hold {found}: check its weights (a truncated download) and its"
            " dtype (float16 may overflow)."
        )
