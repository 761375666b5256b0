"""Plain decoding against FlashMap on one prompt and one machine, each on its own clock.

At the same time the two would slow each other down; one after the other is no race. So they take
turns: the side with less time on its clock does its next pass of the target, and only its own work
is on its clock, the prompt's pass included. Both show at any moment what they would have written
after the same time alone.

Both sides use the same target object: one dtype, one kind of cache, the same kernels. Plain
decoding is a bare loop of the target's forward pass, which is faster than `generate`.
"""

import math
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache

from pair import Pair

PLAIN, FLASHMAP = "plain", "flashmap"
WARM_UP_TOKENS = 8
PROMPT_LIMIT = 1024  # tokens; a page is for short questions
FRAME_S = 0.25  # between two pictures of the page; more of them would cost decoding time
# GPU time of a race: before the first token, for a token on both sides, and at most.
GPU_START_S, GPU_TOKEN_S, GPU_MOST_S = 15.0, 0.1, 60.0
# Logits of a pass over several tokens are that many rounding steps from those of one over one.
NEAR_TIE = 4.0


@dataclass(frozen=True)
class Settings:
    """How both sides decode; jumps and draws concern the drafter alone."""

    num_steps: int = 1
    num_draws: int = 1
    temperature: float = 0.0
    max_new_tokens: int = 128
    seed: int = 0


class Step(NamedTuple):
    """One turn: a pass of the target and what came with it.

    Attributes:
        side: `PLAIN` or `FLASHMAP`.
        tokens: token ids that it added; drafts first.
        accepted: how many of them were drafted.
        seconds: wall clock of this turn.
    """

    side: str
    tokens: list[int]
    accepted: int
    seconds: float


class Parting(NamedTuple):
    """Where two greedy texts part.

    Attributes:
        place: index of the first token that differs.
        tokens: plain decoding's token there and FlashMap's.
        probabilities: what the target gives these two there.
        rounding_steps: by how many steps of the dtype their logits differ.
    """

    place: int
    tokens: tuple[int, int]
    probabilities: tuple[float, float]
    rounding_steps: float

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding explains it."""
        return self.rounding_steps <= NEAR_TIE


Event = Step | Parting


@dataclass
class Side:
    """What one side has done so far."""

    tokens: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, step: Step) -> None:
        """Take in its next turn."""
        self.steps.append(step)
        self.tokens += step.tokens
        self.seconds += step.seconds

    @property
    def rate(self) -> float:
        """Tokens a second of its own clock."""
        return len(self.tokens) / self.seconds if self.seconds else 0.0

    @property
    def rounds(self) -> list[Step]:
        """Its turns after the prompt's pass."""
        return self.steps[1:]

    @property
    def acceptance_length(self) -> float:
        """Mean tokens a pass of the target, the prompt's left out; 0.0 if none ran."""
        return sum(len(step.tokens) for step in self.rounds) / max(len(self.rounds), 1)


def encode(pair: Pair, prompt: str) -> list[int]:
    """Token ids of `prompt` as one user turn, or as it is where the target has no chat template.

    Raises:
        ValueError: it has no text, or more than `PROMPT_LIMIT` tokens.
    """
    if not prompt.strip():
        raise ValueError("The prompt is empty: type one, or pick an example.")
    if pair.tokenizer.chat_template:
        # A template that knows of thinking is asked for the answer alone; others ignore it.
        shown = pair.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            add_generation_prompt=True, return_dict=True, enable_thinking=False,
        )  # fmt: skip
    else:
        shown = pair.tokenizer(prompt)
    ids: list[int] = shown["input_ids"]
    if len(ids) > PROMPT_LIMIT:
        raise ValueError(
            f"The prompt is too long: {len(ids):,} tokens, and this page takes {PROMPT_LIMIT:,}."
            " Shorten it."
        )
    return ids


def warm_up(pair: Pair, prompt: list[int]) -> None:
    """Run both sides once before any clock starts, if this process has not yet."""
    if not pair.is_warm:
        for _ in race(pair, prompt, Settings(max_new_tokens=WARM_UP_TOKENS)):
            pass
        pair.is_warm = True


def race(pair: Pair, prompt: list[int], settings: Settings) -> Generator[Event, None, None]:
    """Decode `prompt` on both sides, a turn at a time; greedy texts that part end in a `Parting`.

    Closing the iterator ends the work of both.

    Raises:
        ValueError: a setting is out of its range, or the target has no room for so many tokens.
    """
    ids = torch.tensor([prompt], device=pair.target.device)
    rounds = pair.draft.stream_generate(
        pair.target, ids, settings.max_new_tokens, settings.temperature,
        settings.num_steps, seed=settings.seed, num_draws=settings.num_draws,
    )  # fmt: skip
    sides: dict[str, Any] = {FLASHMAP: rounds, PLAIN: _plain(pair.target, ids, settings)}
    clocks = dict.fromkeys(sides, 0.0)
    texts: dict[str, list[int]] = {side: [] for side in sides}
    with ExitStack() as stack:
        for turns in sides.values():
            stack.enter_context(closing(turns))
        while sides:
            side = min(sides, key=clocks.__getitem__)
            began = _now(ids.device)
            turn = next(sides[side], None)
            seconds = _now(ids.device) - began
            if turn is None:
                del sides[side]
                continue
            tokens, accepted = turn[:2]
            clocks[side] += seconds
            texts[side] += tokens
            yield Step(side, tokens, accepted, seconds)
    if settings.temperature == 0 and texts[PLAIN] != texts[FLASHMAP]:
        yield _parting(pair.target, prompt, texts[PLAIN], texts[FLASHMAP])


@torch.no_grad()
def _plain(
    target: Any, ids: torch.Tensor, settings: Settings
) -> Generator[tuple[list[int], int], None, None]:
    """The target's next token, again and again."""
    cache = DynamicCache(config=target.config.get_text_config())
    random = torch.Generator(ids.device).manual_seed(settings.seed % 2**64)
    stops = target.generation_config.eos_token_id
    stops = {stops} if isinstance(stops, int) else set(stops or ())
    for _ in range(settings.max_new_tokens):
        logits = target(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
        if settings.temperature > 0:
            weights = (logits.float() / settings.temperature).softmax(dim=-1)
            ids = torch.multinomial(weights, 1, generator=random)[None]
        else:
            ids = logits.argmax()[None, None]
        token = int(ids)
        yield [token], 0
        if token in stops:
            return


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # a side pays for all that it started
    return time.perf_counter()


@torch.no_grad()
def _parting(target: Any, prompt: list[int], plain: list[int], other: list[int]) -> Parting:
    # Both end at the same token or the same length, so that texts that part do so within both.
    place = next(k for k, (a, b) in enumerate(zip(plain, other, strict=False)) if a != b)
    ids = torch.tensor([prompt + plain[:place]], device=target.device)
    logits = target(input_ids=ids, logits_to_keep=1).logits[0, -1].float()
    tokens = plain[place], other[place]
    first, second = logits[list(tokens)].tolist()
    info = torch.finfo(target.dtype)
    size = max(abs(first), abs(second), info.tiny)
    spacing = info.eps * 2.0 ** math.floor(math.log2(size))
    chances = logits.softmax(dim=-1)[list(tokens)].tolist()
    return Parting(place, tokens, (chances[0], chances[1]), abs(first - second) / spacing)


def gpu_seconds(prompt: list[int], settings: Settings) -> int:
    """GPU time to ask ZeroGPU for; never more than any visitor may have."""
    return round(min(GPU_START_S + GPU_TOKEN_S * settings.max_new_tokens, GPU_MOST_S))


def frames(events: Iterator[Event], seconds: float = FRAME_S) -> Iterator[list[Event]]:
    """The events in bundles, one every so many seconds; the first at once."""
    bundle: list[Event] = []
    due = 0.0
    try:
        for event in events:
            bundle.append(event)
            if time.monotonic() >= due:
                yield bundle
                bundle, due = [], time.monotonic() + seconds
    except (RuntimeError, ValueError, MemoryError):  # what came before it was decoded
        yield bundle
        raise
    if bundle:
        yield bundle
