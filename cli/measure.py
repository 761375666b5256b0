"""What `flashmap bench` measures: prompts in, one row of numbers a domain out.

Each prompt is decoded by the target alone and with its drafter, one right after the other and in
turns of who begins, so that a machine that slows down or warms up does it to both. Rates count
returned tokens only.
"""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from flashmap.loops import ends_in_loop
from flashmap.prompts import Prompt, encode

from .decoding import Decoded, decode_plainly, decode_with_drafter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Settings:
    """How every prompt is decoded."""

    max_new_tokens: int
    temperature: float
    num_steps: int | None
    num_draws: int | str
    num_candidates: int | str
    adaptive: bool
    repeats: int
    seed: int
    raw: bool


@dataclass(frozen=True)
class Sample:
    """One prompt decoded on both sides; seconds are the medians over the repeats."""

    domain: str
    plain_ids: list[int]
    ids: list[int]
    acceptance_lengths: list[int]
    plain_seconds: float
    seconds: float
    looped: bool


def measure(
    target: Any,
    draft: Any,
    tokenizer: "PreTrainedTokenizerBase",
    prompts: list[Prompt],
    settings: Settings,
    advance: Callable[[], None],
) -> list[Sample]:
    """Decode every prompt on both sides; calls ``advance`` after each. Raises ValueError as
    decoding does."""
    encoded = [encode(tokenizer, prompt.text, raw=settings.raw) for prompt in prompts]
    stops = target.generation_config.eos_token_id
    stops = [stops] if isinstance(stops, int) else stops or []

    def both(index: int, first: str, tokens: int) -> dict[str, Decoded]:
        common: dict[str, Any] = {
            "max_new_tokens": tokens,
            "temperature": settings.temperature,
            "seed": settings.seed + index,
        }
        ids = encoded[index]
        drafts: dict[str, Any] = {
            "num_steps": settings.num_steps,
            "num_draws": settings.num_draws,
            "num_candidates": settings.num_candidates,
            "adaptive": settings.adaptive,
        }
        sides: dict[str, Callable[[], Decoded]] = {
            "plain": lambda: decode_plainly(target, ids, **common),
            "flashmap": lambda: decode_with_drafter(target, draft, ids, **drafts, **common),
        }
        return {side: sides[side]() for side in sorted(sides, key=lambda name: name != first)}

    both(0, "plain", min(WARM_UP_TOKENS, settings.max_new_tokens))
    samples = []
    for index, prompt in enumerate(prompts):
        runs = [
            both(index, ("plain", "flashmap")[(index + repeat) % 2], settings.max_new_tokens)
            for repeat in range(settings.repeats)
        ]
        plain, ours = runs[0]["plain"], runs[0]["flashmap"]
        samples.append(
            Sample(
                domain=prompt.domain,
                plain_ids=plain.token_ids,
                ids=ours.token_ids,
                acceptance_lengths=ours.acceptance_lengths,
                plain_seconds=median(run["plain"].seconds for run in runs),
                seconds=median(run["flashmap"].seconds for run in runs),
                looped=ends_in_loop(ours.token_ids, stops),
            )
        )
        advance()
    return samples


def summarise(domain: str, samples: list[Sample], *, greedy: bool) -> dict[str, Any]:
    """The row of ``samples``; ``identical`` is None when sampling, where two runs are two draws."""
    tokens, plain_tokens = (sum(len(ids) for ids in side) for side in _ids(samples))
    seconds = sum(sample.seconds for sample in samples)
    plain_seconds = sum(sample.plain_seconds for sample in samples)
    rate, plain_rate = tokens / seconds, plain_tokens / plain_seconds
    return {
        "domain": domain,
        "prompts": len(samples),
        "tokens": tokens,
        "rounds": sum(len(sample.acceptance_lengths) for sample in samples),
        "acceptance_length": _acceptance_length(samples),
        "tokens_per_second": rate,
        "plain_tokens_per_second": plain_rate,
        "speedup": rate / plain_rate,
        "identical": sum(sample.ids == sample.plain_ids for sample in samples) if greedy else None,
        "looped": sum(sample.looped for sample in samples),
        "acceptance_length_without_looped": _acceptance_length(
            [sample for sample in samples if not sample.looped]
        ),
    }


def _ids(samples: list[Sample]) -> tuple[list[list[int]], list[list[int]]]:
    return [sample.ids for sample in samples], [sample.plain_ids for sample in samples]


def _acceptance_length(samples: list[Sample]) -> float | None:
    """Tokens a verification pass over all of ``samples``; None where no pass ran."""
    lengths = [length for sample in samples for length in sample.acceptance_lengths]
    return sum(lengths) / len(lengths) if lengths else None
