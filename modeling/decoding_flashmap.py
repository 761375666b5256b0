"""Lossless speculative decoding: draft a block, verify it in one pass of the target, keep what the
target agrees with.

The result has the target's own distribution: greedy decoding gives the target's own greedy tokens,
and sampling draws from exactly what the target, its temperature and its processors give. The rounds
are in `loop_flashmap`, drawing and accepting in `sampling_flashmap`; here is what is asked for and
when it ends.

Legend: B sequences, P prompt tokens.
"""

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from .arguments_flashmap import (
    check_length,
    check_numbers,
    check_prompts,
    padding_token,
    stop_tokens,
)
from .drafting_flashmap import Drafting, make_drafting
from .fused_flashmap import draw_seeds
from .loop_flashmap import Commit, Drafter, DraftLoop
from .past_flashmap import FlashMapPast
from .sampling_flashmap import Sampling, make_sampling
from .treeloop_flashmap import TreeLoop


@dataclass
class FlashMapGenerateOutput:
    """What `spec_generate` returns.

    Attributes:
        sequences: token ids (B, P + most new tokens): each prompt as it was given, its new tokens,
            and padding where others are longer.
        num_new_tokens: tokens after the prompt, at most `max_new_tokens`; a list of them for more
            than one sequence.
        acceptance_lengths: tokens committed by each verification pass, the bonus token included,
            counted after the cut at a stop and before the cut at `max_new_tokens` (the published
            convention); a list of such lists for more than one sequence.
        seeds: the seed of each sequence; passing it again repeats the run.
    """

    sequences: Tensor
    num_new_tokens: Any
    acceptance_lengths: Any
    seeds: list[int] = field(default_factory=list)

    @property
    def acceptance_length(self) -> float:
        """Mean tokens committed a verification pass and sequence; 0.0 if none ran."""
        flat: list[int] = []
        for one in self.acceptance_lengths:
            flat += one if isinstance(one, list) else [one]
        return sum(flat) / max(len(flat), 1)


class Round(NamedTuple):
    """What a round of `stream_generate` commits.

    Attributes:
        tokens: token ids, drafts first; the first round's only one costs no draft.
        accepted: how many of them were drafted.
        bonus: the target's own token after them; None where the text was cut before it.
        seconds: wall clock since the round before, or since the call.
    """

    tokens: list[int]
    accepted: int
    bonus: int | None
    seconds: float


class Streamer(Protocol):
    """The interface of transformers' streamers: the prompt, then committed tokens, then the end."""

    def put(self, value: Tensor) -> Any: ...

    def end(self) -> Any: ...


@dataclass
class _Request:
    """A generation, checked."""

    prompts: list[Tensor]
    sampling: Sampling
    seeds: list[int]
    stops: set[int]
    criteria: Sequence[Any]
    drafting: Drafting
    past: FlashMapPast | None
    max_new_tokens: int


def _request(
    drafter: Drafter,
    target: PreTrainedModel,
    input_ids: Tensor,
    max_new_tokens: int,
    temperature: float,
    num_steps: int | None,
    stop_token_ids: int | Sequence[int] | None,
    generator: torch.Generator | None,
    seed: int | Sequence[int] | None,
    attention_mask: Tensor | None,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    num_draws: int | str,
    num_candidates: int | str,
    adaptive: bool | tuple[float, float],
    past: FlashMapPast | None,
    logits_processor: LogitsProcessorList | None,
    stopping_criteria: StoppingCriteriaList | None,
) -> _Request:
    prompts = check_prompts(target, input_ids, attention_mask)
    check_numbers(max_new_tokens, temperature)
    check_length(target, max(map(len, prompts)), max_new_tokens)
    drafter.check_target(target)
    if past is not None:
        past.check(drafter, target, len(prompts))
    return _Request(
        prompts,
        make_sampling(float(temperature), top_k, top_p, min_p, logits_processor),
        draw_seeds(len(prompts), seed, generator),
        stop_tokens(target, stop_token_ids),
        list(stopping_criteria or ()),
        make_drafting(drafter, target, temperature, num_steps, num_draws, num_candidates, adaptive),
        past,
        max_new_tokens,
    )


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
    attention_mask: Tensor | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    num_draws: int | str = 1,
    num_candidates: int | str = 1,
    adaptive: bool | tuple[float, float] = False,
    past: FlashMapPast | None = None,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    streamer: Streamer | None = None,
) -> FlashMapGenerateOutput:
    """Continue prompts with `target`'s own distribution, drafting blocks with `drafter`.

    Every sequence is what it would be alone: its random numbers depend on its own seed, and in
    float32 its tokens do not depend on the batch.

    Args:
        drafter: the drafter.
        target: the causal language model it was trained for.
        input_ids: prompts (B, P), int64, P at least 1.
        max_new_tokens: tokens to generate at most.
        temperature: 0 decodes greedily; above 0 samples from softmax(logits / temperature).
        num_steps: jumps a draft; None takes the drafter's configuration.
        stop_token_ids: tokens to end after; None takes the end tokens of the target's generation
            configuration.
        generator: where the seeds come from if none is given; None: torch's default CPU generator.
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
        adaptive: verify fewer drafts, or decode plainly, where the drafter is seldom right, so that
            a run is hardly ever slower than plain decoding; two numbers give the costs to go by, in
            passes of the target over one token: of a draft, and of one more token in a pass.
            Rounds without a draft count in `acceptance_lengths` like any other pass.
        past: caches of an earlier call, from `new_past`; what the prompt shares with its text is
            not run again, and it holds the whole text afterwards.
        logits_processor: transformers' processors; they act on the target's logits, and on the
            drafts', before the temperature, each with the tokens that stand before.
        stopping_criteria: transformers' criteria, asked after every token with the whole sequence.
        streamer: gets the prompt, then each round's committed tokens, then the end, exactly once,
            errors included; for one sequence.

    Raises:
        ValueError: an argument is out of its range, or the drafter does not fit the target.
    """
    try:
        request = _request(
            drafter, target, input_ids, max_new_tokens, temperature, num_steps, stop_token_ids,
            generator, seed, attention_mask, top_k, top_p, min_p, num_draws, num_candidates,
            adaptive, past, logits_processor, stopping_criteria,
        )  # fmt: skip
        if streamer is not None:
            if len(request.prompts) > 1:
                raise ValueError(
                    f"streamer shows one sequence, input_ids holds {len(request.prompts)}: leave it"
                    " out, or pass one prompt."
                )
            streamer.put(input_ids.cpu())
        texts: list[list[int]] = [[] for _ in request.prompts]
        lengths: list[list[int]] = [[] for _ in request.prompts]
        with closing(_rounds(drafter, target, request)) as rounds:
            for cut, committed in rounds:
                if texts[cut.row]:  # the token after the prompt costs no verification pass
                    lengths[cut.row].append(committed)
                texts[cut.row] += cut.tokens
                if streamer is not None:
                    streamer.put(torch.tensor(cut.tokens))
    finally:
        if streamer is not None:
            streamer.end()
    return _output(target, input_ids, texts, lengths, request)


def stream_generate(
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
    attention_mask: Tensor | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    num_draws: int | str = 1,
    num_candidates: int | str = 1,
    adaptive: bool | tuple[float, float] = False,
    past: FlashMapPast | None = None,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
) -> Iterator[Round]:
    """`spec_generate` of one prompt, a `Round` at a time.

    Arguments are checked at the call. Closing the iterator, or letting go of it, ends the work and
    takes the hooks off the target.

    Raises:
        ValueError: as `spec_generate`, and for more than one prompt.
    """
    request = _request(
        drafter, target, input_ids, max_new_tokens, temperature, num_steps, stop_token_ids,
        generator, seed, attention_mask, top_k, top_p, min_p, num_draws, num_candidates,
        adaptive, past, logits_processor, stopping_criteria,
    )  # fmt: skip
    if len(request.prompts) > 1:
        raise ValueError(
            f"stream_generate shows one sequence, input_ids holds {len(request.prompts)}: pass one"
            " prompt, or use spec_generate."
        )
    return _streamed(drafter, target, request)


def _streamed(
    drafter: Drafter, target: PreTrainedModel, request: _Request
) -> Generator[Round, None, None]:
    began = time.perf_counter()
    with closing(_rounds(drafter, target, request)) as rounds:
        while True:
            with torch.no_grad():  # not while the consumer runs
                found = next(rounds, None)
            if found is None:
                return
            cut = found[0]
            now = time.perf_counter()
            bonus = cut.tokens[cut.accepted] if cut.accepted < len(cut.tokens) else None
            yield Round(cut.tokens, min(cut.accepted, len(cut.tokens)), bonus, now - began)
            began = now


def _rounds(
    drafter: Drafter, target: PreTrainedModel, request: _Request
) -> Generator[tuple[Commit, int], None, None]:
    """What each round commits for each sequence that still runs, cut where it ends, and how many
    tokens it would have been but for `max_new_tokens`."""
    counts = [0] * len(request.prompts)
    with drafter.target_features(target) as tap:
        make_loop = TreeLoop if request.drafting.num_nodes else DraftLoop
        loop = make_loop(
            drafter, target, tap, request.prompts, request.sampling, request.seeds,
            request.drafting, request.max_new_tokens, request.past,
        )  # fmt: skip
        commits, running = loop.start(), list(range(len(counts)))
        while True:
            for row, tokens, accepted in commits:
                stop = _first_stop(loop.text(row), tokens, request)
                new = tokens if stop is None else tokens[: stop + 1]
                kept = new[: request.max_new_tokens - counts[row]]
                counts[row] += len(kept)
                if stop is not None or counts[row] == request.max_new_tokens:
                    running.remove(row)
                yield Commit(row, kept, accepted), len(new)
            if not running:
                return
            loop.keep(running)
            commits = loop.step()


def _first_stop(text: list[int], tokens: list[int], request: _Request) -> int | None:
    """Place in `tokens`, the end of `text`, after which the sequence is over; None: it goes on."""
    before = len(text) - len(tokens)
    for place, token in enumerate(tokens):
        if token in request.stops:
            return place
        if request.criteria:
            ids = torch.tensor([text[: before + place + 1]])
            if any(bool(torch.as_tensor(one(ids, None)).all()) for one in request.criteria):
                return place
    return None


def _output(
    target: PreTrainedModel,
    input_ids: Tensor,
    texts: list[list[int]],
    lengths: list[list[int]],
    request: _Request,
) -> FlashMapGenerateOutput:
    longest = max(map(len, texts))
    pad = padding_token(target, request.stops) if len(texts) > 1 else 0
    rows = [text + [pad] * (longest - len(text)) for text in texts]
    new_ids = torch.tensor(rows, dtype=input_ids.dtype, device=input_ids.device)
    sequences = torch.cat((input_ids, new_ids), dim=1)
    if len(texts) == 1:
        return FlashMapGenerateOutput(sequences, len(texts[0]), lengths[0], request.seeds)
    return FlashMapGenerateOutput(sequences, [len(text) for text in texts], lengths, request.seeds)
