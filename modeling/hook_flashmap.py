"""Speculative decoding as the decoding method of transformers' own `generate`.

    target.generate(**inputs, custom_generate=flashmap_decoding, draft_model=draft)

`generate` prepares everything it always does (configuration, processors, criteria) and then calls
`flashmap_decoding` in the place of its loop. Every setting keeps its meaning, or is refused in one
sentence. `custom_generate="REF"` gets here too: a release's own `custom_generate/generate.py` loads
its drafter and calls `generate` again in this form.

Legend: B sequences, P prompt tokens with padding, V vocabulary of the target's head.
"""

import inspect
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    GenerationConfig,
    GenerationMixin,
    LogitNormalization,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinPLogitsWarper,
    PreTrainedModel,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

from .arguments_flashmap import check_numbers, check_prompts
from .decoding_flashmap import Streamer, ended, require_one, rounds, with_texts
from .drafting_flashmap import make_drafting
from .fused_flashmap import draw_seeds
from .loop_flashmap import Commit
from .obstacles_flashmap import choose_graphs
from .past_flashmap import FlashMapPast
from .refusals_flashmap import checked_drafter, refuse
from .request_flashmap import Drafter, Request, check_fit, string_criteria
from .sampling_flashmap import Place, Processor, Sampling

_GENERATE = inspect.unwrap(GenerationMixin.generate).__code__
# These look at the scores alone, so that they can be given several positions at once.
_TRUNCATIONS = (
    TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper,
    TypicalLogitsWarper, EpsilonLogitsWarper, EtaLogitsWarper, LogitNormalization,
)  # fmt: skip


def flashmap_decoding(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    draft_model: Drafter | None = None,
    num_steps: int | None = None,
    num_draws: int | str = 1,
    num_candidates: int | str = 1,
    jump_bank_size: int = 0,
    adaptive: bool | tuple[float, float] = False,
    graphs: bool | str = "auto",
    seed: int | Sequence[int] | None = None,
    past: FlashMapPast | None = None,
    stop_strings: str | list[str] | None = None,
    tokenizer: Any = None,
    streamer: Streamer | None = None,
    **model_kwargs: Any,
) -> GenerateDecoderOnlyOutput | Tensor:
    """Decode for `model.generate(..., custom_generate=flashmap_decoding, draft_model=draft)`.

    The text is the one of plain `generate` with the same settings when it is greedy, and has the
    same distribution when it is sampled.

    `generate` keeps `tokenizer` from callables; where stop strings need it, bind it beforehand:
    `functools.partial(flashmap_decoding, tokenizer=tokenizer)`.

    Args:
        model: the target.
        input_ids: prompts (B, P).
        logits_processor: as `generate` prepared it, warpers last.
        stopping_criteria: as `generate` prepared it.
        generation_config: as `generate` prepared it.
        draft_model: the drafter.
        num_steps: jumps a draft; None takes the drafter's configuration.
        num_draws: noise draws a block, whose mixture is the proposal, or "auto".
        num_candidates: blocks' worth of drafts that a pass verifies as a tree, or "auto".
        jump_bank_size: draws that several jumps take their noise from; see `Settings`.
        adaptive: verify fewer drafts, or none, where they do not pay; see `Settings`.
        graphs: whether rounds are captured in CUDA graphs; see `Settings`.
        seed: makes sampling repeatable; an integer (row b has seed + b), or one a row. None: seeds
            come from torch's default generator.
        past: caches of an earlier call, from the drafter's `new_past`; see `Settings`.
        stop_strings: texts that end a sequence.
        tokenizer: what reads them.
        streamer: gets the prompt, committed tokens and one end. None takes `generate`'s.
        model_kwargs: what `generate` prepared for the target's forward.

    Returns:
        Token ids (B, P + most new tokens), or with `return_dict_in_generate` a
        GenerateDecoderOnlyOutput whose scores and logits are 0 where a sequence has ended.

    Raises:
        ValueError: a setting cannot be honoured, or the drafter does not fit the target.
    """
    asked = _asked_of_generate()
    shown = asked.get("streamer")  # it has seen the prompt
    streamer = shown if streamer is None else streamer
    with ended(streamer):
        refuse(model, generation_config, model_kwargs, asked)
        drafter = checked_drafter(draft_model)
        request = _request(
            drafter, model, input_ids, logits_processor,
            [*stopping_criteria, *string_criteria(stop_strings, tokenizer)], generation_config,
            model_kwargs.get("attention_mask"), seed, past, num_steps, num_draws, num_candidates,
            jump_bank_size, adaptive, graphs,
        )  # fmt: skip
        if streamer is not None:
            require_one(request, "streamer")
            if streamer is not shown:
                streamer.put(input_ids.cpu())
        result = _Result(input_ids, generation_config)
        with closing(rounds(drafter, model, request)) as found:
            for commit, _ in found:
                result.add(commit)
                if streamer is not None:
                    streamer.put(torch.tensor(commit.tokens))
    return result.output()


def _asked_of_generate() -> dict[str, Any]:
    """What the innermost running `generate` was called with; empty outside of one.

    It shows its streamer the prompt and then keeps it, and `assistant_model`, from callables
    (transformers 4.57 to 5.24): a reader in another thread would wait for ever. Its own variables
    are the only place where they can be found.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not _GENERATE:
        frame = frame.f_back
    return {} if frame is None else dict(frame.f_locals)


def _request(
    drafter: Drafter,
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: Sequence[Processor],
    criteria: list[Any],
    generation_config: GenerationConfig,
    attention_mask: Tensor | None,
    seed: int | Sequence[int] | None,
    past: FlashMapPast | None,
    num_steps: int | None,
    num_draws: int | str,
    num_candidates: int | str,
    jump_bank_size: int,
    adaptive: bool | tuple[float, float],
    graphs: bool | str,
) -> Request:
    """What `generate` prepared, in the loop's terms."""
    drafter.check_target(model)
    prompts = check_prompts(model, input_ids, attention_mask)
    # These two criteria are part of every call; as numbers they cost nothing.
    ends = [one for one in criteria if type(one) is EosTokenCriteria]
    lengths = [one.max_length for one in criteria if type(one) is MaxLengthCriteria]
    others = [one for one in criteria if type(one) not in (EosTokenCriteria, MaxLengthCriteria)]
    max_length = min(lengths, default=generation_config.max_length)
    max_new_tokens = max(1, max_length - input_ids.shape[1])
    temperature = 1.0 if generation_config.do_sample else 0.0  # a warper divides by the true one
    check_numbers(max_new_tokens, temperature)
    check_fit(drafter, model, prompts, max_new_tokens, past)
    sampling = Sampling(temperature, *_split(logits_processor, generation_config.do_sample))
    drafting = make_drafting(
        drafter,
        model,
        temperature,
        num_steps,
        num_draws,
        num_candidates,
        adaptive,
        jump_bank_size,
    )
    return Request(
        prompts,
        _places(input_ids, attention_mask),
        sampling,
        draw_seeds(len(prompts), seed, None),
        {token for one in ends for token in one.eos_token_id.tolist()},
        others,
        max_new_tokens,
        drafting,
        past,
        keeps_scores=bool(
            generation_config.return_dict_in_generate and generation_config.output_scores
        ),
        graphs=choose_graphs(graphs, drafter, model, sampling, drafting, has_past=past is not None),
    )


def _split(
    logits_processor: Sequence[Processor], do_sample: bool
) -> tuple[tuple[Processor, ...], tuple[Processor, ...]]:
    """The processors that need the tokens before, and those after them that do not."""
    split = len(logits_processor)
    while do_sample and split and type(logits_processor[split - 1]) in _TRUNCATIONS:
        split -= 1
    return tuple(logits_processor[:split]), tuple(logits_processor[split:])


def _places(input_ids: Tensor, attention_mask: Tensor | None) -> list[Place]:
    """Every row as `generate` shows it: padding belongs to the text."""
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    return [
        Place(row, len(input_ids), tuple(ids[mask == 0].tolist()))
        for row, (ids, mask) in enumerate(zip(input_ids, attention_mask, strict=True))
    ]


class _Result:
    """Collects what is committed, in the form that `generate` returns.

    Args:
        input_ids: the prompts (B, P).
        generation_config: what is to be returned.
    """

    def __init__(self, input_ids: Tensor, generation_config: GenerationConfig) -> None:
        self._input_ids, self._config = input_ids, generation_config
        self._texts: list[list[int]] = [[] for _ in input_ids]
        self._scores: list[list[Tensor]] = [[] for _ in input_ids]
        self._logits: list[list[Tensor]] = [[] for _ in input_ids]

    def add(self, commit: Commit) -> None:
        """Take in a round of one sequence."""
        self._texts[commit.row] += commit.tokens
        if commit.scores is not None:
            self._scores[commit.row] += commit.scores.to(self._input_ids.device)
        if self._config.return_dict_in_generate and self._config.output_logits:
            logits = commit.logits.to(self._input_ids.device, torch.float32, copy=True)
            self._logits[commit.row] += logits

    def output(self) -> GenerateDecoderOnlyOutput | Tensor:
        """Token ids, or the object that holds them."""
        sequences = with_texts(self._input_ids, self._texts, self._padding())
        if not self._config.return_dict_in_generate:
            return sequences
        make: Any = GenerateDecoderOnlyOutput
        output: GenerateDecoderOnlyOutput = make(
            sequences=sequences, scores=_by_step(self._scores), logits=_by_step(self._logits)
        )
        return output

    def _padding(self) -> int:
        """What `generate` fills up with: its padding token, else the first end token."""
        for token in (self._config.pad_token_id, self._config.eos_token_id):
            if token is not None:
                return int(token[0] if isinstance(token, Sequence) else token)
        return 0


def _by_step(rows: list[list[Tensor]]) -> tuple[Tensor, ...] | None:
    """(B, V) a step from V a row and step; None if there are none."""
    longest = max(map(len, rows))
    if longest == 0:
        return None
    nothing = torch.zeros_like(next(row for row in rows if row)[0])
    return tuple(
        torch.stack([row[step] if step < len(row) else nothing for row in rows])
        for step in range(longest)
    )
