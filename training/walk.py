"""Acceptance lengths without decoding: the drafter walks along texts that the target wrote.

Speculative decoding commits the target's own text whatever is drafted, and a draft depends on the
committed text alone. So along a given text the rounds of the real loop can be replayed for many
texts at once: at temperature 0 exactly, since a slot is accepted where the draft equals the text;
above 0 in distribution, since a committed token y was an accepted draft with probability
min(1, q(y) / p(y)), given the text.

Legend: B texts, T tokens of a text, K slots, M noise draws, V vocabulary, n H features.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from flashmap.kernels.fused_flashmap import seeded_normal
from flashmap.modeling.flow_flashmap import advance
from flashmap.modeling.modeling_flashmap import FlashMapDraftModel

from .blocks import Context, Target, build_context, encode_documents
from .checkpoints import seeded
from .documents import Documents
from .losses import mixture_distribution, mixture_nll

TEXTS_AT_ONCE = 64
TOKENS_AT_ONCE = 2**14  # whose target logits are alive at once


@dataclass(frozen=True)
class Walk:
    """Rounds along texts.

    Attributes:
        lengths: tokens committed by each round of each text, the bonus token included.
        distinct_first: different tokens in the first slots of all rounds: drafted, and in the
            texts.
    """

    lengths: list[list[int]]
    distinct_first: tuple[int, int]

    @property
    def num_rounds(self) -> int:
        """Rounds over all texts."""
        return sum(map(len, self.lengths))

    @property
    def acceptance_length(self) -> float | None:
        """Tokens a round; None if there was no round."""
        return mean_length(self.lengths)


def mean_length(lengths: list[list[int]]) -> float | None:
    """Tokens a round over some texts; None if there was no round."""
    rounds = sum(map(len, lengths))
    return sum(map(sum, lengths)) / rounds if rounds else None


def slot_rates(lengths: list[list[int]], block_size: int) -> list[float | None]:
    """Share of slots k = 1, ..., K that were accepted where the ones before were; None where none
    was reached."""
    flat = [length - 1 for text in lengths for length in text]
    rates: list[float | None] = []
    for slot in range(block_size):
        reached = sum(accepted >= slot for accepted in flat)
        rates.append(sum(accepted > slot for accepted in flat) / reached if reached else None)
    return rates


@torch.no_grad()
def walk(
    drafter: FlashMapDraftModel,
    target: Target,
    documents: Documents,
    *,
    temperature: float,
    num_steps: int | None = None,
    num_draws: int = 1,
    seed: int = 0,
    max_new_tokens: int | None = None,
) -> Walk:
    """Walk along every document's answer.

    Args:
        drafter: in evaluation mode.
        target: the target that wrote the answers.
        documents: texts sampled at `temperature`.
        temperature: 0 for greedy texts.
        num_steps: jumps a draft; None takes the drafter's configuration.
        num_draws: noise draws whose mixture is the proposal.
        seed: of what is accepted; text i draws the noise of seed + i.
        max_new_tokens: where to stop in longer answers; the round that crosses it counts in full,
            as in the real loop. None: at the end of each answer, which cuts its last round short.
    """
    order = documents.lengths.argsort(descending=True)
    lengths: list[list[int]] = [[] for _ in range(len(documents))]
    drafted: set[int] = set()
    spoken: set[int] = set()
    grid = drafter.config.grid(num_steps)
    device = target.embedding.device
    seeds, coins = seed + torch.arange(len(documents)), seeded(seed, device)
    for rows in order.split(TEXTS_AT_ONCE):
        chosen = documents.select(rows)
        walker = _Walker(
            drafter,
            target,
            chosen,
            temperature,
            grid,
            num_draws,
            seeds[rows],
            coins,
            max_new_tokens,
        )
        for active, accepted, first, wanted in walker.rounds():
            for row, length in zip(rows[active].tolist(), accepted, strict=True):
                lengths[row].append(length)
            drafted.update(first)
            spoken.update(wanted)
    return Walk(lengths, (len(drafted), len(spoken)))


class _Walker:
    """Walks along some texts, all at once, a round at a time."""

    def __init__(
        self,
        drafter: FlashMapDraftModel,
        target: Target,
        documents: Documents,
        temperature: float,
        grid: list[float],
        num_draws: int,
        seeds: Tensor,
        coins: torch.Generator,
        max_new_tokens: int | None,
    ) -> None:
        device = target.embedding.device
        self.drafter, self.target, self.temperature = drafter, target, temperature
        self.grid, self.num_draws = grid, num_draws
        self.block_size = drafter.config.block_size
        self.ends = documents.lengths.to(device)
        self.anchors = documents.prompt_lengths.to(device).clone()
        # The last anchor of a round: it commits at least one token, and the prompt's pass did one.
        self.last = self.ends - 1
        if max_new_tokens is not None:
            self.last = torch.minimum(self.last, self.anchors + max_new_tokens - 1)
        self.seeds, self.coins = seeds.to(device), coins
        length = int(documents.lengths.max())
        self.ids = torch.zeros(len(documents), length, dtype=torch.long, device=device)
        for row, (start, end) in enumerate(pairwise(documents.offsets.tolist())):
            text = documents.tokens[start:end].to(torch.int32)
            self.ids[row, : end - start] = text.to(device)
        features, self.chances = self._read()
        self.entries = encode_documents(drafter, features)

    def _read(self) -> tuple[Tensor, Tensor]:
        """Features (B, T, n H), and the target's probability (B, T) of every token."""
        features, chances = [], []
        for ids in self.ids.split(max(1, TOKENS_AT_ONCE // self.ids.shape[1])):
            found, logits = self.target.read(self.drafter, ids, logits=self.temperature > 0)
            features.append(found.to(self.drafter.dtype))
            chance = torch.ones(ids.shape, device=ids.device)
            if logits is not None:
                log_p = torch.log_softmax(logits[:, :-1].float() / self.temperature, dim=-1)
                chance[:, 1:] = log_p.gather(2, ids[:, 1:, None])[..., 0].exp()
            chances.append(chance)
        return torch.cat(features), torch.cat(chances)

    def rounds(self) -> Iterator[tuple[Tensor, list[int], list[int], list[int]]]:
        """For every round: the texts still walked on, the tokens it commits for each, and the first
        slots' drafted and real tokens."""
        while True:
            active = (self.anchors < self.last).nonzero()[:, 0]
            if not len(active):
                return
            accepted, first, wanted = self._round(active)
            left = self.ends[active] - 1 - self.anchors[active]
            committed = torch.minimum(accepted + 1, left)
            self.anchors[active] += committed
            yield active.cpu(), committed.tolist(), first.tolist(), wanted.tolist()

    def _round(self, active: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Drafts accepted at the anchors of the texts `active`, and both first tokens."""
        anchors = self.anchors[active, None]
        positions = anchors + torch.arange(1, self.block_size + 1, device=anchors.device)
        inside = positions < self.ends[active, None]
        places = positions.clamp(max=self.ids.shape[1] - 1)
        tokens = self.ids[active].gather(1, places)
        logits = self._draft(active, positions)
        scaled = logits.float() / (self.temperature or 1.0)
        q = self._proposal(scaled, tokens)
        first = q[:, 0].argmax(dim=-1)
        if self.temperature == 0.0:
            taken = q.argmax(dim=-1) == tokens
        else:
            proposed = q.gather(2, tokens[..., None])[..., 0]
            chance = proposed / self.chances[active].gather(1, places).clamp(min=1e-30)
            coins = torch.rand(chance.shape, generator=self.coins, device=chance.device)
            taken = coins < chance
        accepted = (taken & inside).long().cumprod(dim=-1).sum(dim=-1)
        return accepted, first, tokens[:, 0]

    def _proposal(self, scaled: Tensor, tokens: Tensor) -> Tensor:
        """Distributions (B, K, V) of the slots given the tokens before, of logits (B, M, K, V)."""
        if self.num_draws == 1:
            return torch.softmax(scaled[:, 0], dim=-1)
        picked = tokens[:, None, :, None].expand(-1, self.num_draws, -1, 1)
        log_q = torch.log_softmax(scaled, dim=-1).gather(3, picked)[..., 0]
        return mixture_distribution(scaled, mixture_nll(log_q).shares)

    def _draft(self, active: Tensor, positions: Tensor) -> Tensor:
        """Draft logits (B, M, K, V) of the blocks at these positions (B, K)."""
        anchors = positions[:, :1] - 1
        embeds = self.target.embed(self.ids[active].gather(1, anchors))
        entries = [(key[active], value[active]) for key, value in self.entries]
        context = build_context(self.drafter, entries, anchors, embeds)
        draws = range(self.num_draws)
        return torch.stack([self._jumps(active, positions, context, m) for m in draws], dim=1)

    def _jumps(self, active: Tensor, positions: Tensor, context: Context, draw: int) -> Tensor:
        """Logits (B, K, V) after the grid's jumps from one noise draw, as `draft` makes them."""
        model, embedding, seeds = self.drafter, self.target.embedding, self.seeds[active]
        several = len(self.grid) > 2
        width = model.config.vocab_size if several else model.config.target_hidden_size
        state = seeded_normal(seeds, positions, width, draw)
        for s, t in pairwise(self.grid):
            if several:
                inputs = model.embed_state(state, s, t, embedding)
            else:
                uniform, factor = model.target_constants(embedding)
                inputs = model.mix_state(uniform, state.to(model.dtype) @ factor.T, s, t)
            hidden = model(inputs, model.time_conditioning(s, t), positions, *context)
            logits = self.target.head(hidden.to(embedding.dtype))
            if t < 1.0:
                delta = torch.softmax(logits, dim=-1, dtype=torch.float32)
                state = advance(state, delta, s, t)
        return logits
