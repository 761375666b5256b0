"""The rounds of speculative decoding, for a batch of sequences: draft a block, verify it in one
pass of the target, keep what the target agrees with.

At the top of a round both caches hold exactly the tokens before each sequence's anchor, its last
committed token. A sequence's tokens do not depend on what is batched with it: its random numbers
are keyed by its own seed and positions, and nothing of another sequence is ever looked at.

Legend: B sequences, K slots of a block, m tokens of a pass, M draws, V vocabulary, H target hidden
width, n tapped layers.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .draws_flashmap import DrawChoice
from .pace_flashmap import Costs, Pace
from .past_flashmap import FlashMapPast
from .positions_flashmap import common_limit
from .request_flashmap import Drafter, Request
from .runner_flashmap import TargetRunner
from .sampling_flashmap import Sampler, require_numbers
from .target_flashmap import FeatureTap

_MOST_PENDING = 64
FIRST_CAPACITY = 512  # new tokens the drafter's context has room for before it grows


class Commit(NamedTuple):
    """What a round commits for one sequence.

    Attributes:
        row: number of the sequence in the batch.
        tokens: accepted drafts and the bonus token after them.
        accepted: how many of the tokens were drafted.
        logits: the target's (m, V) before each of the tokens.
        scores: what they were chosen by (m, V), float32, where the request keeps it.
    """

    row: int
    tokens: list[int]
    accepted: int
    logits: Tensor
    scores: Tensor | None = None

    def cut(self, size: int) -> "Commit":
        """The first `size` tokens of it."""
        scores = None if self.scores is None else self.scores[:size]
        return Commit(self.row, self.tokens[:size], self.accepted, self.logits[:size], scores)


class _Proposal(NamedTuple):
    """Drafts of every sequence, what each is drawn from, and the first slot's logits (M, V) where
    several draws are mixed."""

    drafts: list[list[int]]
    proposals: list[Tensor]
    firsts: list[Tensor | None]


class DraftLoop:
    """Decodes a batch of prompts; use it inside the tap's context.

    Args:
        drafter, target: the pair.
        tap: the entered feature tap of the target.
        request: what is asked for.
    """

    runner_class: type[TargetRunner] = TargetRunner

    def __init__(
        self, drafter: Drafter, target: PreTrainedModel, tap: FeatureTap, request: Request
    ) -> None:
        prompts, drafting = request.prompts, request.drafting
        self._drafter, self._target, self._request = drafter, target, request
        self._sampling, self._drafting = request.sampling, drafting
        self._embed_tokens = target.get_input_embeddings()
        self._lm_head = target.get_output_embeddings()
        self._limit = common_limit(target, list(map(len, prompts)))
        self._runner = self.runner_class.checked(target, tap)
        self._past = FlashMapPast() if request.past is None else request.past
        room = max(map(len, prompts)) + min(request.max_new_tokens, FIRST_CAPACITY)
        self._cache = drafter.new_cache(len(prompts), room + drafter.config.block_size + 1)
        self._rows = list(range(len(prompts)))
        self._samplers = [
            Sampler(request.sampling, seed, prompt.tolist(), place)
            for seed, prompt, place in zip(request.seeds, prompts, request.places, strict=True)
        ]
        self._paces: list[Pace] | None = None
        if drafting.costs is not None:
            self._paces = [Pace(self._round_costs(drafting.costs)) for _ in prompts]
        self._choices: list[DrawChoice] | None = None
        if drafting.choice is not None:
            block_size = drafter.config.block_size
            self._choices = [DrawChoice(drafting.choice, block_size) for _ in prompts]
        # Features (B, 1, n H) of rounds without a draft, which no draft has needed yet.
        self._pending: list[Tensor] = []
        self._most_pending = _MOST_PENDING if request.past is None else 0

    def start(self) -> list[Commit]:
        """Run the prompts; commits the token after each, which costs no verification pass."""
        prompts = self._request.prompts
        kept = self._past.common(self._samplers[0].text, self._target, self._limit)
        num_held, self._past.text = self._past.length, []
        if kept:
            cache, self._cache = self._past.caches()
            self._cache.length = kept
            logits, features = self._runner.resume(cache, num_held, kept, prompts[0])
        else:
            logits, features = self._runner.prefill(prompts)
        require_numbers(logits, self._sampling)
        firsts = [sampler.first(row) for sampler, row in zip(self._samplers, logits, strict=True)]
        self._fill_context(features, [len(ids) - kept for ids in prompts])
        caches = self._runner.cache, self._cache
        self._past.hold(self._drafter, self._target, caches, self._limit)
        return self._commit([[] for _ in firsts], firsts, logits.unsqueeze(1))

    def _fill_context(self, features: Tensor, counts: list[int]) -> None:
        """Append the first so many of each sequence's features (B, P, n H) to the context."""
        self._cache.reserve(self._cache.length + features.shape[1])
        self._drafter.extend_context(self._cache, features, counts)

    def close(self) -> None:
        """Give back what others may use; this loop holds nothing of the kind."""

    def step(self) -> list[Commit]:
        """One round: one draft and one pass of the target for all sequences that go on."""
        return self._round(self._depths())

    def _round(self, depths: list[int]) -> list[Commit]:
        """A round that verifies blocks, of every sequence as far as its depth."""
        self._past.text = []
        drafts, proposals, firsts = self._propose(depths)
        passed = [
            [sampler.text[-1], *draft]
            for sampler, draft in zip(self._samplers, drafts, strict=True)
        ]
        logits, features = self._runner.verify(torch.tensor(passed), self._limit)
        require_numbers(logits, self._sampling)
        self._note_draws(firsts, logits)
        drafts = [draft[:depth] for draft, depth in zip(drafts, depths, strict=True)]
        judged = self._judge(drafts, proposals, logits)
        counts = [accepted + 1 for accepted, _ in judged]
        if any(depths):
            self._drafter.extend_context(self._cache, features[:, : max(counts)], counts)
        else:
            self._pending.append(features)
            if len(self._pending) > self._most_pending:
                self._settle()
        self._runner.keep(counts)
        accepted = [draft[:count] for draft, (count, _) in zip(drafts, judged, strict=True)]
        return self._commit(accepted, [bonus for _, bonus in judged], logits)

    def sampler(self, row: int) -> Sampler:
        """That of a running sequence; it knows the text so far."""
        return self._samplers[self._rows.index(row)]

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with the sequences of these numbers alone."""
        places = [place for place, row in enumerate(self._rows) if row in rows]
        if len(places) == len(self._rows) or not places:
            return
        self._settle()
        self._narrow(places)
        self._runner.select(places)
        self._cache.keep(places)

    def _narrow(self, places: list[int]) -> None:
        """Keep what is known of the sequences at these places."""
        self._rows = [self._rows[place] for place in places]
        self._samplers = [self._samplers[place] for place in places]
        if self._paces is not None:
            self._paces = [self._paces[place] for place in places]
        if self._choices is not None:
            self._choices = [self._choices[place] for place in places]

    def _round_costs(self, costs: Costs) -> dict[int, float]:
        """What a round costs by how many drafts deep it verifies."""
        return {depth: costs.round(depth) for depth in range(self._drafter.config.block_size + 1)}

    def _depths(self) -> list[int]:
        """How many drafts deep each sequence is verified: a whole block, or what is worth it, as
        far as the target has positions."""
        rooms = [self._drafter.config.block_size] * len(self._rows)
        if self._paces is not None:
            rooms = [pace.choose() for pace in self._paces]
        if self._limit is None:
            return rooms
        return [
            min(room, self._limit - position - 1)
            for room, position in zip(rooms, self._positions, strict=True)
        ]

    @property
    def _positions(self) -> list[int]:
        """Position of every sequence's anchor."""
        return [len(sampler.text) - 1 for sampler in self._samplers]

    def _settle(self) -> None:
        """Bring the drafter's context up to the anchors."""
        if self._pending:
            self._cache.reserve(self._cache.length + len(self._pending))
            self._drafter.extend_context(self._cache, torch.cat(self._pending, dim=1))
            self._pending = []

    def _commit(
        self, accepted: list[list[int]], bonuses: list[int], logits: Tensor | list[Tensor]
    ) -> list[Commit]:
        """`logits` (B, m, V) are the target's along what is accepted."""
        commits = []
        for pace, drafts in zip(self._paces or (), accepted, strict=bool(self._paces)):
            pace.note(len(drafts))
        for row, sampler, drafts, bonus, logits_mV in zip(
            self._rows, self._samplers, accepted, bonuses, logits, strict=True
        ):
            tokens = [*drafts, bonus]
            before = logits_mV[: len(tokens)]
            scores = sampler.scores(tokens, before) if self._request.keeps_scores else None
            sampler.text += tokens
            commits.append(Commit(row, tokens, len(drafts), before, scores))
        self._past.text = self._samplers[0].text[:-1]
        return commits

    def _draft(self, num_draws: int) -> Tensor:
        """Logits (B, K, V) of a block after every anchor, or (B, M, K, V) of M draws."""
        self._settle()
        cache = self._cache
        cache.reserve(cache.length + self._drafter.config.block_size + 1)
        return self._drafter.draft(
            torch.tensor([one.text[-1] for one in self._samplers], device=self._drafter.device),
            cache,
            self._embed_tokens,
            self._lm_head,
            self._drafting.num_steps,
            seed=[sampler.seed for sampler in self._samplers],
            num_draws=num_draws,
            jump_bank_size=self._drafting.jump_bank_size,
        )

    def _propose(self, depths: list[int]) -> _Proposal:
        """Drafts of every sequence, as many as the longest takes."""
        size = max(depths)
        if size == 0:
            nothing: list[list[int]] = [[] for _ in depths]
            return _Proposal(nothing, [torch.empty(0)] * len(depths), [None] * len(depths))
        num_draws = [self._drafting.num_draws] * len(depths)
        if self._choices is not None:
            num_draws = [
                choice.choose() if depth else 1
                for choice, depth in zip(self._choices, depths, strict=True)
            ]
        block = self._draft(max(num_draws))[..., :size, :]
        if self._sampling.is_plain_greedy and max(num_draws) == 1:
            return _Proposal(block.argmax(dim=-1).tolist(), list(block), [None] * len(depths))
        rows = list(block)
        if max(num_draws) > 1:
            rows = [row if own > 1 else row[0] for row, own in zip(rows, num_draws, strict=True)]
        found = [
            sampler.propose(row, position)
            for sampler, row, position in zip(self._samplers, rows, self._positions, strict=True)
        ]
        firsts = [row[:, 0] if row.dim() == 3 else None for row in rows]
        return _Proposal([drafts for drafts, _ in found], [q for _, q in found], firsts)

    def _note_draws(self, firsts: list[Tensor | None], logits: Tensor) -> None:
        """Tell the choices what several draws would have been worth one by one."""
        for choice, sampler, first, row in zip(
            self._choices or (), self._samplers, firsts, logits, strict=bool(self._choices)
        ):
            if first is not None:
                choice.note(*sampler.agreement(first, row[:1]))

    def _judge(
        self, drafts: list[list[int]], proposals: list[Tensor], logits: Tensor
    ) -> list[tuple[int, int]]:
        """Accepted drafts and bonus token of every sequence."""
        if self._sampling.is_plain_greedy:
            judged = []
            for draft, best in zip(drafts, logits.argmax(dim=-1).tolist(), strict=True):
                count = next((k for k, token in enumerate(draft) if token != best[k]), len(draft))
                judged.append((count, best[count]))
            return judged
        return [
            sampler.judge(draft, q, row, position)
            for sampler, draft, q, row, position in zip(
                self._samplers, drafts, proposals, logits, self._positions, strict=True
            )
        ]
