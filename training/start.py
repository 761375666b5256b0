"""Puts a run or an evaluation together from a recipe: what the command line calls."""

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashmap import machine
from flashmap.files import only_writer
from flashmap.pair import load_pair
from flashmap.prompts import read_prompts

from .data import made_for
from .documents import read_documents
from .evaluation import Progress, evaluate_loop, evaluate_walks
from .recipe import Recipe
from .setup import new_drafter, prepare_target, wrap_target
from .trainer import Trainer

if TYPE_CHECKING:
    from accelerate import Accelerator


def start_run(recipe: Recipe, seconds: float, *, cpu: bool, say: Callable[[str], None]) -> None:
    """Train by `recipe` for about `seconds`, in every process that `accelerate launch` started.

    Raises ValueError for what a user can mend, TrainingError where the run cannot go on.
    """
    from accelerate import Accelerator  # comes with the extra `train`

    accelerator = Accelerator(cpu=cpu)
    writer = only_writer(Path(recipe.run.folder) / "checkpoints")
    with writer if accelerator.is_main_process else nullcontext():
        _train(recipe, seconds, accelerator, say)


def _train(
    recipe: Recipe, seconds: float, accelerator: "Accelerator", say: Callable[[str], None]
) -> None:
    folders = (recipe.data.folder, *recipe.data.other_folders)
    documents = read_documents(*map(Path, folders))
    target, tokenizer = prepare_target(recipe, accelerator.device)
    drafter, teacher = new_drafter(recipe, target, tokenizer)
    documents.require_known(drafter.config.vocab_size)
    wrapped = wrap_target(target, drafter.config)

    def report(line: str) -> None:
        if accelerator.is_main_process:
            say(line)

    for folder in folders:
        if (other := made_for(Path(folder)) or recipe.target) != recipe.target:
            report(
                f"{folder} was made for target {other!r} and the recipe names {recipe.target!r}: if"
                " they are not the same model, the drafter learns what its target does not say."
            )
    count = sum(parameter.numel() for parameter in drafter.parameters())
    report(f"{count:,} parameters, {len(documents):,} documents, on {accelerator.device}")
    trainer = Trainer(recipe, wrapped, drafter, teacher, documents, accelerator, report)
    done = trainer.run(seconds)
    report(f"step {done} of {recipe.run.steps}; the drafter is in {trainer.drafter}")


def start_evaluation(
    recipe: Recipe,
    draft: str | None,
    device: str | None,
    *,
    loop: bool,
    progress: Progress,
) -> dict[str, Any]:
    """Measure `draft`, else the run's drafter, else the recipe's, on the recipe's prompts.

    Raises ValueError if there is no drafter or no prompt.
    """
    wanted = recipe.evaluation
    own = Path(recipe.run.folder) / "drafter"
    reference = draft or (str(own) if (own / "config.json").is_file() else wanted.draft)
    if not reference:
        raise ValueError(
            f"there is no drafter to measure: {own} is not there and the recipe names no"
            " evaluation.draft; train one, or pass --draft"
        )
    if not wanted.prompts:
        raise ValueError("the recipe names no evaluation.prompts: give it a file of prompts")
    prompts = read_prompts(Path(wanted.prompts))
    target, drafter, tokenizer = load_pair(recipe.target, reference, device, wanted.dtype)
    for steps in wanted.num_steps:
        drafter.config.grid(steps)
    wrapped = wrap_target(target, drafter.config)
    arguments: Any = (drafter, wrapped, tokenizer, prompts, wanted, recipe.seed, progress)
    return {
        "draft": reference,
        "target": recipe.target,
        "prompts": {"file": wanted.prompts, "count": len(prompts)},
        "settings": dataclasses.asdict(wanted),
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": machine.device_name(target.device),
        **machine.provenance(),
        "walk": evaluate_walks(*arguments),
        "loop": evaluate_loop(*arguments) if loop else [],
    }
