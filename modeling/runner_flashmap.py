"""Runs the target: the prefill, one verification pass a round, and forgetting what was rejected.

After a pass over the anchor and K drafts the target's cache holds K + 1 new entries, of which only
the accepted ones may stay. Attention layers drop their newest entries. A recurrent layer has no
entries to drop: its state before the pass is put back and the accepted tokens run through the
target once more.

Legend: P prompt tokens, m tokens of a pass, V vocabulary of the target's head, H target hidden
width, n tapped layers.
"""

import inspect
import weakref
from typing import Any

import torch
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
_FIELDS = ("keys", "values", "cumulative_length", "has_previous_state")


class TargetRunner:
    """One sequence's passes through `target`, on a cache of its own.

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
        self._newest = torch.empty(0, dtype=torch.long)
        self._length = 0

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

    def prefill(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Run the prompt (P).

        Returns:
            The logits (V) after its last token and the features (1, P, n H) of all its tokens.

        Raises:
            ValueError: the cache has layers that can neither drop entries nor be put back.
        """
        logits = self._forward(input_ids, num_logits=1)
        self._length = input_ids.shape[0]
        self._prepare_cache()
        return logits[-1], self._features(input_ids.shape[0])

    def verify(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Run `tokens` (m), the anchor and the drafts after it; `keep` must follow every pass.

        Returns:
            Their logits (m, V) and features (1, m, n H).
        """
        self._saved = [_save(layer) for layer in self._recurrent]
        self._newest = tokens
        logits = self._forward_at_end(tokens, num_logits=tokens.shape[0])
        return logits, self._features(tokens.shape[0])

    def keep(self, num_kept: int) -> None:
        """Keep the first `num_kept` (1 or more) tokens of the newest pass and forget the rest."""
        num_dropped = self._newest.shape[0] - num_kept
        if self._recurrent and num_dropped:
            for layer, saved in zip(self._recurrent, self._saved, strict=True):
                _restore(layer, saved)
            self._drop(self._newest.shape[0])
            self._forward_at_end(self._newest[:num_kept], num_logits=1)
            num_dropped = 0
        self._drop(num_dropped)
        self._length += num_kept

    def _features(self, num_tokens: int) -> Tensor:
        features = self._tap()
        if features.shape[1] != num_tokens:
            raise ValueError(
                f"{type(self._target).__name__} runs {features.shape[1]} positions for {num_tokens}"
                " tokens: a drafter cannot be conditioned on a model that adds positions."
            )
        return features

    def _forward_at_end(self, tokens: Tensor, num_logits: int) -> Tensor:
        end = self._length + tokens.shape[0]
        positions = torch.arange(self._length, end, device=self._device).unsqueeze(0)
        return self._forward(tokens, num_logits, position_ids=positions)

    def _forward(self, tokens: Tensor, num_logits: int, **arguments: Any) -> Tensor:
        """Logits (num_logits, V) of the last tokens."""
        arguments["logits_to_keep"] = num_logits
        known = {name: value for name, value in arguments.items() if name in self._arguments}
        known[self._cache_name] = self._cache
        input_ids = tokens.to(self._device).unsqueeze(0)
        output = self._target(input_ids=input_ids, use_cache=True, **known)
        logits: Tensor = output.logits[0, -num_logits:]
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
        expected, _ = TargetRunner(target, tap).prefill(tokens)
        runner = TargetRunner(target, tap)
        runner.prefill(tokens[:4])
        runner.verify(torch.cat((tokens[4:5], tokens[:2])))
        runner.keep(1)
        found = runner.verify(tokens[5:])[0][-1]
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
