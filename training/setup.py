"""What a run starts from: the target, a drafter for it, documents, and where to compute."""

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flashmap.modeling.configuration_flashmap import FlashMapConfig
from flashmap.modeling.modeling_flashmap import FlashMapDraftModel
from flashmap.modeling.target_flashmap import (
    check_target,
    dense_embedding,
    num_embedding_rows,
    text_config,
)
from flashmap.pair import load_drafter, load_target, vocabulary_hash
from flashmap.schedule import jump_grids

from .blocks import Target
from .flow import Distillation, Flow
from .objectives import Mixture, Objective, Product
from .recipe import LossRecipe, Recipe, RunRecipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

OBJECTIVES: dict[str, type[Objective]] = {"product": Product, "mixture": Mixture, "flow": Flow}
NUM_TAPS = 5
CLOSED = 0.05  # a noise gate smaller than this lets nothing through
MAX_STEPS = 8  # jumps that a drafter gets grids for


def drafter_config(
    recipe: Recipe, target: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase"
) -> FlashMapConfig:
    """The drafter's configuration: the recipe's fields, and what the target decides.

    Raises ValueError for fields that do not exist or do not fit the target.
    """
    inner = text_config(target)
    depth = inner.num_hidden_layers
    # Evenly from the second layer to the third from the end, which predict best what comes.
    taps = [round(1 + i * (depth - 4) / (NUM_TAPS - 1)) for i in range(NUM_TAPS)]
    vocab_size = num_embedding_rows(target)
    decided: dict[str, Any] = {
        "target_model": recipe.target,
        "target_hidden_size": inner.hidden_size,
        "vocab_size": vocab_size,
        "target_layer_ids": sorted({max(tap, 0) for tap in taps}),
        "jump_grids": jump_grids(vocab_size, MAX_STEPS),
        "target_vocab_hash": vocabulary_hash(tokenizer),
        "num_target_layers": depth,
    }
    known = set(inspect.signature(FlashMapConfig.__init__).parameters) - {"self", "kwargs"}
    unknown = sorted(recipe.drafter.keys() - known)
    if unknown:
        raise ValueError(
            f"drafter.{unknown[0]} is no field of a drafter's configuration; there are"
            f" {', '.join(sorted(known))}"
        )
    config = FlashMapConfig(**{**decided, **recipe.drafter})
    check_target(config, target)
    return config


def prepare_target(
    recipe: Recipe, device: torch.device | str | None
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """The recipe's target, frozen, in the run's dtype, and its tokenizer; `device` as `load_pair`
    takes it."""
    target, tokenizer = load_target(recipe.target, device, recipe.run.dtype)
    target.requires_grad_(False)
    return target, tokenizer


def wrap_target(target: "PreTrainedModel", config: FlashMapConfig) -> Target:
    """The target as a drafter with this configuration is trained on it.

    Raises ValueError if its embedding is not stored as plain numbers.
    """
    embedding = dense_embedding(target.get_input_embeddings(), config.target_hidden_size)
    if embedding is None:
        raise ValueError(
            "The target's embedding is packed or quantised: train on the unquantised target; the"
            " drafter then serves the quantised one too."
        )
    return Target(target, list(config.target_layer_ids), embedding[: config.vocab_size])


def new_drafter(
    recipe: Recipe, target: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase"
) -> tuple[FlashMapDraftModel, FlashMapDraftModel | None]:
    """The drafter to train and, for distillation, its frozen teacher.

    It starts from `run.start`, else from random weights that depend on the seed alone. Where the
    best map ignores the noise, the noise gate starts closed.
    """
    config, run = drafter_config(recipe, target, tokenizer), recipe.run
    dtype = getattr(torch, run.dtype)
    if run.start:
        drafter = _read_start(run.start)
        if recipe.loss.objective != "product" and abs(drafter.noise_gate.item()) < CLOSED:
            torch.nn.init.ones_(drafter.noise_gate)  # what the other objectives read the state by
        _require_same_shape(drafter.config, config, run.start)
    else:
        torch.manual_seed(recipe.seed)
        drafter = FlashMapDraftModel(config)
        if recipe.loss.objective == "product":
            with torch.no_grad():
                drafter.noise_gate.zero_()
    # What a first stage leaves is not fit to be released, and says so.
    drafter.config.flow_map = recipe.loss.objective != "flow"
    move: Any = {"device": target.device, "dtype": dtype}
    drafter = drafter.to(**move)
    teacher = None
    if recipe.loss.objective == "distillation" and run.start:
        teacher = _read_start(run.start).to(**move).eval().requires_grad_(False)
    return drafter, teacher


def _read_start(start: str) -> Any:
    try:
        return load_drafter(Path(start))
    except ValueError as error:
        raise ValueError(f"run.start is {start!r}, which holds no drafter: {error}") from error


def _require_same_shape(found: FlashMapConfig, asked: FlashMapConfig, start: str) -> None:
    names: tuple[str, ...] = (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
    )
    names += ("cond_dim", "time_embed_dim", "target_layer_ids", "block_size", "vocab_size")
    for name in names:
        if getattr(found, name) != getattr(asked, name):
            raise ValueError(
                f"run.start {start!r} has {name} {getattr(found, name)}, the recipe asks for"
                f" {getattr(asked, name)}: give the recipe's drafter table the same fields."
            )


def make_objective(
    recipe: LossRecipe,
    model: FlashMapDraftModel,
    target: Target,
    teacher: FlashMapDraftModel | None,
    run: RunRecipe,
) -> Objective:
    """The recipe's objective; `teacher` is the frozen stage-1 drafter that distillation needs."""
    if recipe.objective == "distillation":
        if teacher is None:
            raise ValueError(
                "loss.objective is 'distillation', which needs the drafter of stage 1: train one"
                ' with objective = "flow" and name its folder in run.start.'
            )
        return Distillation(recipe, model, target, run, teacher)
    return OBJECTIVES[recipe.objective](recipe, model, target, run)
