"""Lossless speculative decoding: draft a block, verify it in one pass of the target, keep what the
target agrees with.

The result has the target's own distribution: greedy decoding gives the target's own greedy tokens,
and sampling draws from exactly what the target, its temperature and its processors give. The rounds
are in `loop_flashmap`, drawing and accepting in `sampling_flashmap`, what can be asked for in
`request_flashmap`; here is when a text ends and what is returned.

Legend: B sequences, P prompt tokens.
"""

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, Unpack

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .arguments_flashmap import padding_token
from .graphs_flashmap import GraphLoop
from .loop_flashmap import Commit, DraftLoop
from .request_flashmap import Drafter, Request, Settings, make_request
from .sampling_flashmap import Sampler
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
    streamer: Streamer | None = None,
    **settings: Unpack[Settings],
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
        streamer: gets the prompt, then each round's committed tokens, then the end, exactly once,
            errors included; for one sequence.
        settings: seed, attention_mask, top_k, top_p, min_p, num_draws, num_candidates, adaptive,
            graphs, past, logits_processor, stopping_criteria, max_time, stop_strings, tokenizer;
            `Settings` says what they are.

    Raises:
        ValueError: an argument is out of its range, or the drafter does not fit the target.
    """
    with ended(streamer):
        request = make_request(
            drafter, target, input_ids, max_new_tokens, temperature, num_steps, stop_token_ids,
            generator, **settings,
        )  # fmt: skip
        texts: list[list[int]] = [[] for _ in request.prompts]
        lengths: list[list[int]] = [[] for _ in request.prompts]
        if streamer is not None:
            require_one(request, "streamer")
            streamer.put(input_ids.cpu())
        with closing(rounds(drafter, target, request)) as found:
            for commit, size in found:
                if texts[commit.row]:  # the token after the prompt costs no verification pass
                    lengths[commit.row].append(size)
                texts[commit.row] += commit.tokens
                if streamer is not None:
                    streamer.put(torch.tensor(commit.tokens))
    sequences = with_texts(input_ids, texts, padding_token(target, request.stops))
    if len(texts) == 1:
        return FlashMapGenerateOutput(sequences, len(texts[0]), lengths[0], request.seeds)
    return FlashMapGenerateOutput(sequences, [len(text) for text in texts], lengths, request.seeds)


def stream_generate(
    drafter: Drafter,
    target: PreTrainedModel,
    input_ids: Tensor,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    num_steps: int | None = None,
    stop_token_ids: int | Sequence[int] | None = None,
    generator: torch.Generator | None = None,
    **settings: Unpack[Settings],
) -> Iterator[Round]:
    """`spec_generate` of one prompt, a `Round` at a time.

    Arguments are checked at the call. Closing the iterator, or letting go of it, ends the work and
    takes the hooks off the target.

    Raises:
        ValueError: as `spec_generate`, and for more than one prompt.
    """
    request = make_request(
        drafter, target, input_ids, max_new_tokens, temperature, num_steps, stop_token_ids,
        generator, **settings,
    )  # fmt: skip
    require_one(request, "stream_generate")
    return _streamed(drafter, target, request)


def _streamed(
    drafter: Drafter, target: PreTrainedModel, request: Request
) -> Generator[Round, None, None]:
    began = time.perf_counter()
    with closing(rounds(drafter, target, request)) as found:
        while True:
            with torch.no_grad():  # not while the consumer runs
                commit, _ = next(found, (None, 0))
            if commit is None:
                return
            now = time.perf_counter()
            drafted = min(commit.accepted, len(commit.tokens))
            bonus = commit.tokens[drafted] if drafted < len(commit.tokens) else None
            yield Round(commit.tokens, drafted, bonus, now - began)
            began = now


# For the callers above, and for the hook of transformers


@contextmanager
def ended(streamer: Streamer | None) -> Iterator[None]:
    """Ends the stream with the block, errors included. Raises ValueError for no streamer."""
    if streamer is not None and not (hasattr(streamer, "put") and hasattr(streamer, "end")):
        raise ValueError(
            f"streamer is a {type(streamer).__name__}, expected an object with put and end, such as"
            " transformers' TextStreamer."
        )
    try:
        yield
    finally:
        if streamer is not None:
            streamer.end()


def require_one(request: Request, name: str) -> None:
    """Raise ValueError for more than one prompt."""
    if len(request.prompts) > 1:
        raise ValueError(
            f"{name} shows one sequence, input_ids holds {len(request.prompts)}: pass one prompt,"
            " or decode them without."
        )


def rounds(
    drafter: Drafter, target: PreTrainedModel, request: Request
) -> Generator[tuple[Commit, int], None, None]:
    """What each round commits for each sequence that still runs, cut where it ends, and how many
    tokens it would have been but for `max_new_tokens`."""
    counts = [0] * len(request.prompts)
    scores: list[list[Tensor]] = [[] for _ in request.prompts]
    make_loop = TreeLoop if request.drafting.num_nodes else DraftLoop
    make_loop = GraphLoop if request.graphs else make_loop
    with (
        drafter.target_features(target) as tap,
        closing(make_loop(drafter, target, tap, request)) as loop,
    ):
        commits, running = loop.start(), list(range(len(counts)))
        while True:
            for commit in commits:
                row = commit.row
                if request.criteria and commit.scores is not None:
                    scores[row] += commit.scores
                stop = _first_stop(loop.sampler(row), commit, request, scores[row])
                size = len(commit.tokens) if stop is None else stop + 1
                kept = commit.cut(min(size, request.max_new_tokens - counts[row]))
                counts[row] += len(kept.tokens)
                if stop is not None or counts[row] == request.max_new_tokens:
                    running.remove(row)
                yield kept, size
            if not running:
                return
            loop.keep(running)
            commits = loop.step()


def _first_stop(
    sampler: Sampler, commit: Commit, request: Request, scores: list[Tensor]
) -> int | None:
    """Place in the commit's tokens, the end of the text, after which the sequence is over; None: it
    goes on."""
    before = len(sampler.text) - len(commit.tokens)
    for place, token in enumerate(commit.tokens):
        if token in request.stops:
            return place
        if not request.criteria:
            continue
        ids = sampler.place.show(sampler.text[: before + place + 1], request.prompts[0].device)
        count = len(scores) - len(commit.tokens) + place + 1
        shown = tuple(one.repeat(len(ids), 1) for one in scores[:count]) if scores else None
        if any(_fires(one(ids, shown), sampler) for one in request.criteria):
            return place
    return None


def _fires(verdict: Any, sampler: Sampler) -> bool:
    """Whether a criterion's answer, for all rows or one a row, ends the sampler's sequence."""
    return bool(sampler.place.pick(torch.as_tensor(verdict).flatten()))


def with_texts(input_ids: Tensor, texts: list[list[int]], pad: int) -> Tensor:
    """Each prompt as it was given, its text, and padding where others are longer."""
    longest = max(map(len, texts))
    rows = [text + [pad] * (longest - len(text)) for text in texts]
    new_ids = torch.tensor(rows, dtype=input_ids.dtype, device=input_ids.device)
    return torch.cat((input_ids, new_ids), dim=1)
