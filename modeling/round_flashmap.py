"""One round of speculative decoding in tensors of fixed shape and place: draft, verify, accept,
commit. Nothing in it waits for the device or depends on its numbers, so on a GPU it is captured in
a CUDA graph once and replayed; elsewhere it runs as it is written.

A round begins by bringing what the last one committed into the drafter's context, in one product
with the anchors. The host reads one tensor a round.

Legend: B sequences, K slots, V vocabulary, T room for entries, n H features.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache, PreTrainedModel

from .acceptance_flashmap import STREAMS, coin_table, judge, judge_greedily
from .fusion_flashmap import fused_modules
from .runner_flashmap import TargetRunner
from .sampling_flashmap import Sampling, draw
from .static_flashmap import copy_entries, new_entries, static_attention, static_cache
from .step_flashmap import ContextRows, DenseContext, FusedStep
from .target_flashmap import FeatureTap, call_module, forwards

Entries = Sequence[tuple[Tensor, Tensor]]
_WARM_UPS = 2


class RoundKey(NamedTuple):
    """What tells a captured round of a pair from another; `capacity` is T, `limit` the number of
    positions that the target has."""

    batch_size: int
    capacity: int
    num_steps: int | None
    jump_bank_size: int
    limit: int | None
    temperature: float
    truncations: tuple[Any, ...]


class Result(NamedTuple):
    """What a round did for one sequence: its tokens, drafts first, and its largest logit."""

    tokens: list[int]
    highest: float


class StaticRunner(TargetRunner):
    """A `TargetRunner` on a static cache, for passes of `num_tokens` a sequence."""

    def __init__(
        self, target: PreTrainedModel, tap: FeatureTap, cache: Cache, num_tokens: int
    ) -> None:
        super().__init__(target, tap)
        self._cache = cache  # type: ignore[assignment]
        self._fused = fused_modules(target, num_tokens)

    def verify_static(
        self, tokens: Tensor, lengths: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Logits (B, m, V) and features (B, m, n H) of `tokens` (B, m) at `positions` (B, m), after
        `lengths` (B) entries."""
        count = tokens.shape[1]
        with static_attention(self._target), forwards(self._fused):
            logits = self._forward(
                tokens, count, lengths[:, None, None, None], position_ids=positions
            )
        return logits, self._features(count)


class Round:
    """A round of a batch, its caches and its state.

    Args:
        drafter: the drafter.
        step: its weights, folded with the target's.
        key: shapes and settings.
        sampling: how tokens are chosen, as `key` says.
        like: the target's keys and values (B, heads, any, d), a pair a layer.
    """

    def __init__(
        self, drafter: Any, step: FusedStep, key: RoundKey, sampling: Sampling, like: Entries
    ) -> None:
        self.capacity, self.is_taken = key.capacity, False
        self._limit, self._sampling, self._step = key.limit, sampling, step
        device, rows, size = drafter.device, key.batch_size, drafter.config.block_size + 1

        def integers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.long, device=device)

        self._block = torch.arange(size, device=device)
        # The anchors, their positions, which sequences run, and the seeds of their numbers.
        self._anchors, self._lengths = integers(rows), integers(rows)
        self._running, self._seeds = integers(rows), integers(rows)
        # Features of the last pass, the position of the first, and how many were committed.
        self._starts, self._counts = integers(rows), integers(rows)
        shape = (rows, size, drafter.fc.in_features)
        self._features = torch.zeros(shape, dtype=drafter.dtype, device=device)
        self._coins = torch.zeros(
            (len(STREAMS), rows, key.capacity + size), dtype=torch.float64, device=device
        )
        self._places = integers(rows, size)
        self.entries = new_entries(like, key.capacity)
        self._cache = static_cache(self.entries, self._places)
        self._context = DenseContext(step, drafter.new_cache(rows, key.capacity).kv, self._lengths)
        self.logits = torch.empty(0)  # (B, K + 1, V) of the newest pass
        self._found = torch.zeros((rows, size + 2), dtype=torch.float64, device=device)
        self._runner: StaticRunner | None = None
        self._embed_tokens: Any = None
        self._graph: torch.cuda.CUDAGraph | None = None

    # Use

    def prepare(self, target: PreTrainedModel, tap: FeatureTap) -> None:
        """Try the round, and capture it on a GPU, unless that is done; its state is undefined
        afterwards.

        Raises RuntimeError where it cannot be captured, or whatever the target raises.
        """
        if self._graph is not None:
            return
        self._runner = StaticRunner(target, tap, self._cache, len(self._block))
        self._embed_tokens = target.get_input_embeddings()
        for tensor in (self._lengths, self._starts, self._counts):
            tensor.zero_()
        if self._lengths.device.type != "cuda":
            self._play()
            return
        with torch.cuda.device(self._lengths.device):
            self._graph = self._captured()
        self._runner = self._embed_tokens = None  # a graph does not keep the target alive

    def _captured(self) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # what compiles or allocates at first use does so here
            for _ in range(_WARM_UPS):
                self._play()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            self._play()
        return graph

    def load(
        self,
        entries: Entries,
        kv: Tensor,
        anchors: Sequence[int],
        lengths: Sequence[int],
        seeds: Sequence[int],
    ) -> None:
        """Begin with the target's `entries`, the drafter's context `kv`, every anchor, the
        number of tokens before each, and every seed."""
        self._copy_caches(entries, kv)
        for tensor, numbers in (
            (self._anchors, anchors), (self._lengths, lengths), (self._starts, lengths),
            (self._seeds, seeds),
        ):  # fmt: skip
            tensor.copy_(torch.tensor(numbers))
        self._running.fill_(1)
        self._counts.zero_()
        self._toss()

    def take_over(self, other: "Round") -> None:
        """Go on where a round of another capacity is."""
        self._copy_caches(other.entries, other._context.kv)
        for name in (
            "_anchors", "_lengths", "_running", "_seeds", "_starts", "_counts", "_features"
        ):  # fmt: skip
            getattr(self, name).copy_(getattr(other, name))
        self._toss()

    def stop(self, rows: Sequence[int]) -> None:
        """Let these sequences rest: they cost what they did, and change no more."""
        self._running[list(rows)] = 0

    def run(self) -> list[Result]:
        """Draft, verify, accept and commit for every sequence that runs."""
        if self._graph is None:
            self._play()
        else:
            self._graph.replay()
        results = []
        for *tokens, count, highest in self._found.tolist():
            results.append(Result([int(token) for token in tokens[: int(count)]], highest))
        return results

    def _copy_caches(self, entries: Entries, kv: Tensor) -> None:
        copy_entries(entries, self.entries)
        for layer, old in zip(self._context.kv, kv, strict=True):
            copy_entries([(old[0], old[1])], [(layer[0], layer[1])])

    def _toss(self) -> None:
        """Every coin of the sequences' positions."""
        if self._sampling.temperature > 0.0:
            self._coins.copy_(coin_table(self._seeds, self._coins.shape[2]))

    # What is captured

    def _play(self) -> None:
        coins = (
            self._coins.gather(
                2, (self._lengths.unsqueeze(1) + self._block + 1).expand(len(STREAMS), -1, -1)
            )
            if self._sampling.temperature > 0.0
            else self._coins
        )
        drafts, proposals = self._draft(coins)
        logits, features = self._verify(drafts)
        depths = torch.full_like(self._lengths, drafts.shape[1])
        if self._limit is not None:
            depths = (self._limit - 1 - self._lengths).clamp(min=0).minimum(depths)
        if proposals is None:
            accepted, bonus = judge_greedily(drafts, logits, depths)
        else:
            accepted, bonus = judge(self._sampling, drafts, proposals, logits, depths, coins[1:])
        self._commit(drafts, accepted, bonus, logits, features)

    def _draft(self, coins: Tensor) -> tuple[Tensor, Tensor | None]:
        """Drafts (B, K), and what they were drawn from (B, K, V) where tokens are sampled."""
        step, context = self._step, self._context
        places = self._starts.unsqueeze(1) + self._block
        rejected = self._block >= self._counts.unsqueeze(1)
        slots = context.slots(places).masked_fill(rejected, -1)
        embeds = call_module(self._embed_tokens, self._anchors)
        at = context.slots(self._lengths.unsqueeze(1)).flatten()
        step.write(
            context,
            ContextRows(self._features.flatten(0, 1), places.flatten(), slots.flatten()),
            ContextRows(embeds, self._lengths, at),
        )
        logits = step.logits(step.hidden(context, self._lengths, seeds=self._seeds))
        if self._sampling.temperature == 0.0:
            return logits.argmax(dim=-1), None
        proposals = self._sampling.probabilities(logits)
        return draw(proposals, coins[0, :, :-1, None]), proposals

    def _verify(self, drafts: Tensor) -> tuple[Tensor, Tensor]:
        assert self._runner is not None
        places = self._lengths.unsqueeze(1) + self._block
        self._places.copy_(places)
        positions = places if self._limit is None else places.clamp(max=self._limit - 1)
        tokens = torch.cat((self._anchors.unsqueeze(1), drafts), dim=1)
        return self._runner.verify_static(tokens, self._lengths, positions)

    def _commit(
        self, drafts: Tensor, accepted: Tensor, bonus: Tensor, logits: Tensor, features: Tensor
    ) -> None:
        size = len(self._block)
        tokens = torch.where(
            self._block == accepted.unsqueeze(1), bonus.unsqueeze(1), F.pad(drafts, (0, 1))
        )
        counts = (accepted + 1) * self._running
        self.logits = logits
        self._found[:, :size] = tokens
        self._found[:, size] = counts
        self._found[:, size + 1] = logits.amax(dim=(1, 2))
        self._features.copy_(features)
        self._starts.copy_(self._lengths)
        self._counts.copy_(counts)
        self._lengths.add_(counts)
        self._anchors.copy_(torch.where(self._running == 1, bonus, self._anchors))
