"""The rounds of speculative decoding, for a batch of sequences: draft a block, verify it in one
pass of the target, keep what the target agrees with.

At the top of a round both caches hold exactly the tokens before each sequence's anchor, its last
committed token. A sequence's tokens do not depend on what is batched with it: its random numbers
are keyed by its own seed and positions, and nothing of another sequence is ever looked at.

Legend: B sequences, K slots of a block, p position of an anchor, V vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .request_flashmap import Drafter, Request
from .runner_flashmap import TargetRunner
from .sampling_flashmap import Sampler, require_numbers
from .target_flashmap import FeatureTap, common_limit

_FIRST_CAPACITY = 512  # new tokens the drafter's context has room for before it grows


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


class DraftLoop:
    """Decodes a batch of prompts; use it inside the tap's context.

    Args:
        drafter, target: the pair.
        tap: the entered feature tap of the target.
        request: what is asked for.
    """

    def __init__(
        self, drafter: Drafter, target: PreTrainedModel, tap: FeatureTap, request: Request
    ) -> None:
        prompts = request.prompts
        self._drafter, self._request, self._sampling = drafter, request, request.sampling
        self._embed_tokens = target.get_input_embeddings()
        self._lm_head = target.get_output_embeddings()
        self._limit = common_limit(target, list(map(len, prompts)))
        self._runner = TargetRunner.checked(target, tap)
        room = max(map(len, prompts)) + min(request.max_new_tokens, _FIRST_CAPACITY)
        self._cache = drafter.new_cache(len(prompts), room + drafter.config.block_size + 1)
        self._rows = list(range(len(prompts)))
        self._samplers = [
            Sampler(request.sampling, seed, prompt.tolist(), place)
            for seed, prompt, place in zip(request.seeds, prompts, request.places, strict=True)
        ]

    def start(self) -> list[Commit]:
        """Run the prompts; commits the token after each, which costs no verification pass."""
        logits, features = self._runner.prefill(self._request.prompts)
        require_numbers(logits, self._sampling)
        firsts = [sampler.first(row) for sampler, row in zip(self._samplers, logits, strict=True)]
        lengths = [len(prompt) for prompt in self._request.prompts]
        self._drafter.extend_context(self._cache, features, lengths)
        return self._commit([[] for _ in firsts], firsts, logits.unsqueeze(1))

    def step(self) -> list[Commit]:
        """One round: one draft and one pass of the target for all sequences that go on."""
        block_size, cache = self._drafter.config.block_size, self._cache
        cache.reserve(cache.length + block_size + 1)
        anchors = [sampler.text[-1] for sampler in self._samplers]
        block = self._drafter.draft(
            torch.tensor(anchors, device=self._drafter.device),
            cache,
            self._embed_tokens,
            self._lm_head,
            self._request.num_steps,
            seed=[sampler.seed for sampler in self._samplers],
            num_draws=self._request.num_draws,
        )
        drafts, proposals = self._propose(block)
        passed = [[anchor, *draft] for anchor, draft in zip(anchors, drafts, strict=True)]
        logits, features = self._runner.verify(torch.tensor(passed), self._limit)
        require_numbers(logits, self._sampling)
        rooms = [self._room(position) for position in cache.lengths]
        drafts = [draft[:room] for draft, room in zip(drafts, rooms, strict=True)]
        judged = self._judge(drafts, proposals, logits)
        counts = [accepted + 1 for accepted, _ in judged]
        self._drafter.extend_context(cache, features[:, : max(counts)], counts)
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
        self._rows = [self._rows[place] for place in places]
        self._samplers = [self._samplers[place] for place in places]
        self._runner.select(places)
        self._cache.keep(places)

    def _commit(
        self, accepted: list[list[int]], bonuses: list[int], logits: Tensor
    ) -> list[Commit]:
        commits = []
        for row, sampler, drafts, bonus, logits_KV in zip(
            self._rows, self._samplers, accepted, bonuses, logits, strict=True
        ):
            tokens = [*drafts, bonus]
            before = logits_KV[: len(tokens)]
            scores = sampler.scores(tokens, before) if self._request.keeps_scores else None
            sampler.text += tokens
            commits.append(Commit(row, tokens, len(drafts), before, scores))
        return commits

    def _room(self, position: int) -> int:
        """Drafts after an anchor that the target has positions for."""
        block_size = self._drafter.config.block_size
        return block_size if self._limit is None else min(block_size, self._limit - position - 1)

    def _propose(self, block: Tensor) -> tuple[list[list[int]], Tensor]:
        """Drafts of every sequence, and what they are drawn from, for logits (B, K, V), or (B, M,
        K, V) of M draws."""
        size = min(block.shape[-2], max(self._room(position) for position in self._cache.lengths))
        block = block[..., :size, :]
        if self._sampling.is_plain_greedy and self._request.num_draws == 1:
            best: list[list[int]] = block.argmax(dim=-1).tolist()
            return best, block
        found = [
            sampler.propose(row, position)
            for sampler, row, position in zip(
                self._samplers, block, self._cache.lengths, strict=True
            )
        ]
        return [drafts for drafts, _ in found], torch.stack([q for _, q in found])

    def _judge(
        self, drafts: list[list[int]], proposals: Tensor, logits: Tensor
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
                self._samplers, drafts, proposals, logits, self._cache.lengths, strict=True
            )
        ]
