"""The decoding loop with its rounds in CUDA graphs: a round is one launch and one tensor that the
host reads.

The prompt runs as in the plain loop; then both caches move into a round with room for a fixed
number of entries, and into a larger one when a text outgrows it, so that short texts do not pay for
long ones. Rounds are kept for later calls. What cannot be captured goes on in the plain loop.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .constants_flashmap import TensorMemo
from .loop_flashmap import FIRST_CAPACITY, Commit, DraftLoop
from .obstacles_flashmap import give_up, truncation_key
from .past_flashmap import FlashMapPast
from .request_flashmap import Drafter, Request
from .round_flashmap import Round, RoundKey
from .sampling_flashmap import Sampling, require_numbers
from .static_flashmap import room_for
from .step_flashmap import FusedStep
from .target_flashmap import FeatureTap

ROOMS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)  # entries of a round's caches
_MOST_ROUNDS = 6  # that are kept
_FAILURES = (TypeError, ValueError, AttributeError, IndexError, KeyError, RuntimeError)


class RoundStore:
    """Captured rounds of one drafter and the target it was last used with, kept until the weights
    of either change or the target is gone. A copy or a pickle is empty."""

    def __init__(self) -> None:
        self._memo = TensorMemo()

    def clear(self) -> None:
        """Forget every round."""
        self._memo.clear()

    def take(
        self,
        drafter: Any,
        target: PreTrainedModel,
        tap: FeatureTap,
        key: RoundKey,
        sampling: Sampling,
        like: Sequence[tuple[Tensor, Tensor]],
    ) -> Round:
        """A round that nobody uses, captured on a GPU; set its `is_taken` to False after use.

        Raises what speaks against it.
        """
        sources = [*drafter.parameters(), *target.parameters()]
        rounds: dict[RoundKey, Round] = self._memo.get("rounds", sources, dict)
        if not rounds:
            weakref.finalize(target, _forget, weakref.ref(self._memo))
        found = rounds.pop(key, None)
        with torch.inference_mode(False), torch.no_grad():
            if found is None or found.is_taken:
                step = self._memo.get(
                    ("step", key.num_steps, key.jump_bank_size),
                    sources,
                    lambda: _step(drafter, target, key),
                )
                found = Round(drafter, step, key, sampling, like)
            found.prepare(target, tap)
        found.is_taken = True
        rounds[key] = found
        if len(rounds) > _MOST_ROUNDS:
            del rounds[next(iter(rounds))]
        return found


def _forget(memo: "weakref.ref[TensorMemo]") -> None:
    kept = memo()
    if kept is not None:
        kept.clear()


def _step(drafter: Any, target: PreTrainedModel, key: RoundKey) -> FusedStep:
    embedding = drafter.dense_embedding(target.get_input_embeddings())
    lm_head: Any = target.get_output_embeddings()
    return FusedStep(
        drafter, embedding, lm_head, ROOMS[-1], num_steps=key.num_steps,
        jump_bank_size=key.jump_bank_size,
    )  # fmt: skip


class GraphLoop(DraftLoop):
    """A `DraftLoop` whose rounds are captured where they can be."""

    def __init__(
        self, drafter: Drafter, target: PreTrainedModel, tap: FeatureTap, request: Request
    ) -> None:
        super().__init__(drafter, target, tap, request)
        self._tap = tap
        self._static: Round | None = None
        self._places: list[int] = []  # the running sequences' places in the round
        self._gave_up = False

    def step(self) -> list[Commit]:
        """One round of all sequences that go on."""
        found = self._fitting_round()
        if found is None:
            return super().step()
        results = found.run()
        results = [results[place] for place in self._places]
        require_numbers(torch.tensor([one.highest for one in results]), self._sampling)
        return self._commit(
            [one.tokens[:-1] for one in results],
            [one.tokens[-1] for one in results],
            [found.logits[place] for place in self._places],
        )

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with the sequences of these numbers alone."""
        if self._static is None:
            super().keep(rows)
            return
        kept = [place for place, row in enumerate(self._rows) if row in rows]
        if 0 < len(kept) < len(self._rows):
            places = [self._places[place] for place in kept]
            self._static.stop(sorted(set(self._places) - set(places)))
            self._places = places
            self._narrow(kept)

    def close(self) -> None:
        """Let others have the round."""
        if self._static is not None:
            self._static.is_taken, self._static = False, None

    def _fitting_round(self) -> Round | None:
        """A round with room for the next blocks; None: the plain loop goes on."""
        needed = max(self._positions) + self._drafter.config.block_size + 1
        if self._gave_up or (self._static is not None and self._static.capacity >= needed):
            return self._static
        wanted = needed
        if self._static is None:
            wanted += min(self._request.max_new_tokens, FIRST_CAPACITY)
        capacity = room_for(max(needed, min(wanted, ROOMS[-1])), ROOMS)
        if capacity is None:
            self._go_plain(f"a text takes {needed} cache entries, the largest graph {ROOMS[-1]}")
            return None
        try:
            self._move(capacity)
        except torch.cuda.OutOfMemoryError:
            self._go_plain(f"the GPU has no memory left for {capacity} cache entries in a graph")
        except _FAILURES as error:
            self._go_plain(f"{type(self._target).__name__}: {type(error).__name__}: {error}")
        return self._static

    def _move(self, capacity: int) -> None:
        """Move into a round of this capacity."""
        old, sampling = self._static, self._sampling
        entries = self._runner.entries() if old is None else old.entries
        key = RoundKey(
            len(entries[0][0]), capacity, self._drafting.num_steps, self._drafting.jump_bank_size,
            self._limit, sampling.temperature, truncation_key(sampling) or (),
        )  # fmt: skip
        new = self._drafter.round_store.take(
            self._drafter, self._target, self._tap, key, sampling, entries
        )
        if old is not None:
            new.take_over(old)
            old.is_taken = False
        else:
            anchors = [sampler.text[-1] for sampler in self._samplers]
            seeds = [sampler.seed for sampler in self._samplers]
            new.load(entries, self._cache.kv, anchors, self._positions, seeds)
            self._places = list(range(len(anchors)))
            self._let_go()
        self._static = new

    def _let_go(self) -> None:
        """Free the plain loop's caches."""
        self._past = FlashMapPast()
        self._runner = self.runner_class(self._target, self._tap)
        self._cache = self._drafter.new_cache(0, 0)

    def _go_plain(self, reason: str) -> None:
        """Go on without graphs; what a round holds is computed anew.

        Raises ValueError where graphs had to be.
        """
        give_up(self._request.graphs, reason)
        self._gave_up = True
        if self._static is not None:
            self.close()
            texts = [torch.tensor(sampler.text[:-1]) for sampler in self._samplers]
            self._cache = self._drafter.new_cache(len(texts), 0)
            self._fill_context(self._runner.prefill(texts)[1], list(map(len, texts)))
