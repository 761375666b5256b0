"""Speculative decoding as the decoding method of transformers' own `generate`.

    target.generate(**inputs, custom_generate=flashmap_decoding, draft_model=draft)

`generate` prepares everything it always does (configuration, processors, criteria) and then calls
`flashmap_decoding` in the place of its loop. Every setting keeps its meaning, or is refused in one
sentence. `custom_generate="REF"` gets here too: a release's own `custom_generate/generate.py` loads
its drafter and calls `generate` again in this form.

Legend: B sequences, P prompt tokens with padding, V vocabulary of the target's head.
"""

import inspect
from collections.abc import Callable, Sequence
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
    SynthIDTextWatermarkingConfig,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

from .arguments_flashmap import check_numbers, check_prompts
from .decoding_flashmap import Streamer, ended, require_one, rounds, with_texts
from .fused_flashmap import draw_seeds
from .loop_flashmap import Commit
from .request_flashmap import Drafter, Request, check_pair, string_criteria
from .sampling_flashmap import Place, Processor, Sampling

_HOW = "target.generate(**inputs, custom_generate=draft.flashmap_decoding, draft_model=draft)"
_GENERATE = inspect.unwrap(GenerationMixin.generate).__code__
# These look at the scores alone, so that they can be given several positions at once.
_TRUNCATIONS = (
    TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper,
    TypicalLogitsWarper, EpsilonLogitsWarper, EtaLogitsWarper, LogitNormalization,
)  # fmt: skip
# What `generate` hands over that speculative decoding needs, or makes anew.
_KNOWN_INPUTS = {
    "attention_mask", "position_ids", "cache_position", "past_key_values", "cache", "use_cache",
    "logits_to_keep", "output_attentions", "output_hidden_states",
}  # fmt: skip
_DYNAMIC_CACHES = (None, "dynamic", "dynamic_full")


def _above_one(value: Any) -> bool:
    return value is not None and value > 1


def _is_given(value: Any) -> bool:
    return value is not None and value is not False


# Settings of a generation configuration that cannot be honoured: when, and what to do.
_REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "num_beams": (_above_one, "it keeps one text a prompt: use num_beams=1"),
    "num_return_sequences": (
        _above_one, "repeat the prompt in the batch instead; every row has its own seed"
    ),
    "force_words_ids": (_is_given, "it takes beam search: use plain generate"),
    "constraints": (_is_given, "they take beam search: use plain generate"),
    "penalty_alpha": (lambda value: bool(value), "contrastive search needs plain generate"),
    "dola_layers": (_is_given, "DoLa needs plain generate"),
    "prompt_lookup_num_tokens": (_is_given, "the drafter makes the candidates: leave it out"),
    "assistant_early_exit": (_is_given, "the drafter makes the candidates: leave it out"),
    "use_mtp": (_is_given, "the drafter makes the candidates: leave it out"),
    "guidance_scale": (
        lambda value: value not in (None, 1), "guidance keeps a second text: use plain generate"
    ),
    "watermarking_config": (
        lambda value: isinstance(value, SynthIDTextWatermarkingConfig),
        "this watermark remembers tokens, rejected ones too: use plain generate",
    ),
    "cache_implementation": (
        lambda value: value not in _DYNAMIC_CACHES,
        "rejected tokens have to leave the cache: use a dynamic one",
    ),
    "output_attentions": (_is_given, "a pass holds rejected tokens too: use plain generate"),
    "output_hidden_states": (_is_given, "a pass holds rejected tokens too: use plain generate"),
}  # fmt: skip


def flashmap_decoding(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    draft_model: Drafter | None = None,
    num_steps: int | None = None,
    num_draws: int = 1,
    seed: int | Sequence[int] | None = None,
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
        num_draws: noise draws a block, whose mixture is the proposal.
        seed: makes sampling repeatable; an integer (row b has seed + b), or one a row. None: seeds
            come from torch's default generator.
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
        _refuse(model, generation_config, model_kwargs, asked)
        drafter = _checked_drafter(draft_model)
        request = _request(
            drafter, model, input_ids, logits_processor,
            [*stopping_criteria, *string_criteria(stop_strings, tokenizer)], generation_config,
            model_kwargs.get("attention_mask"), num_steps, num_draws, seed,
        )  # fmt: skip
        if streamer is not None:
            require_one(request, "streamer")
            if shown is None:
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


def _refuse(
    model: PreTrainedModel,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    asked: dict[str, Any],
) -> None:
    """Raise ValueError for the first setting that cannot be honoured."""
    for name, (is_set, advice) in _REFUSED.items():
        value = getattr(generation_config, name, None)
        if is_set(value):
            raise ValueError(f"{name}={value!r} does not go with flashmap_decoding: {advice}.")
    if asked.get("assistant_model") is not None:
        raise ValueError(
            "assistant_model does not go with flashmap_decoding, whose drafter is draft_model:"
            " leave it out."
        )
    given = asked.get("kwargs") or {}
    if given.get("past_key_values") is not None or given.get("cache") is not None:
        raise ValueError(
            "past_key_values does not go with flashmap_decoding, which keeps a cache of its own, as"
            " rejected tokens have to leave it: leave it out."
        )
    unknown = [
        name
        for name, value in model_kwargs.items()
        if value is not None and name not in _KNOWN_INPUTS
    ]
    if unknown:
        raise ValueError(
            f"{', '.join(unknown)}: flashmap_decoding runs the target on input_ids and"
            " attention_mask alone. Leave it out, or use plain generate."
        )
    _check_positions(model_kwargs)
    _check_processes(model, asked.get("synced_gpus"))


def _check_positions(model_kwargs: dict[str, Any]) -> None:
    positions, mask = model_kwargs.get("position_ids"), model_kwargs.get("attention_mask")
    if positions is None:
        return
    mask = torch.ones_like(positions) if mask is None else mask.to(positions.device)
    own = mask.long().cumsum(-1) - 1
    if bool(((positions != own) & (mask != 0)).any()):
        raise ValueError(
            "position_ids are not those of attention_mask, 0, 1, 2, ... from each prompt's first"
            " token: flashmap_decoding counts them itself, leave position_ids out."
        )


def _check_processes(model: PreTrainedModel, synced_gpus: bool | None) -> None:
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not several or torch.distributed.get_world_size() == 1:
        return
    if synced_gpus is None:
        synced_gpus = is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model)
    if synced_gpus:
        raise ValueError(
            "synced_gpus: the weights are shared among several processes (FSDP, DeepSpeed ZeRO-3),"
            " whose rounds would wait for each other: gather the target on each, or use plain"
            " generate."
        )


def _checked_drafter(draft_model: Any) -> Drafter:
    if not hasattr(draft_model, "check_target"):
        found = "missing" if draft_model is None else f"a {type(draft_model).__name__}"
        raise ValueError(
            f"draft_model is {found}, expected a FlashMap drafter: load one with"
            ' draft = AutoModel.from_pretrained("REF", trust_remote_code=True) and call'
            f" {_HOW}."
        )
    drafter: Drafter = draft_model
    return drafter


def _request(
    drafter: Drafter,
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: Sequence[Processor],
    criteria: list[Any],
    generation_config: GenerationConfig,
    attention_mask: Tensor | None,
    num_steps: int | None,
    num_draws: int,
    seed: int | Sequence[int] | None,
) -> Request:
    """What `generate` prepared, in the loop's terms."""
    prompts = check_prompts(model, input_ids, attention_mask)
    max_new_tokens = generation_config.max_length - input_ids.shape[1]
    temperature = 1.0 if generation_config.do_sample else 0.0  # a warper divides by the true one
    check_numbers(max_new_tokens, temperature, num_draws)
    check_pair(drafter, model, prompts, max_new_tokens, num_steps)
    # These two criteria are part of every call; as numbers they cost nothing.
    ends = [one for one in criteria if type(one) is EosTokenCriteria]
    others = [one for one in criteria if type(one) not in (EosTokenCriteria, MaxLengthCriteria)]
    lengths = [one.max_length for one in criteria if type(one) is MaxLengthCriteria]
    processors, truncations = _split(logits_processor, generation_config.do_sample)
    return Request(
        prompts,
        _places(input_ids, attention_mask),
        Sampling(temperature, processors, truncations),
        draw_seeds(len(prompts), seed, None),
        {token for one in ends for token in one.eos_token_id.tolist()},
        others,
        max(1, min([max_new_tokens, *(length - input_ids.shape[1] for length in lengths)])),
        num_steps,
        num_draws,
        keeps_scores=bool(
            generation_config.return_dict_in_generate and generation_config.output_scores
        ),
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


class NotAnAssistant(GenerationConfig):
    """The generation configuration of a drafter, which has no `generate` of its own.

    `generate(assistant_model=draft)` first asks the assistant for its number of candidate tokens;
    here it gets a sentence that says what to call instead.
    """

    @property
    def num_assistant_tokens(self) -> int:
        """Raises ValueError."""
        raise ValueError(
            "assistant_model takes models that can generate alone, and a FlashMap drafter reads the"
            f" target's hidden states: call {_HOW}, or draft.spec_generate(target, input_ids)."
        )

    @num_assistant_tokens.setter
    def num_assistant_tokens(self, value: int) -> None:
        """A generation configuration sets every field it has."""
