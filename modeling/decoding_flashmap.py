"""Lossless speculative decoding: draft a block, verify it in one pass of the target, keep what the
target agrees with.

The result has the target's own distribution (Leviathan et al., "Fast inference from transformers
via speculative decoding", 2023; Chen et al., "Accelerating large language model decoding with
speculative sampling", 2023): greedy decoding gives the target's own greedy tokens, and sampling
accepts a draft y with probability min(1, p(y) / q(y)) and otherwise draws from the residual max(p -
q, 0). Random numbers are keyed by seed and position (see `fused_flashmap`).

Legend: P prompt tokens, K slots of a block, p position of the anchor (the last committed token), V
vocabulary.
"""

from collections.abc import Generator, Iterable, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field
from numbers import Integral, Real
from operator import index
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .configuration_flashmap import FlashMapConfig
from .fused_flashmap import Stream, coin, draw_seeds
from .runner_flashmap import TargetRunner
from .target_flashmap import FeatureTap, num_embedding_rows, position_limit, text_config, warn_once

_COLDEST = 1e-30  # lower temperatures above 0 leave float32's range
_FIRST_CAPACITY = 512  # new tokens the drafter's context has room for before it grows


@dataclass
class FlashMapGenerateOutput:
    """What `spec_generate` returns.

    Attributes:
        sequences: token ids (1, P + num_new_tokens), the prompt included.
        num_new_tokens: tokens after the prompt, at most `max_new_tokens`.
        acceptance_lengths: tokens committed by each verification pass, the bonus token included,
            counted after the cut at a stop token and before the cut at `max_new_tokens` (the
            published convention).
        seeds: the seed of each sequence; passing it again repeats the run.
    """

    sequences: Tensor
    num_new_tokens: int
    acceptance_lengths: list[int]
    seeds: list[int] = field(default_factory=list)

    @property
    def acceptance_length(self) -> float:
        """Mean tokens committed a verification pass; 0.0 if none ran."""
        return sum(self.acceptance_lengths) / max(len(self.acceptance_lengths), 1)


class Streamer(Protocol):
    """The interface of transformers' streamers: the prompt, then committed tokens, then the end."""

    def put(self, value: Tensor) -> Any: ...

    def end(self) -> Any: ...


class Drafter(Protocol):
    """What the loop needs of a drafter; `FlashMapDraftModel` documents each."""

    config: FlashMapConfig

    @property
    def device(self) -> torch.device: ...

    def check_target(self, target: PreTrainedModel) -> None: ...

    def target_features(self, target: PreTrainedModel) -> AbstractContextManager[FeatureTap]: ...

    def new_cache(self, batch_size: int, max_length: int) -> Any: ...

    def extend_context(self, cache: Any, target_hidden: Tensor) -> None: ...

    def draft(
        self,
        anchor_ids: Tensor,
        cache: Any,
        embed_tokens: nn.Module,
        lm_head: nn.Module,
        num_steps: int | None = None,
        *,
        seed: int | Sequence[int] | None = None,
    ) -> Tensor: ...


class _Sampler:
    """Draws and decisions of one sequence; temperature 0 is greedy."""

    def __init__(self, temperature: float, seed: int) -> None:
        self.temperature = temperature
        self.seed = seed

    def probabilities(self, logits: Tensor) -> Tensor:
        """Float32 distribution (..., V) of `logits` at the sampling temperature."""
        logits = logits.float()
        # Largest logit 0: a temperature near 0 must not overflow.
        return torch.softmax((logits - logits.amax(-1, keepdim=True)) / self.temperature, dim=-1)

    def require_numbers(self, logits: Tensor) -> None:
        """Raise ValueError if the target's logits (..., V) hold NaN, or infinity when sampling."""
        highest = float(logits.max())
        if highest != highest or (self.temperature > 0.0 and highest == float("inf")):
            found = "infinity" if highest == float("inf") else "NaN"
            raise ValueError(
                f"The target's logits hold {found}: check its weights (a truncated download) and"
                " its dtype (float16 may overflow)."
            )

    def draw(self, weights: Tensor, position: int, stream: Stream) -> int:
        """Smallest token at which the sum of `weights` (V) exceeds a uniform share of the total."""
        cumulative = weights.double().cumsum(dim=-1)
        reached = (cumulative > coin(self.seed, position, stream) * cumulative[-1]) & (weights > 0)
        return int(reached.int().argmax())

    def first(self, logits: Tensor, position: int) -> int:
        """The token after the prompt, from its logits (V)."""
        if self.temperature == 0.0:
            return int(logits.argmax())
        return self.draw(self.probabilities(logits), position, Stream.FIRST)

    def propose(self, logits_KV: Tensor, position: int) -> tuple[list[int], Tensor]:
        """Draft tokens of the slots after `position`, and the distributions they are drawn from."""
        if self.temperature == 0.0:
            return logits_KV.argmax(dim=-1).tolist(), logits_KV
        q_KV = self.probabilities(logits_KV)
        slots = range(q_KV.shape[0])
        return [self.draw(q_KV[slot], position + slot + 1, Stream.DRAFT) for slot in slots], q_KV

    def judge(
        self, drafts: list[int], q_KV: Tensor, logits: Tensor, position: int
    ) -> tuple[int, int]:
        """Number of accepted drafts, and the bonus token after them.

        `q_KV` are the drafts' distributions, `logits` (K + 1, V) the target's at anchor and drafts.
        """
        if self.temperature == 0.0:
            best = logits.argmax(dim=-1).tolist()
            accepted = next((k for k, draft in enumerate(drafts) if draft != best[k]), len(drafts))
            return accepted, best[accepted]
        p = self.probabilities(logits)
        slots = torch.arange(len(drafts), device=p.device)
        tokens = torch.tensor(drafts, device=p.device)
        q_of, p_of = q_KV.to(p.device)[slots, tokens].tolist(), p[slots, tokens].tolist()
        accepted = len(drafts)
        for slot in range(len(drafts)):
            if not coin(self.seed, position + slot + 1, Stream.ACCEPT) * q_of[slot] < p_of[slot]:
                accepted = slot
                break
        weights = p[accepted]
        if accepted < len(drafts):
            residual = weights.clone()
            residual[: q_KV.shape[-1]] -= q_KV[accepted].to(p.device)
            residual.clamp_(min=0.0)
            # p and q agree to rounding and the draft was rejected all the same: any choice but p
            # would be biased.
            weights = residual if residual.sum() > 0 else weights
        return accepted, self.draw(weights, position + accepted + 1, Stream.BONUS)


@torch.no_grad()
def spec_generate(
    drafter: Drafter,
    target: PreTrainedModel,
    input_ids: Tensor,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    num_steps: int | None = None,
    stop_token_ids: int | Sequence[int] | None = None,
    generator: torch.Generator | None = None,
    *,
    seed: int | Sequence[int] | None = None,
    streamer: Streamer | None = None,
) -> FlashMapGenerateOutput:
    """Continue one prompt with `target`'s own distribution, drafting blocks with `drafter`.

    Args:
        drafter: the drafter.
        target: the causal language model it was trained for.
        input_ids: prompt (1, P), int64, P at least 1.
        max_new_tokens: tokens to generate at most.
        temperature: 0 decodes greedily; above 0 samples from softmax(logits / temperature).
        num_steps: jumps a draft; None takes the drafter's configuration.
        stop_token_ids: tokens to end after; None takes the end tokens of the target's generation
            configuration.
        generator: where the seed comes from if none is given; None: torch's default CPU generator.
        seed: makes the run repeatable whatever else has drawn random numbers.
        streamer: gets the prompt, then each round's committed tokens, then the end, exactly once,
            errors included.

    Raises:
        ValueError: an argument is out of its range, or the drafter does not fit the target.
    """
    try:
        prompt = _check_arguments(target, input_ids, max_new_tokens, temperature)
        drafter.check_target(target)
        drafter.config.grid(num_steps or None)
        seeds = draw_seeds(1, seed, generator)
        sampler = _Sampler(float(temperature), seeds[0])
        stops = _stop_tokens(target, stop_token_ids)
        if streamer is not None:
            streamer.put(input_ids.cpu())
        tokens: list[int] = []
        lengths: list[int] = []
        rounds = _rounds(drafter, target, prompt, sampler, num_steps, max_new_tokens)
        with closing(rounds):  # takes the hooks off the target at once, whatever happens
            for new in rounds:
                stop = next((place for place, token in enumerate(new) if token in stops), None)
                new = new if stop is None else new[: stop + 1]
                if tokens:  # the token after the prompt costs no verification pass
                    lengths.append(len(new))
                new = new[: max_new_tokens - len(tokens)]
                tokens += new
                if streamer is not None:
                    streamer.put(torch.tensor(new))
                if stop is not None or len(tokens) == max_new_tokens:
                    break
    finally:
        if streamer is not None:
            streamer.end()
    new_ids = torch.tensor([tokens], dtype=input_ids.dtype, device=input_ids.device)
    return FlashMapGenerateOutput(
        torch.cat((input_ids, new_ids), dim=1), len(tokens), lengths, seeds
    )


def _rounds(
    drafter: Drafter,
    target: PreTrainedModel,
    prompt: Tensor,
    sampler: _Sampler,
    num_steps: int | None,
    max_new_tokens: int,
) -> Generator[list[int], None, None]:
    """Endlessly yield what each pass of the target commits: accepted drafts and a bonus token.

    The first is the prompt's pass, which commits one token. At the top of a round both caches
    hold exactly the tokens before the anchor.
    """
    embed_tokens, lm_head = target.get_input_embeddings(), target.get_output_embeddings()
    block_size, position = drafter.config.block_size, prompt.shape[0]
    limit = position_limit(target, position)
    with drafter.target_features(target) as tap:
        runner = TargetRunner.checked(target, tap)
        cache = drafter.new_cache(
            1, position + min(max_new_tokens, _FIRST_CAPACITY) + block_size + 1
        )
        logits, features = runner.prefill(prompt)
        sampler.require_numbers(logits)
        anchor = sampler.first(logits, position)
        yield [anchor]
        drafter.extend_context(cache, features)
        while True:
            cache.reserve(position + block_size + 1)
            anchor_ids = torch.tensor([anchor], device=drafter.device)
            block = drafter.draft(
                anchor_ids, cache, embed_tokens, lm_head, num_steps, seed=sampler.seed
            )[0]
            drafts, q = sampler.propose(block, position)
            if limit is not None:
                drafts = drafts[: limit - position - 1]
            logits, features = runner.verify(torch.tensor([anchor, *drafts]))
            sampler.require_numbers(logits)
            accepted, anchor = sampler.judge(drafts, q, logits, position)
            yield [*drafts[:accepted], anchor]
            drafter.extend_context(cache, features[:, : accepted + 1])
            runner.keep(accepted + 1)
            position += accepted + 1


def _check_arguments(
    target: PreTrainedModel, input_ids: Tensor, max_new_tokens: int, temperature: float
) -> Tensor:
    """The prompt (P), once every argument is in its range."""
    if not isinstance(input_ids, Tensor) or input_ids.dtype not in (torch.int64, torch.int32):
        found = input_ids.dtype if isinstance(input_ids, Tensor) else type(input_ids).__name__
        raise ValueError(f"input_ids is {found}, expected token ids: an int64 tensor (1, length).")
    if input_ids.dim() != 2 or input_ids.shape[0] != 1:
        raise ValueError(
            f"input_ids has shape {tuple(input_ids.shape)}, expected the token ids of one prompt,"
            " shape (1, length)."
        )
    prompt = input_ids[0]
    if prompt.shape[0] == 0:
        raise ValueError(
            "The prompt is empty: pass at least one token (a beginning-of-text token will do)."
        )
    rows = num_embedding_rows(target)
    low, high = int(prompt.min()), int(prompt.max())
    if low < 0 or high >= rows:
        raise ValueError(
            f"input_ids holds the token id {low if low < 0 else high}, the target's ids are 0 to"
            f" {rows - 1}: the prompt was encoded with another model's tokenizer."
        )
    whole = isinstance(max_new_tokens, Integral) and not isinstance(max_new_tokens, bool)
    if not whole or max_new_tokens < 1:
        raise ValueError(
            f"max_new_tokens={max_new_tokens!r} is not valid: ask for at least 1 token."
        )
    number = isinstance(temperature, Real) and not isinstance(temperature, bool)
    if not number or not (temperature == 0.0 or _COLDEST <= temperature < float("inf")):
        raise ValueError(
            f"temperature={temperature!r} is not valid: 0 decodes greedily, {_COLDEST} and above"
            " samples."
        )
    _check_length(target, prompt.shape[0], max_new_tokens)
    return prompt


def _check_length(target: PreTrainedModel, prompt_length: int, max_new_tokens: int) -> None:
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


def _stop_tokens(target: PreTrainedModel, stop_token_ids: int | Sequence[int] | None) -> set[int]:
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
