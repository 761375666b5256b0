"""Runs the target: the prefill, one verification pass a round, and forgetting what was rejected.

After a pass over the anchor and K drafts the target's cache holds K + 1 new entries, of which only
the accepted ones may stay. Attention layers drop their newest entries. A recurrent layer has no
entries to drop: its state before the pass is put back and the accepted tokens run through the
target once more.

The sequences of a batch accept different numbers, but their cache has one length. What only some of
them reject stays there as a hole that nothing looks at, until holes are worth closing.

Legend: B sequences, P prompt tokens, m tokens of a pass, T cache entries, V vocabulary of the
target's head, H target hidden width, n tapped layers.
"""

import inspect
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from .target_flashmap import (
    RECORDS_PAST,
    FeatureTap,
    module_device,
    num_embedding_rows,
    recurrent_layers,
    text_config,
)

# What a cache layer is made of, in any of the classes transformers 5 has for recurrent layers.
_STATES = ("conv_states", "recurrent_states")
_MOST_DIFFERENCE = 0.1  # of logits, relative; bfloat16 rounds them by some per cent
MOST_HOLES = 64  # entries of the longest sequence's cache that may be holes
_FIELDS = ("keys", "values", "cumulative_length", "has_previous_state")


class TargetRunner:
    """Passes of a batch of sequences through `target`, on a cache of their own.

    Args:
        target: a causal language model of transformers.
        tap: the entered feature tap of that model.
    """

    def __init__(self, target: PreTrainedModel, tap: FeatureTap) -> None:
        self._target = target
        self._tap = tap
        self._arguments = inspect.signature(type(target).forward).parameters
        # transformers 5.24 renamed the argument.
        self._cache_name = "cache" if "cache" in self._arguments else "past_key_values"
        self._device = module_device(target.get_input_embeddings())
        # Before it could record the past, a cache without the configuration kept every entry: exact
        # for full and sliding attention, and easy to crop.
        self._cache = DynamicCache(config=text_config(target)) if RECORDS_PAST else DynamicCache()
        self._recurrent: list[Any] = []
        self._saved: list[dict[str, Any]] = []
        self._newest = torch.empty(0, 0, dtype=torch.long)
        self._lengths: list[int] = []
        self._limit: int | None = None
        # Which entries (B, T) belong to their sequence; None: all.
        self._visible: Tensor | None = None

    @classmethod
    def checked(cls, target: PreTrainedModel, tap: FeatureTap) -> "TargetRunner":
        """A runner, once it is known that the target's recurrent layers can be rolled back.

        Some cannot go on from a state with several tokens, and say nothing: they start anew. So a
        target with such layers is tried out once.

        Raises:
            ValueError: the target does not continue a rolled-back sequence as it should.
        """
        if recurrent_layers(target) and target not in _tried_out:
            _try_out(target, tap)
            _tried_out.add(target)
        return cls(target, tap)

    def prefill(self, prompts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Run one prompt (P) a sequence.

        Returns:
            The logits (B, V) after each prompt's last token, and the features (B, P, n H) of all
            tokens; of a shorter prompt than the longest, the last rows mean nothing.

        Raises:
            ValueError: the cache has layers that can neither drop entries nor be put back, or that
                cannot hold several sequences.
        """
        self._lengths = [len(prompt) for prompt in prompts]
        longest = max(self._lengths)
        # Padded on the left, so that all prompts end in the last column.
        ids = torch.stack([F.pad(prompt, (longest - len(prompt), 0)) for prompt in prompts])
        pads = torch.tensor([longest - length for length in self._lengths], device=self._device)
        if any(length < longest for length in self._lengths):
            places = torch.arange(longest, device=self._device) - pads.unsqueeze(1)
            self._visible = places >= 0
            logits = self._forward(ids, 1, self._visible, position_ids=places.clamp(min=0))
        else:
            logits = self._forward(ids, 1, None)
        self._prepare_cache()
        features = self._features(longest)
        if self._visible is not None:
            places = (
                torch.arange(longest, device=features.device) + pads.to(features.device)[:, None]
            )
            places = places.clamp(max=longest - 1)[..., None]
            features = features.gather(1, places.expand(-1, -1, features.shape[2]))
        return logits[:, -1], features

    @property
    def cache(self) -> DynamicCache:
        """The target's cache."""
        return self._cache

    @property
    def num_entries(self) -> int:
        """Entries of the target's cache, holes included."""
        return max(self._lengths) if self._visible is None else self._visible.shape[1]

    def entries(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values (B, heads, T, d) a layer, of every sequence as many as it has tokens."""
        if self._visible is not None:
            self._move_together()
        layers: list[Any] = self._cache.layers
        return [(layer.keys, layer.values) for layer in layers]

    def resume(
        self, cache: DynamicCache, num_tokens: int, num_kept: int, prompt: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Go on with an earlier runner's cache of one sequence of `num_tokens`, of which the first
        `num_kept` stay, and run the rest of a `prompt` (P).

        Returns:
            As `prefill`, the features those of the tokens that ran.
        """
        self._cache, self._lengths = cache, [num_kept]
        self._prepare_cache()
        self._drop(num_tokens - num_kept)
        tokens = prompt[num_kept:].unsqueeze(0)
        logits = self._forward_at_end(tokens, num_logits=1)
        self._drop(0)
        self._lengths = [len(prompt)]
        return logits[:, -1], self._features(tokens.shape[1])

    def verify(self, tokens: Tensor, limit: int | None = None) -> tuple[Tensor, Tensor]:
        """Run `tokens` (B, m), anchors and the drafts after them; `keep` must follow every pass.

        Tokens beyond the first `limit` positions, where the target has no more, must not be kept.

        Returns:
            Their logits (B, m, V) and features (B, m, n H).
        """
        self._saved = [_save(layer) for layer in self._recurrent]
        self._newest, self._limit = tokens, limit
        logits = self._forward_at_end(tokens, num_logits=tokens.shape[1])
        return logits, self._features(tokens.shape[1])

    def keep(self, counts: Sequence[int]) -> None:
        """Keep the first so many (1 or more) tokens of the newest pass of every sequence and forget
        the rest."""
        size, longest = self._newest.shape[1], max(counts)
        if self._recurrent and size > longest:
            for layer, saved in zip(self._recurrent, self._saved, strict=True):
                _restore(layer, saved)
            self._drop(size)
            self._forward_at_end(self._newest[:, :longest], num_logits=1)
            self._drop(0)
        else:
            self._drop(size - longest)
        if self._visible is not None or min(counts) < longest:
            kept = torch.arange(longest, device=self._device)
            kept = kept < torch.tensor(counts, device=self._device).unsqueeze(1)
            self._visible = torch.cat((self._all_visible(), kept), dim=1)
        self._grow(counts)

    def _grow(self, counts: Sequence[int]) -> None:
        """Let every sequence be so many tokens longer."""
        self._lengths = [
            length + count for length, count in zip(self._lengths, counts, strict=True)
        ]
        if self._visible is not None:
            self._close_holes()

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these sequences alone, in this order."""
        index = torch.tensor(list(rows), device=self._device)
        self._cache.batch_select_indices(index)
        self._lengths = [self._lengths[row] for row in rows]
        if self._visible is not None:
            self._visible = self._visible[index]
            self._close_holes()

    def _all_visible(self) -> Tensor:
        if self._visible is not None:
            return self._visible
        return torch.ones(
            len(self._lengths), self._lengths[0], dtype=torch.bool, device=self._device
        )

    def _close_holes(self) -> None:
        """Move entries together once too many of them are holes, or where that ends them all."""
        assert self._visible is not None
        longest = max(self._lengths)
        even = min(self._lengths) == longest
        holes = self._visible.shape[1] - longest
        if even and not holes:
            self._visible = None
            return
        if holes <= MOST_HOLES and len(self._lengths) > 1:
            return
        self._move_together()

    def _move_together(self) -> None:
        """Let every sequence's own entries come first."""
        assert self._visible is not None
        longest = max(self._lengths)
        order = torch.argsort((~self._visible).int(), dim=1, stable=True)[:, :longest]
        layers: list[Any] = self._cache.layers
        for layer in layers:
            places = order[:, None, :, None].to(layer.keys.device)
            layer.keys = layer.keys.gather(
                2, places.expand(-1, layer.keys.shape[1], -1, layer.keys.shape[3])
            )
            layer.values = layer.values.gather(
                2, places.expand(-1, layer.values.shape[1], -1, layer.values.shape[3])
            )
        self._visible = None if min(self._lengths) == longest else self._visible.gather(1, order)

    def _features(self, num_tokens: int) -> Tensor:
        features = self._tap()
        if features.shape[1] != num_tokens:
            raise ValueError(
                f"{type(self._target).__name__} runs {features.shape[1]} positions for {num_tokens}"
                " tokens: a drafter cannot be conditioned on a model that adds positions."
            )
        return features

    def _forward_at_end(self, tokens: Tensor, num_logits: int) -> Tensor:
        first = torch.tensor(self._lengths, device=self._device).unsqueeze(1)
        positions = first + torch.arange(tokens.shape[1], device=self._device)
        if self._limit is not None:
            positions = positions.clamp(max=self._limit - 1)
        visible = self._visible
        if visible is not None:
            visible = F.pad(visible, (0, tokens.shape[1]), value=True)
        return self._forward(tokens, num_logits, visible, position_ids=positions)

    def _forward(
        self, tokens: Tensor, num_logits: int, visible: Tensor | None, **arguments: Any
    ) -> Tensor:
        """Logits (B, num_logits, V) of the last tokens."""
        arguments["logits_to_keep"] = num_logits
        if visible is not None:
            arguments["attention_mask"] = visible.long() if visible.dim() == 2 else visible
        known = {name: value for name, value in arguments.items() if name in self._arguments}
        known[self._cache_name] = self._cache
        output = self._target(input_ids=tokens.to(self._device), use_cache=True, **known)
        logits: Tensor = output.logits[:, -num_logits:]
        return logits

    def _prepare_cache(self) -> None:
        if not RECORDS_PAST:
            return
        for layer in self._cache.layers:
            states = getattr(layer, "recurrent_states", {}).values()
            if any(state is not None for state in states):
                self._recurrent.append(layer)
            elif hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()
            elif not getattr(layer, "is_croppable", True):
                raise ValueError(
                    f"{type(self._target).__name__} keeps its past in {type(layer).__name__}, which"
                    " transformers cannot roll back: speculative decoding needs a target whose"
                    " cache can drop rejected tokens."
                )

    def _drop(self, num_entries: int) -> None:
        if not RECORDS_PAST:
            if num_entries:
                self._cache.crop(-num_entries)
            return
        recurrent = {id(layer) for layer in self._recurrent}
        layers: list[Any] = self._cache.layers
        # transformers 5 trims recorded states in `crop`, so it is due after every pass, also for 0.
        for layer in layers:
            if id(layer) not in recurrent:
                layer.crop(-num_entries)


_tried_out: "weakref.WeakSet[PreTrainedModel]" = weakref.WeakSet()


def _try_out(target: PreTrainedModel, tap: FeatureTap) -> None:
    """Reject two tokens, go on, and compare with the same tokens in one pass."""
    tokens = torch.arange(8) % num_embedding_rows(target)
    try:
        expected, _ = TargetRunner(target, tap).prefill([tokens])
        runner = TargetRunner(target, tap)
        runner.prefill([tokens[:4]])
        runner.verify(torch.cat((tokens[4:5], tokens[:2]))[None])
        runner.keep([1])
        found = runner.verify(tokens[None, 5:])[0][:, -1]
    except (TypeError, ValueError, AttributeError, IndexError, KeyError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {error}"
    else:
        difference = (found - expected).abs().max() / expected.abs().max()
        if difference <= _MOST_DIFFERENCE:
            return
        reason = f"its logits change by {float(difference):.0%}"
    raise ValueError(
        f"{type(target).__name__} ({', '.join(recurrent_layers(target))} layers) does not continue"
        f" a rolled-back sequence in transformers {transformers.__version__} ({reason}): it can be"
        " decoded plainly, but not speculatively."
    )


def _save(layer: Any) -> dict[str, Any]:
    """What `_restore` needs: states are overwritten in place and copied, keys are replaced."""
    saved = {name: getattr(layer, name) for name in _FIELDS if hasattr(layer, name)}
    saved = {name: dict(old) if isinstance(old, dict) else old for name, old in saved.items()}
    for name in _STATES:
        states = getattr(layer, name).items()
        saved[name] = {index: state.clone() for index, state in states if state is not None}
    return saved


def _restore(layer: Any, saved: dict[str, Any]) -> None:
    for name, value in saved.items():
        if name in _STATES:
            for index, state in value.items():
                getattr(layer, name)[index].copy_(state)
        else:
            setattr(layer, name, value)
