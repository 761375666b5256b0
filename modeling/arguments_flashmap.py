"""What callers ask of a generation, checked: every wrong argument gives one sentence that names it,
what was found and what to do, before anything is computed.

Legend: B sequences, P prompt tokens with padding.
"""

from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from operator import index
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .positions_flashmap import entry_limit, most_entries, position_limit
from .target_flashmap import batch_obstacle, num_embedding_rows, text_config, warn_once

COLDEST = 1e-30  # lower temperatures above 0 leave float32's range


def check_prompts(
    target: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor | None
) -> list[Tensor]:
    """The prompts (P) of a batch `input_ids` (B, P) without their padding.

    Raises:
        ValueError: the ids or the mask are none, a prompt is empty, its padding lies in the middle,
            or the target cannot decode several sequences at once.
    """
    if not isinstance(input_ids, Tensor) or input_ids.dtype not in (torch.int64, torch.int32):
        found = input_ids.dtype if isinstance(input_ids, Tensor) else type(input_ids).__name__
        raise ValueError(
            f"input_ids is {found}, expected token ids: an int64 tensor (batch, length), such as"
            ' tokenizer(texts, padding=True, return_tensors="pt") gives.'
        )
    if input_ids.dim() != 2 or input_ids.shape[0] == 0:
        raise ValueError(
            f"input_ids has shape {tuple(input_ids.shape)}, expected the token ids of one or more"
            " prompts, shape (batch, length)."
        )
    prompts = _without_padding(input_ids, attention_mask)
    for row, prompt in enumerate(prompts):
        if prompt.shape[0] == 0:
            which = "The prompt" if len(prompts) == 1 else f"Prompt {row}"
            raise ValueError(
                f"{which} is empty: pass at least one token (a beginning-of-text token will do)."
            )
    rows = num_embedding_rows(target)
    low = min(int(prompt.min()) for prompt in prompts)
    high = max(int(prompt.max()) for prompt in prompts)
    if low < 0 or high >= rows:
        raise ValueError(
            f"input_ids holds the token id {low if low < 0 else high}, the target's ids are 0 to"
            f" {rows - 1}: the prompt was encoded with another model's tokenizer."
        )
    obstacle = batch_obstacle(target) if len(prompts) > 1 else None
    if obstacle:
        raise ValueError(
            f"input_ids holds {len(prompts)} prompts, and {type(target).__name__} {obstacle}:"
            " sequences that accept different numbers cannot share its cache. Pass one prompt at a"
            " time."
        )
    return prompts


def _without_padding(input_ids: Tensor, attention_mask: Tensor | None) -> list[Tensor]:
    if attention_mask is None:
        return list(input_ids)
    if not isinstance(attention_mask, Tensor) or attention_mask.shape != input_ids.shape:
        found = (
            f"shape {tuple(attention_mask.shape)}"
            if isinstance(attention_mask, Tensor)
            else type(attention_mask).__name__
        )
        raise ValueError(
            f"attention_mask is {found}, expected input_ids' shape {tuple(input_ids.shape)}: 1 for"
            " a token, 0 for padding."
        )
    mask = attention_mask.to(input_ids.device) != 0
    if bool((attention_mask.to(input_ids.device) != mask).any()):
        raise ValueError(
            "attention_mask holds other values than 0 and 1, as masks that are added to attention's"
            " scores do: pass 1 for a token, 0 for padding."
        )
    # Tokens and padding may change places once: padding on one side.
    changes = (mask[:, 1:] != mask[:, :-1]).sum(dim=1)
    if bool((changes > 1).any()):
        row = int((changes > 1).int().argmax())
        raise ValueError(
            f"attention_mask has padding in the middle of prompt {row}: pad on the left or on the"
            " right (without a mask, generate takes every pad_token_id for padding)."
        )
    return [ids[kept] for ids, kept in zip(input_ids, mask, strict=True)]


def check_numbers(max_new_tokens: Any, temperature: Any) -> None:
    """Raise ValueError for a number of tokens or a temperature out of range."""
    whole = isinstance(max_new_tokens, Integral) and not isinstance(max_new_tokens, bool)
    if not whole or max_new_tokens < 1:
        raise ValueError(
            f"max_new_tokens={max_new_tokens!r} is not valid: ask for at least 1 token."
        )
    number = isinstance(temperature, Real) and not isinstance(temperature, bool)
    if not number or not (temperature == 0.0 or COLDEST <= temperature < float("inf")):
        raise ValueError(
            f"temperature={temperature!r} is not valid: 0 decodes greedily, {COLDEST} and above"
            " samples."
        )


def check_time(max_time: Any) -> None:
    """Raise ValueError for what is neither None nor a number of seconds."""
    number = isinstance(max_time, Real) and not isinstance(max_time, bool)
    if max_time is not None and not (number and max_time > 0.0):
        raise ValueError(f"max_time={max_time!r} is not valid: pass a number of seconds above 0.")


def listed(name: str, value: Any) -> tuple[Any, ...]:
    """Transformers' processors or criteria. Raises ValueError for what is no list of callables."""
    if value is None:
        return ()
    if not isinstance(value, list | tuple) or not all(map(callable, value)):
        raise ValueError(
            f"{name}={value!r} is not valid: pass a list, each called with token ids and scores."
        )
    return tuple(value)


def check_length(target: PreTrainedModel, prompt_length: int, max_new_tokens: int) -> None:
    """Positions a learned table lacks are an error; those a rotary one was not made for warn."""
    limit = position_limit(target, prompt_length)
    if limit is not None and prompt_length + max_new_tokens > limit:
        raise ValueError(
            f"{prompt_length} prompt tokens and max_new_tokens={max_new_tokens} exceed the target's"
            f" {limit} positions (its position table ends there, or its rotary scaling changes):"
            " shorten the prompt or ask for fewer tokens."
        )
    trained = getattr(text_config(target), "max_position_embeddings", None)
    if trained is not None and prompt_length + max_new_tokens > trained:
        warn_once(
            f"The prompt and max_new_tokens exceed the {trained} positions the target was made for:"
            " its text may degrade there."
        )


def check_entries(
    target: PreTrainedModel, prompts: Sequence[Tensor], max_new_tokens: int, block_size: int
) -> None:
    """Raise ValueError where the cache of a batch might outgrow the masks that a target keeps."""
    limit = entry_limit(target)
    needed = most_entries(max(map(len, prompts)) + max_new_tokens, block_size)
    if limit is not None and len(prompts) > 1 and needed > limit:
        raise ValueError(
            f"input_ids holds {len(prompts)} prompts, whose cache may come to hold {needed} entries"
            f" with rejected drafts, and {type(target).__name__}'s eager attention has masks for"
            f" {limit}: pass one prompt at a time, ask for fewer tokens, or load the target with"
            ' attn_implementation="sdpa" if it has that.'
        )


def stop_tokens(target: PreTrainedModel, stop_token_ids: int | Sequence[int] | None) -> set[int]:
    """The tokens that end a sequence: those given, else the target's. Raises ValueError for what is
    no token id."""
    if stop_token_ids is None:
        stop_token_ids = getattr(getattr(target, "generation_config", None), "eos_token_id", None)
    if stop_token_ids is None:
        return set()
    listed: Any = stop_token_ids.tolist() if isinstance(stop_token_ids, Tensor) else stop_token_ids
    try:
        return {index(one) for one in (listed if isinstance(listed, Iterable) else [listed])}
    except TypeError as error:
        raise ValueError(
            f"stop_token_ids={stop_token_ids!r} is not valid: pass a token id or a list of them."
        ) from error


def padding_token(target: PreTrainedModel, stops: set[int]) -> int:
    """What fills up sequences that end before others."""
    config = getattr(target, "generation_config", None)
    pad = getattr(config, "pad_token_id", None)
    return int(pad) if isinstance(pad, int) else min(stops, default=0)
