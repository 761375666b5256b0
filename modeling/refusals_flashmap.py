"""What does not go with speculative decoding in `generate`: each setting with the reason, or with
what to do instead.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, SynthIDTextWatermarkingConfig
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

from .request_flashmap import Drafter

_HOW = "target.generate(**inputs, custom_generate=draft.flashmap_decoding, draft_model=draft)"
# What `generate` hands over that speculative decoding needs, or makes anew.
_KNOWN_INPUTS = {
    "attention_mask", "position_ids", "cache_position", "past_key_values", "cache", "use_cache",
    "logits_to_keep", "output_attentions", "output_hidden_states",
}  # fmt: skip
_DYNAMIC_CACHES = (None, "dynamic", "dynamic_full")


def _above_one(value: Any) -> bool:
    return value is not None and value > 1


def _is_given(value: Any) -> bool:
    return value is not None and value is not False


# Settings of a generation configuration that cannot be honoured: when, and what to do.
_REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "num_beams": (_above_one, "it keeps one text a prompt: use num_beams=1"),
    "num_return_sequences": (
        _above_one, "repeat the prompt in the batch instead; every row has its own seed"
    ),
    "force_words_ids": (_is_given, "it takes beam search: use plain generate"),
    "constraints": (_is_given, "they take beam search: use plain generate"),
    "penalty_alpha": (lambda value: bool(value), "contrastive search needs plain generate"),
    "dola_layers": (_is_given, "DoLa needs plain generate"),
    "prompt_lookup_num_tokens": (_is_given, "the drafter makes the candidates: leave it out"),
    "assistant_early_exit": (_is_given, "the drafter makes the candidates: leave it out"),
    "use_mtp": (_is_given, "the drafter makes the candidates: leave it out"),
    "guidance_scale": (
        lambda value: value not in (None, 1), "guidance keeps a second text: use plain generate"
    ),
    "watermarking_config": (
        lambda value: isinstance(value, SynthIDTextWatermarkingConfig),
        "this watermark remembers tokens, rejected ones too: use plain generate",
    ),
    "cache_implementation": (
        lambda value: value not in _DYNAMIC_CACHES,
        "rejected tokens have to leave the cache: use a dynamic one",
    ),
    "output_attentions": (_is_given, "a pass holds rejected tokens too: use plain generate"),
    "output_hidden_states": (_is_given, "a pass holds rejected tokens too: use plain generate"),
}  # fmt: skip


def refuse(
    model: PreTrainedModel,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    asked: dict[str, Any],
) -> None:
    """Raise ValueError for the first setting that cannot be honoured."""
    for name, (is_set, advice) in _REFUSED.items():
        value = getattr(generation_config, name, None)
        if is_set(value):
            raise ValueError(f"{name}={value!r} does not go with flashmap_decoding: {advice}.")
    if asked.get("assistant_model") is not None:
        raise ValueError(
            "assistant_model does not go with flashmap_decoding, whose drafter is draft_model:"
            " leave it out."
        )
    given = asked.get("kwargs") or {}
    if given.get("past_key_values") is not None or given.get("cache") is not None:
        raise ValueError(
            "past_key_values does not go with flashmap_decoding, which keeps a cache of its own, as"
            " rejected tokens have to leave it: leave it out, or pass past=draft.new_past() to"
            " every call of a conversation."
        )
    unknown = [
        name
        for name, value in model_kwargs.items()
        if value is not None and name not in _KNOWN_INPUTS
    ]
    if unknown:
        raise ValueError(
            f"{', '.join(unknown)}: flashmap_decoding runs the target on input_ids and"
            " attention_mask alone. Leave it out, or use plain generate."
        )
    _check_positions(model_kwargs)
    _check_processes(model, asked.get("synced_gpus"))


def _check_positions(model_kwargs: dict[str, Any]) -> None:
    positions, mask = model_kwargs.get("position_ids"), model_kwargs.get("attention_mask")
    if positions is None:
        return
    mask = torch.ones_like(positions) if mask is None else mask.to(positions.device)
    own = mask.long().cumsum(-1) - 1
    if bool(((positions != own) & (mask != 0)).any()):
        raise ValueError(
            "position_ids are not those of attention_mask, 0, 1, 2, ... from each prompt's first"
            " token: flashmap_decoding counts them itself, leave position_ids out."
        )


def _check_processes(model: PreTrainedModel, synced_gpus: bool | None) -> None:
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not several or torch.distributed.get_world_size() == 1:
        return
    if synced_gpus is None:
        synced_gpus = is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model)
    if synced_gpus:
        raise ValueError(
            "synced_gpus: the weights are shared among several processes (FSDP, DeepSpeed ZeRO-3),"
            " whose rounds would wait for each other: gather the target on each, or use plain"
            " generate."
        )


def checked_drafter(draft_model: Any) -> Drafter:
    """The drafter, or ValueError for what is none."""
    if not hasattr(draft_model, "check_target"):
        found = "missing" if draft_model is None else f"a {type(draft_model).__name__}"
        raise ValueError(
            f"draft_model is {found}, expected a FlashMap drafter: load one with"
            ' draft = AutoModel.from_pretrained("REF", trust_remote_code=True) and call'
            f" {_HOW}."
        )
    drafter: Drafter = draft_model
    return drafter


class NotAnAssistant(GenerationConfig):
    """The generation configuration of a drafter, which has no `generate` of its own.

    `generate(assistant_model=draft)` first asks the assistant for its number of candidate tokens;
    here it gets a sentence that says what to call instead.
    """

    @property
    def num_assistant_tokens(self) -> int:
        """Raises ValueError."""
        raise ValueError(
            "assistant_model takes models that can generate alone, and a FlashMap drafter reads the"
            f" target's hidden states: call {_HOW}, or draft.spec_generate(target, input_ids)."
        )

    @num_assistant_tokens.setter
    def num_assistant_tokens(self, value: int) -> None:
        """A generation configuration sets every field it has."""
