"""`generate` of a toy, plainly and with `flashmap_decoding`, side by side."""

import functools
from typing import Any

import torch
from torch import Tensor

from flashmap.modeling.hook_flashmap import flashmap_decoding

from . import toys
from .oracle import padded
from .toys import greedy, prompt

LENGTH, NUM_TOKENS = 7, 14


@functools.cache
def target() -> Any:
    return toys.llama()


@functools.cache
def text() -> list[int]:
    return greedy(target(), prompt(LENGTH), NUM_TOKENS)


def batch() -> dict[str, Tensor]:
    """Three prompts, padded on the left with a token that texts hold too."""
    ids, mask = padded([prompt(n, seed=n) for n in (3, 9, 5)], "left", pad=text()[0], more=1)
    return {"input_ids": ids, "attention_mask": mask}


def single() -> dict[str, Tensor]:
    ids = prompt(LENGTH)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def knowing(ids: Tensor) -> Any:
    """Drafts most of a text (P + n) right."""
    script = {place: int(token) for place, token in enumerate(ids) if place % 6 != 4}
    return toys.scripted(script)


def generate(inputs: dict[str, Tensor], **settings: Any) -> Any:
    """Plain, with a padding token, for `NUM_TOKENS` unless another end is set."""
    ends = {"max_length", "max_new_tokens", "generation_config"}
    if not ends & settings.keys():
        settings["max_new_tokens"] = NUM_TOKENS
    if "generation_config" not in settings:
        settings.setdefault("pad_token_id", 0)
    return target().generate(**inputs, **settings)


def hooked(inputs: dict[str, Tensor], drafter: Any = None, **settings: Any) -> Any:
    """The same with the callable."""
    settings.setdefault("custom_generate", flashmap_decoding)
    return generate(inputs, draft_model=drafter or toys.drafter(), **settings)
