"""Measures a release's acceptance again, on its own prompts and in its own setting, and says how
far from the stated number chance and rounding may take it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashmap.loops import ends_in_loop
from flashmap.prompts import encode, read_prompts

from .errors import ReleaseError
from .measurements import Measurement, Setting

ROUNDING = 0.03  # of the stated length: another machine's sums part at near ties
DEVIATIONS = 3.0  # standard errors that a part of the prompts may be off


@dataclass(frozen=True)
class Again:
    """What came out: tokens a pass over straight texts, what the card states, how far off it may
    be, and over how many prompts of how many."""

    length: float
    stated: float
    allowed: float
    num_prompts: int
    of_prompts: int

    @property
    def reproduces(self) -> bool:
        """Whether the two agree within what is allowed."""
        return abs(self.length - self.stated) <= self.allowed

    def __str__(self) -> str:
        return (
            f"{self.length:.2f} tokens a pass over {self.num_prompts} of {self.of_prompts} prompts"
        )


def greedy_setting(measured: Measurement) -> Setting | None:
    """The setting that can be measured again: greedy decoding, where no chance is in the texts."""
    greedy = [s for s in measured.settings if s.temperature == 0.0]
    return next((s for s in greedy if s.overall.without_looped is not None), None)


def measure_again(
    pair: tuple[Any, Any, Any],
    measured: Measurement,
    setting: Setting,
    folder: Path,
    num_prompts: int | None,
) -> Again:
    """Decode the prompts of ``measured`` greedily, or ``num_prompts`` of them evenly spread.

    Raises ReleaseError where there is nothing to measure.
    """
    path = measured.prompts_file(folder)
    if path is None:
        raise ReleaseError("eval", f"no prompts of {measured.name}", "its prompts", "build again")
    everything = read_prompts(path)
    count = min(num_prompts or len(everything), len(everything))
    chosen = [everything[index * len(everything) // count] for index in range(count)]
    target, draft, tokenizer = pair
    stops = target.generation_config.eos_token_id
    stops = [stops] if isinstance(stops, int) else stops or []
    straight = []
    for prompt in chosen:
        ids = encode(tokenizer, prompt.text, raw=not tokenizer.chat_template)
        out = draft.spec_generate(
            target,
            ids.to(target.device),
            max_new_tokens=measured.protocol["settings"]["max_new_tokens"],
            num_steps=setting.num_steps,
            num_draws=setting.num_draws,
        )
        if not ends_in_loop(out.sequences[0, ids.shape[1] :].tolist(), stops):
            straight.append(out.acceptance_lengths)
    if not any(straight):
        raise ReleaseError(
            "acceptance",
            f"no straight text over {count} prompts",
            "texts that do not loop",
            "ask for more prompts",
        )
    stated = setting.overall.without_looped or 0.0
    length = sum(map(sum, straight)) / sum(map(len, straight))
    chance = standard_error(straight) * math.sqrt(1.0 - count / len(everything))
    allowed = ROUNDING * stated + DEVIATIONS * chance
    return Again(length, stated, allowed, count, len(everything))


def standard_error(lengths: Sequence[Sequence[int]]) -> float:
    """Of tokens a pass over texts drawn at random, for the lengths of each text's passes."""
    count, passes = len(lengths), sum(map(len, lengths))
    if count < 2:
        return math.inf
    mean = sum(map(sum, lengths)) / passes
    squares = sum((sum(text) - mean * len(text)) ** 2 for text in lengths)
    return math.sqrt(squares * count / (count - 1)) / passes
