"""What each choice of a recipe is worth: trains its variants for equally many steps and measures
acceptance on the recipe's prompts.

    python benchmarks/ablate.py [RECIPE] [--variants benchmarks/ablation.toml] [--only NAME ...]
        [--set data.folder=FOLDER] [--out benchmarks/results/ablation.csv]

The target, its documents and its answers to the prompts are made once and shared by all variants.
Rows are appended as they come; a variant whose row is there already is left out. Needs a GPU to be
done in minutes.
"""

import argparse
import csv
import datetime
import gc
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from decode_cpu import append_rows, commit

from flashmap.prompts import read_prompts
from flashmap.training.documents import read_documents
from flashmap.training.evaluation import Text, walk_texts, write_texts
from flashmap.training.recipe import Recipe, read_recipe
from flashmap.training.setup import new_drafter, prepare_target, wrap_target
from flashmap.training.trainer import Trainer

RECIPE = Path("training/recipes/smollm2-135m.toml")
LONGEST_BLOCK = 16  # answers are written this much longer than what counts


class Ablation:
    """Runs variants one after the other."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        table = tomllib.loads(args.variants.read_text(encoding="utf-8"))
        self.common: list[str] = [*table["common"], *args.overrides]
        self.variants: dict[str, dict[str, Any]] = table["variants"]
        self.accelerator = Accelerator()
        self.base = read_recipe(args.recipe, self.common)
        self.target, self.tokenizer = prepare_target(self.base, self.accelerator.device)
        self.documents = read_documents(Path(self.base.data.folder))
        self.texts: dict[float, list[Text]] = {}

    def recipe(self, name: str) -> Recipe:
        """The recipe of a variant."""
        variant, work = self.variants[name], Path(self.args.work)
        overrides = [*self.common, *variant.get("set", []), f'run.folder="{work / name}"']
        if "from" in variant:
            overrides.append(f'run.start="{work / variant["from"] / "drafter"}"')
        return read_recipe(self.args.recipe, overrides)

    def run(self, name: str) -> list[dict[str, Any]]:
        """Train a variant and measure it: a row for every pair of jumps and draws."""
        recipe = self.recipe(name)
        drafter, teacher = new_drafter(recipe, self.target, self.tokenizer)
        wrapped = wrap_target(self.target, drafter.config)
        trainer = Trainer(
            recipe, wrapped, drafter, teacher, self.documents, self.accelerator, print
        )
        began = time.monotonic()
        trainer.run()
        seconds = time.monotonic() - began
        rows = []
        drafter.eval()
        with trainer.optimizer.averaged():
            for jumps, draws in self.variants[name].get("measure", [[1, 1]]):
                measured = replace(recipe.evaluation, num_steps=(jumps,), num_draws=(draws,))
                found = {
                    temperature: walk_texts(
                        drafter, wrapped, self._texts(wrapped, temperature), measured, temperature
                    )[0]["overall"]
                    for temperature in (0.0, 1.0)
                }
                rows.append(
                    {
                        "date": datetime.date.today().isoformat(),
                        "commit": commit(),
                        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
                        "torch": torch.__version__,
                        "transformers": transformers.__version__,
                        "variant": name,
                        "steps": recipe.run.steps,
                        "seconds": round(seconds),
                        "parameters": sum(weight.numel() for weight in drafter.parameters()),
                        "jumps": jumps,
                        "draws": draws,
                        "acceptance_0": _length(found[0.0]),
                        "acceptance_1": _length(found[1.0]),
                        "first_slot_0": round(found[0.0]["slots"][0], 3),
                        "first_slot_1": round(found[1.0]["slots"][0], 3),
                        "settings": " ".join(self.variants[name].get("set", [])),
                    }
                )
        return rows

    def _texts(self, target: Any, temperature: float) -> list[Text]:
        """The target's answers to the prompts, written once."""
        if temperature not in self.texts:
            wanted = self.base.evaluation
            self.texts[temperature] = write_texts(
                target,
                self.tokenizer,
                read_prompts(Path(wanted.prompts)),
                wanted,
                LONGEST_BLOCK,
                temperature,
                self.base.seed,
                lambda stage, done, total: None,
            )
        return self.texts[temperature]


def _length(found: dict[str, Any]) -> float:
    return round(float(found["acceptance_length_without_looped"]), 3)


def main() -> None:
    """Run the variants that have no row yet."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", nargs="?", type=Path, default=RECIPE)
    parser.add_argument("--variants", type=Path, default=Path("benchmarks/ablation.toml"))
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--work", default="training-runs/ablation")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/ablation.csv"))
    args = parser.parse_args()
    done = set()
    if args.out.exists():
        with args.out.open(newline="", encoding="utf-8") as file:
            done = {row["variant"] for row in csv.DictReader(file)}
    ablation = Ablation(args)
    for name in args.only or ablation.variants:
        if name in done:
            continue
        rows = ablation.run(name)
        append_rows(args.out, rows)
        for row in rows:
            print(name, row["jumps"], row["draws"], row["acceptance_0"], row["acceptance_1"])
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
