"""A generation as it is asked for: the settings that callers give, and the checked request that the
loop works on.

`spec_generate`, `stream_generate` and the hook of transformers' `generate` differ in how they ask
and in what they return; between the two stands a `Request`.

Legend: B sequences, P prompt tokens.
"""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict, Unpack

import torch
from torch import Tensor, nn
from transformers import (
    LogitsProcessorList,
    MaxTimeCriteria,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
)

from .arguments_flashmap import (
    check_entries,
    check_length,
    check_numbers,
    check_prompts,
    check_time,
    listed,
    stop_tokens,
)
from .configuration_flashmap import FlashMapConfig
from .drafting_flashmap import Drafting, make_drafting
from .fused_flashmap import draw_seeds
from .obstacles_flashmap import choose_graphs
from .past_flashmap import FlashMapPast
from .sampling_flashmap import Place, Sampling, make_sampling
from .target_flashmap import FeatureTap


class Drafter(Protocol):
    """What a generation needs of a drafter; `FlashMapDraftModel` documents each."""

    config: FlashMapConfig
    round_store: Any

    @property
    def device(self) -> torch.device: ...

    def check_target(self, target: PreTrainedModel) -> None: ...

    def target_features(self, target: PreTrainedModel) -> AbstractContextManager[FeatureTap]: ...

    def new_cache(self, batch_size: int, max_length: int) -> Any: ...

    def extend_context(
        self, cache: Any, target_hidden: Tensor, counts: Sequence[int] | None = None
    ) -> None: ...

    def draft(
        self,
        anchor_ids: Tensor,
        cache: Any,
        embed_tokens: nn.Module,
        lm_head: nn.Module,
        num_steps: int | None = None,
        *,
        seed: int | Sequence[int] | None = None,
        num_draws: int = 1,
        jump_bank_size: int = 0,
    ) -> Tensor: ...

    def heeds_noise(self, num_steps: int | None = None) -> bool: ...


class Settings(TypedDict, total=False):
    """What `spec_generate` and `stream_generate` take by keyword.

    Attributes:
        seed: makes the run repeatable whatever else has drawn random numbers; an integer (sequence
            b has seed + b), or one a sequence.
        attention_mask: (B, P), 0 for padding, on the left or the right; None: no padding.
        top_k: sample from so many of the likeliest tokens.
        top_p: sample from the likeliest tokens that have this probability together.
        min_p: sample from tokens that are at least this share as likely as the likeliest.
        num_draws: noise draws a block; their mixture is the proposal, as exact as one draw, and at
            temperature 0 the path that they support best; "auto": several while they pay.
        num_candidates: blocks' worth of drafts that a pass verifies as a tree, at temperature 0;
            "auto": as many nodes as are worth their cost.
        jump_bank_size: drafts in several jumps take their noise from so many draws that were
            projected beforehand (8192 are plenty), and no step has a tensor of vocabulary size but
            its logits; 0: exact jumps.
        adaptive: verify fewer drafts, or decode plainly, where the drafter is seldom right, so that
            a run is hardly ever slower than plain decoding; two numbers give the costs to go by, in
            passes of the target over one token: of a draft, and of one more token in a pass.
            Rounds without a draft count in `acceptance_lengths` like any other pass.
        graphs: "auto" captures rounds in CUDA graphs where device, target and settings allow it;
            True: or raises ValueError; False: runs them one operation at a time.
        past: caches of an earlier call, from `new_past`; what the prompt shares with its text is
            not run again, and it holds the whole text afterwards.
        logits_processor: transformers' processors; they act on the target's logits, and on the
            drafts', before the temperature, each with the tokens that stand before.
        stopping_criteria: transformers' criteria, asked after every token with the whole sequence.
        max_time: seconds after the call at which no further token is committed.
        stop_strings: one text or several; a sequence ends with the token that completes one.
        tokenizer: the target's, to read `stop_strings` with.
    """

    seed: int | Sequence[int] | None
    attention_mask: Tensor | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    num_draws: int | str
    num_candidates: int | str
    jump_bank_size: int
    adaptive: bool | tuple[float, float]
    graphs: bool | str
    past: FlashMapPast | None
    logits_processor: LogitsProcessorList | None
    stopping_criteria: StoppingCriteriaList | None
    max_time: float | None
    stop_strings: str | list[str] | None
    tokenizer: Any


@dataclass(frozen=True)
class Request:
    """A generation, checked.

    Attributes:
        prompts: token ids (P) of each sequence, without padding.
        places: where processors and criteria find each sequence.
        sampling: how tokens are chosen.
        seeds: one a sequence.
        stops: tokens that end a sequence.
        criteria: transformers' criteria, which end it too.
        max_new_tokens: most tokens of a sequence.
        drafting: how rounds are drafted.
        past: caches to go on with, of one sequence.
        keeps_scores: whether commits carry the scores that their tokens were chosen by.
        graphs: False, or as `graphs` of `Settings` where nothing is known to speak against it.
    """

    prompts: list[Tensor]
    places: list[Place]
    sampling: Sampling
    seeds: list[int]
    stops: set[int]
    criteria: list[Any]
    max_new_tokens: int
    drafting: Drafting
    past: FlashMapPast | None = None
    keeps_scores: bool = False
    graphs: bool | str = False


def make_request(
    drafter: Drafter,
    target: PreTrainedModel,
    input_ids: Tensor,
    max_new_tokens: int,
    temperature: float,
    num_steps: int | None,
    stop_token_ids: int | Sequence[int] | None,
    generator: torch.Generator | None,
    **settings: Unpack[Settings],
) -> Request:
    """What `spec_generate`'s arguments ask for. Raises ValueError naming what is wrong."""
    unknown = sorted(settings.keys() - Settings.__annotations__.keys())
    if unknown:
        raise TypeError(
            f"There is no setting {', '.join(unknown)}: see Settings for those there are."
        )
    drafter.check_target(target)
    prompts = check_prompts(target, input_ids, settings.get("attention_mask"))
    check_numbers(max_new_tokens, temperature)
    past = settings.get("past")
    check_fit(drafter, target, prompts, max_new_tokens, past)
    sampling = make_sampling(
        float(temperature),
        settings.get("top_k"),
        settings.get("top_p"),
        settings.get("min_p"),
        listed("logits_processor", settings.get("logits_processor")),
    )
    drafting = make_drafting(
        drafter,
        target,
        temperature,
        num_steps,
        settings.get("num_draws", 1),
        settings.get("num_candidates", 1),
        settings.get("adaptive", False),
        settings.get("jump_bank_size", 0),
    )
    asked = settings.get("graphs", "auto")
    return Request(
        prompts,
        [Place()] * len(prompts),
        sampling,
        draw_seeds(len(prompts), settings.get("seed"), generator),
        stop_tokens(target, stop_token_ids),
        [
            *listed("stopping_criteria", settings.get("stopping_criteria")),
            *time_criteria(settings.get("max_time")),
            *string_criteria(settings.get("stop_strings"), settings.get("tokenizer")),
        ],
        max_new_tokens,
        drafting,
        past,
        graphs=choose_graphs(asked, drafter, target, sampling, drafting, past is not None),
    )


def check_fit(
    drafter: Drafter, target: PreTrainedModel, prompts: Sequence[Tensor], max_new_tokens: int,
    past: FlashMapPast | None,
) -> None:  # fmt: skip
    """Raise ValueError if the target has too few positions, or the past does not fit."""
    check_length(target, max(map(len, prompts)), max_new_tokens)
    check_entries(target, prompts, max_new_tokens, drafter.config.block_size)
    if past is None:
        return
    if not hasattr(past, "check"):  # remote code has a class of its own a release
        raise ValueError(
            f"past is a {type(past).__name__}, expected what the drafter's new_past() makes."
        )
    past.check(drafter, target, len(prompts))


def time_criteria(max_time: float | None) -> list[Any]:
    """What ends a generation so many seconds from now."""
    check_time(max_time)
    return [] if max_time is None else [MaxTimeCriteria(max_time, time.time())]


def string_criteria(stop_strings: str | list[str] | None, tokenizer: Any) -> list[Any]:
    """What ends a sequence at one of the texts.

    Raises:
        ValueError: they are no texts, or there is no tokenizer to read them with.
    """
    if stop_strings is None:
        return []
    texts = [stop_strings] if isinstance(stop_strings, str) else list(stop_strings)
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(
            f"stop_strings={stop_strings!r} is not valid: pass a text or a list, none empty."
        )
    if not hasattr(tokenizer, "get_vocab"):
        raise ValueError(
            f"stop_strings={stop_strings!r} needs the target's tokenizer to find texts in tokens:"
            " pass tokenizer=... to spec_generate. generate() does not hand its own to a callable:"
            " bind it, custom_generate=functools.partial(flashmap_decoding, tokenizer=...)."
        )
    return [StopStringCriteria(tokenizer, texts)]
