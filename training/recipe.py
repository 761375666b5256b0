"""A recipe: everything that decides a training run, read from one TOML file.

Each table of the file is a dataclass here. A key that no dataclass has is refused, so that a
misspelt setting is never quietly ignored.
"""

import dataclasses
import re
import tomllib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

OBJECTIVES = ("product", "mixture", "flow", "distillation")
OPTIMIZERS = ("adamw", "muon")
SLOT_WEIGHTS = ("uniform", "exponential", "d-pace", "acceptance")
SIZE = re.compile(r"[1-9][0-9]{0,5}[KMGT]B")
Table = TypeVar("Table")
HUGE, TINY = 1e30, 1e-12  # what float32 can hold, with room to compute
MANY = 10**9  # counts above it are mistakes
# Least and largest value of every number, or of every number in a list.
RANGES: dict[tuple[str, str], tuple[float, float]] = {
    ("data", "num_prompts"): (0, MANY),
    ("data", "num_own_prompts"): (0, MANY),
    ("data", "num_passages"): (0, MANY),
    ("data", "held_out_share"): (0, 1),
    ("data", "max_prompt_tokens"): (1, MANY),
    ("data", "max_new_tokens"): (1, MANY),
    ("data", "batch_size"): (1, MANY),
    ("loss", "cross_entropy"): (0, HUGE),
    ("loss", "total_variation"): (0, HUGE),
    ("loss", "decay"): (TINY, HUGE),
    ("loss", "confidence"): (0, 1),
    ("loss", "num_draws"): (1, MANY),
    ("loss", "diagonal_share"): (0, 1),
    ("loss", "boundary_share"): (0, 1),
    ("loss", "uniform_times"): (0, 1),
    ("run", "steps"): (1, MANY),
    ("run", "batch_size"): (1, MANY),
    ("run", "num_shards"): (1, MANY),
    ("run", "blocks"): (1, MANY),
    ("run", "max_length"): (2, MANY),
    ("run", "rate"): (TINY, HUGE),
    ("run", "warm_up"): (0, 1),
    ("run", "final_rate"): (0, 1),
    ("run", "weight_decay"): (0, HUGE),
    ("run", "beta2"): (0, 1 - TINY),
    ("run", "clip"): (TINY, HUGE),
    ("run", "average"): (0, 1),
    ("run", "chunk"): (0, MANY),
    ("run", "log_every"): (1, MANY),
    ("run", "evaluate_every"): (1, MANY),
    ("run", "save_every"): (0, HUGE),
    ("run", "collapse_after"): (0, MANY),
    ("evaluation", "max_new_tokens"): (1, MANY),
    ("evaluation", "num_steps"): (1, MANY),
    ("evaluation", "num_draws"): (1, MANY),
    ("evaluation", "samples"): (1, MANY),
}


@dataclass(frozen=True)
class DataRecipe:
    """What the drafter learns from.

    Attributes:
        folder: where the documents are kept.
        other_folders: documents of other recipes, which training reads too.
        num_prompts: requests made from templates and answered by the target.
        num_own_prompts: requests that the target makes up itself, answered too.
        num_passages: paragraphs that the target writes first, to be summarised.
        temperatures: temperature, as text, to its share of the answers.
        held_out_share: share of the topics that training never sees.
        files: texts of the user instead of generated ones: .jsonl with `messages`, or .txt, a
            document a line.
        max_prompt_tokens: longer prompts are left out.
        max_new_tokens: tokens of an answer at most.
        batch_size: prompts answered at once.
    """

    folder: str = "training-data"
    other_folders: Sequence[str] = ()
    num_prompts: int = 1000
    num_own_prompts: int = 0
    num_passages: int = 0
    temperatures: Mapping[str, float] = field(
        default_factory=lambda: {"0": 0.5, "0.7": 0.25, "1": 0.25}
    )
    held_out_share: float = 0.02
    files: Sequence[str] = ()
    max_prompt_tokens: int = 96
    max_new_tokens: int = 256
    batch_size: int = 64


@dataclass(frozen=True)
class LossRecipe:
    """What the drafter is trained to do.

    Attributes:
        objective: "product" (one jump, one proposal), "mixture" (one jump, several noise draws),
            "flow" (the denoiser of stage 1) or "distillation" (the flow map of stage 2).
        cross_entropy: weight of the cross-entropy against the tokens.
        total_variation: weight of the distance to the target's distribution at temperature 1.
        slot_weights: "uniform", "exponential" (exp(-(k - 1) / decay)), "d-pace", or "acceptance"
            (the slope of the expected accepted length at temperature 1; needs a total variation).
        decay: slots over which exponential weights fall by e.
        confidence: share of the drafter's own confidence in D-PACE weights.
        num_draws: noise draws a block, for "mixture".
        diagonal_share: share of blocks that keep learning the denoiser, for "distillation".
        boundary_share: share of blocks that jump from 0 to 1, for "distillation".
        uniform_times: share of times drawn evenly instead of where tokens become readable.
    """

    objective: str = "product"
    cross_entropy: float = 1.0
    total_variation: float = 0.0
    slot_weights: str = "d-pace"
    decay: float = 4.0
    confidence: float = 0.5
    num_draws: int = 4
    diagonal_share: float = 0.25
    boundary_share: float = 0.25
    uniform_times: float = 0.1


@dataclass(frozen=True)
class RunRecipe:
    """How it is optimised.

    Attributes:
        folder: where checkpoints, the log and the drafter go.
        shard_size: bytes of a weight file at most, as transformers writes it ("16MB").
        start: folder of a drafter to start from; empty: from random weights.
        steps: optimizer steps.
        batch_size: documents a step, over all processes.
        num_shards: parts that a step's documents are cut into, one after the other or one a
            process; the loss curve depends on it, not on the number of processes.
        blocks: anchors a document.
        max_length: tokens of a document at most.
        optimizer: "adamw", or "muon" for the hidden matrices and AdamW for the rest.
        rate: peak learning rate.
        warm_up: share of the steps over which the rate rises.
        final_rate: share of the peak that a cosine ends at.
        weight_decay: AdamW's, on matrices.
        beta2: AdamW's decay of squared gradients.
        clip: largest norm of the gradient.
        average: decay of the running average of the weights, which is what is kept.
        dtype: of weights and activations; float32 masters are kept either way.
        compile: fuse the target's layers and the vocabulary-sized part of the loss with
            torch.compile.
        chunk: blocks whose vocabulary-sized tensors are alive at once; 0: all.
        log_every: steps between rows of the log.
        evaluate_every: steps between evaluations on held-out documents.
        save_every: seconds between checkpoints.
        collapse_after: steps after which a drafter that says the same everywhere is an error.
    """

    folder: str = "training-runs"
    shard_size: str = "5GB"
    start: str = ""
    steps: int = 1000
    batch_size: int = 64
    num_shards: int = 1
    blocks: int = 32
    max_length: int = 352
    optimizer: str = "adamw"
    rate: float = 1e-3
    warm_up: float = 0.04
    final_rate: float = 0.02
    weight_decay: float = 0.01
    beta2: float = 0.98
    clip: float = 1.0
    average: float = 0.998
    dtype: str = "bfloat16"
    compile: bool = False
    chunk: int = 0
    log_every: int = 100
    evaluate_every: int = 1000
    save_every: float = 120.0
    collapse_after: int = 1000


@dataclass(frozen=True)
class EvaluationRecipe:
    """What is measured, on prompts that training never saw.

    Attributes:
        prompts: file of prompts, .jsonl with `prompt` and `domain`.
        draft: REF of the drafter to measure where the run's folder holds none.
        max_new_tokens: tokens of an answer at most.
        temperatures: temperatures to decode at.
        num_steps: numbers of jumps a draft.
        num_draws: numbers of noise draws a block.
        samples: texts a prompt at temperatures above 0.
        dtype: of both models; "auto" as `flashmap bench` takes it.
    """

    prompts: str = ""
    draft: str = ""
    max_new_tokens: int = 192
    temperatures: Sequence[float] = (0.0, 1.0)
    num_steps: Sequence[int] = (1,)
    num_draws: Sequence[int] = (1,)
    samples: int = 1
    dtype: str = "auto"


@dataclass(frozen=True)
class Recipe:
    """A training run.

    Attributes:
        target: REF of the model to draft for.
        drafter: fields of the drafter's configuration; what the target decides is filled in.
        seed: of all random numbers.
    """

    target: str
    drafter: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    data: DataRecipe = field(default_factory=DataRecipe)
    loss: LossRecipe = field(default_factory=LossRecipe)
    run: RunRecipe = field(default_factory=RunRecipe)
    evaluation: EvaluationRecipe = field(default_factory=EvaluationRecipe)

    def __post_init__(self) -> None:
        data, loss, run, evaluation = self.data, self.loss, self.run, self.evaluation
        _one_of("loss.objective", loss.objective, OBJECTIVES)
        _one_of("loss.slot_weights", loss.slot_weights, SLOT_WEIGHTS)
        _one_of("run.optimizer", run.optimizer, OPTIMIZERS)
        _one_of("run.dtype", run.dtype, ("float32", "bfloat16"))
        for (table, name), (least, most) in RANGES.items():
            value = getattr(getattr(self, table), name)
            for one in value if isinstance(value, tuple) else [value]:
                rule = f"at most {most:g}" if one > most >= MANY else _rule(least, most)
                _require(f"{table}.{name}", value, least <= one <= most, rule)
        _require("seed", self.seed, -(2**63) <= self.seed < 2**63, "a number of 64 bits")
        _require("run.shard_size", run.shard_size, SIZE.fullmatch(run.shard_size), 'as in "16MB"')
        for name in ("num_steps", "num_draws", "temperatures"):
            listed = getattr(evaluation, name)
            _require(f"evaluation.{name}", listed, len(listed) > 0, "at least one value")
        warm = all(map(_decodable, evaluation.temperatures))
        rule = f"0, or temperatures from {TINY:g} to {HUGE:g}"
        _require("evaluation.temperatures", evaluation.temperatures, warm, rule)
        total = loss.diagonal_share + loss.boundary_share
        _require("loss.diagonal_share + loss.boundary_share", total, total <= 1.0, "at most 1")
        weights = (loss.cross_entropy, loss.total_variation)
        _require("loss.cross_entropy and total_variation", weights, max(weights) > 0, "not both 0")
        known = loss.total_variation > 0.0 and loss.objective in ("product", "mixture")
        fits = loss.slot_weights != "acceptance" or known
        rule = "a product or mixture objective with total_variation above 0 for these weights"
        _require("loss.slot_weights", loss.slot_weights, fits, rule)
        even = run.batch_size % run.num_shards == 0
        _require("run.batch_size", run.batch_size, even, f"a multiple of {run.num_shards} shards")
        _check_temperatures(data.temperatures)


def read_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in a TOML file; `overrides` such as "run.steps=10" replace single settings.

    Raises ValueError for a file that cannot be read, unknown keys and values out of range.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"recipe {path} cannot be read: {error}") from error
    for override in overrides:
        _override(table, override)
    try:
        recipe = _build(Recipe, table, "")
    except ValueError as error:
        raise ValueError(f"recipe {path}: {error}") from error
    return recipe


def _override(table: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    names = key.strip().split(".")
    if not equals or not all(names):
        raise ValueError(f"--set {override!r}: write it as table.key=value, such as run.steps=10")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()  # text without its quotes
    for name in names[:-1]:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise ValueError(f"--set {override!r}: {name} is a value, not a table")
    table[names[-1]] = parsed


def _build(kind: type[Table], table: Mapping[str, Any], where: str) -> Table:
    """An instance of the dataclass `kind` from a TOML table; ValueError names a key that does not
    fit."""
    hints = typing.get_type_hints(kind)
    fields: Any = dataclasses.fields(kind)  # type: ignore[arg-type]
    known = [one.name for one in fields]
    values = {}
    for key, value in table.items():
        label = f"{where}{key}"
        if key not in known:
            raise ValueError(
                f"unknown key {label!r}; {where or 'the file '}takes {', '.join(known)}"
            )
        hint = hints[key]
        if dataclasses.is_dataclass(hint):
            if not isinstance(value, Mapping):
                raise ValueError(f"{label} is {value!r}, expected a table")
            values[key] = _build(hint, value, f"{label}.")  # type: ignore[arg-type]
        else:
            values[key] = _checked(value, hint, label)
    missing = [
        one.name
        for one in fields
        if one.default is dataclasses.MISSING
        and one.default_factory is dataclasses.MISSING
        and one.name not in values
    ]
    if missing:
        raise ValueError(f"{where}{missing[0]} is missing")
    return kind(**values)


def _checked(value: Any, hint: Any, label: str) -> Any:
    """`value` if it has the annotated type; whole numbers serve as fractions."""
    origin = typing.get_origin(hint) or hint
    if origin is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if origin is Sequence:
        if not isinstance(value, list):
            raise ValueError(f"{label} is {value!r}, expected a list")
        (item,) = typing.get_args(hint)
        return tuple(_checked(one, item, label) for one in value)
    if not isinstance(value, origin):
        raise ValueError(f"{label} is {value!r}, expected {getattr(origin, '__name__', origin)}")
    if isinstance(value, bool) and origin is not bool:
        raise ValueError(f"{label} is {value!r}, expected {origin.__name__}")
    return value


def _check_temperatures(shares: Mapping[str, float]) -> None:
    try:
        numbers = [(float(temperature), share + 0.0) for temperature, share in shares.items()]
    except (TypeError, ValueError):
        numbers = []
    valid = all(_decodable(one) and 0.0 <= share <= HUGE for one, share in numbers)
    _require(
        "data.temperatures",
        dict(shares),
        bool(numbers) and valid and sum(share for _, share in numbers) > 0.0,
        'temperatures and their shares, such as {"0" = 0.5, "1" = 0.5}',
    )


def _decodable(temperature: float) -> bool:
    return temperature == 0.0 or TINY <= temperature <= HUGE


def _rule(least: float, most: float) -> str:
    if most < MANY:
        return f"between {least:g} and {most:g}"
    return {TINY: "above 0", 0: "0 or more"}.get(least, f"at least {least:g}")


def _one_of(name: str, value: str, choices: Sequence[str]) -> None:
    _require(name, value, value in choices, f"one of {', '.join(choices)}")


def _require(name: str, value: Any, valid: object, rule: str) -> None:
    if not valid:
        raise ValueError(f"{name} is {value!r}, expected {rule}")
