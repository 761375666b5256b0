"""What speaks against decoding in CUDA graphs: the settings and targets whose rounds cannot be
captured, each with the reason.
"""

from typing import Any

import torch
from transformers import PreTrainedModel

from .drafting_flashmap import Drafting
from .sampling_flashmap import Sampling
from .target_flashmap import batch_obstacle, warn_once

DEVICES = ("cuda",)  # where "auto" and True make graphs
_PLAIN_NUMBERS = (int, float, bool, str)


def choose_graphs(
    asked: Any,
    drafter: Any,
    target: PreTrainedModel,
    sampling: Sampling,
    drafting: Drafting,
    has_past: bool,
) -> bool | str:
    """What is made of `graphs=asked`: False where rounds are not captured, else `asked`. An
    obstacle to "auto" on a GPU is logged once.

    Raises:
        ValueError: it is none of "auto", True and False, or is True and something speaks against.
    """
    if asked not in ("auto", True, False) or not isinstance(asked, bool | str):
        raise ValueError(f'graphs={asked!r} is not valid: pass "auto", True or False.')
    if asked is False or (asked == "auto" and drafter.device.type not in DEVICES):
        return False
    reason = (
        _device_obstacle(drafter.device, target)
        or _target_obstacle(target)
        or _setting_obstacle(sampling, drafting, has_past)
    )
    if reason is None:
        return asked
    give_up(asked, reason)
    return False


def give_up(asked: bool | str, reason: str) -> None:
    """Log once why rounds are not captured, or raise ValueError where they had to be."""
    if asked is True:
        raise ValueError(f"graphs=True cannot be served: {reason}. Leave it out, or change that.")
    warn_once(f"Decoding without CUDA graphs: {reason}.")


def truncation_key(sampling: Sampling) -> tuple[Any, ...] | None:
    """What tells truncations apart from others with which a captured round computes something else;
    None where one holds more than plain numbers."""
    keys: list[Any] = []
    for one in sampling.truncations:
        state = sorted(getattr(one, "__dict__", {"": None}).items())
        if not all(isinstance(value, _PLAIN_NUMBERS) for _, value in state):
            return None
        keys.append((type(one), *state))
    return tuple(keys)


def _device_obstacle(device: torch.device, target: PreTrainedModel) -> str | None:
    if device.type not in DEVICES:
        return f"the drafter is on {device}, and graphs need a CUDA device"
    found = {weight.device for weight in target.parameters()} - {device}
    if found:
        places = ", ".join(sorted(map(str, found)))
        return f"the drafter is on {device}, and weights of the target on {places}"
    return None


def _target_obstacle(target: PreTrainedModel) -> str | None:
    reason = batch_obstacle(target)
    if reason is None and not getattr(target, "_supports_attention_backend", False):
        reason = "takes no attention but its own"
    return None if reason is None else f"{type(target).__name__} {reason}"


def _setting_obstacle(sampling: Sampling, drafting: Drafting, has_past: bool) -> str | None:
    reasons = {
        "a past keeps caches that grow": has_past,
        "num_candidates verifies trees of many shapes": drafting.num_nodes > 0,
        "several noise draws are mixed slot by slot": drafting.num_draws > 1
        or drafting.choice is not None,
        "adaptive drafting changes how much a round verifies": drafting.costs is not None,
        "logits processors look at the tokens before": bool(sampling.processors),
        "a truncation holds more than plain numbers": truncation_key(sampling) is None,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)
