"""`flashmap train`: make a drafter's data, train it, and measure it, each by a recipe."""

import importlib.util
import math
from pathlib import Path
from typing import Annotated, Any

import typer

from .options import Device, Json
from .output import print_json, progress_bars, results_on_stdout

train_app = typer.Typer(
    help="Train a drafter by a recipe.", no_args_is_help=True, rich_markup_mode=None
)
NEEDED = ("accelerate", "matplotlib")  # what the extra `train` brings
EXAMPLE = "training/recipes/smollm2-135m.toml"

RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe, a .toml file.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="Replace a setting, such as run.steps=100; may be repeated."),
]


@train_app.command(epilog=f"Example: flashmap train data {EXAMPLE}")
def data(recipe: RecipeFile, set_: Set = None, device: Device = None, json: Json = False) -> None:
    """Make the documents to learn from: requests and the target's own answers. Goes on where an
    earlier run stopped."""
    with results_on_stdout():
        chosen = _recipe(recipe, set_)
        from flashmap.modeling.target_flashmap import num_embedding_rows
        from flashmap.training.data import DataMaker
        from flashmap.training.report import report_data
        from flashmap.training.setup import prepare_target

        target, tokenizer = prepare_target(chosen, device)
        with progress_bars() as progress:
            DataMaker(chosen, target, tokenizer, progress).run()
        vocab_size = num_embedding_rows(target)
        found = report_data(Path(chosen.data.folder), chosen.target, vocab_size)
    if json:
        print_json(found)
        return
    for name, value in found.items():
        print(f"{name}: {value}")


@train_app.command(epilog=f"Example: flashmap train run {EXAMPLE}")
def run(
    recipe: RecipeFile,
    set_: Set = None,
    seconds: Annotated[
        float | None,
        typer.Option(help="Stop with a checkpoint after about this long.", show_default=False),
    ] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Leave the GPU alone.")] = False,
) -> None:
    """Train the drafter. Goes on from the newest checkpoint; under `accelerate launch -m
    flashmap.cli.main train run RECIPE` several GPUs share the work."""
    if seconds is not None and not 0.0 <= seconds < math.inf:
        raise ValueError(f"--seconds {seconds}: give 0 or more, or leave it out to run to the end")
    with results_on_stdout():
        chosen = _recipe(recipe, set_)
        from flashmap.training.start import start_run

        start_run(chosen, math.inf if seconds is None else seconds, cpu=cpu, say=_say)


@train_app.command("eval", epilog=f"Example: flashmap train eval {EXAMPLE} --json")
def evaluate(
    recipe: RecipeFile,
    set_: Set = None,
    draft: Annotated[
        str | None,
        typer.Option(
            help="Drafter to measure [default: the run's, else the recipe's evaluation.draft].",
            show_default=False,
        ),
    ] = None,
    loop: Annotated[
        bool, typer.Option(help="Also decode every prompt, one after the other.")
    ] = True,
    device: Device = None,
    json: Json = False,
) -> None:
    """Measure acceptance lengths on the recipe's prompts, by slot, domain, temperature, jumps and
    draws."""
    with results_on_stdout():
        chosen = _recipe(recipe, set_)
        from flashmap.training.start import start_evaluation

        with progress_bars() as progress:
            found = start_evaluation(chosen, draft, device, loop=loop, progress=progress)
    if json:
        print_json(found)
        return
    _print_evaluation(found)


def _recipe(path: Path, overrides: list[str] | None) -> Any:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f"training needs {' and '.join(missing)}, not installed here: pip install"
            " 'flashmap-hub[train]'"
        )
    from flashmap.training.recipe import read_recipe

    return read_recipe(path, overrides or ())


def _say(line: str) -> None:
    print(line, flush=True)


def _print_evaluation(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    for key in ("draft", "target", "prompts", "dtype", "device"):
        print(f"{key}: {found[key]}")
    for name in ("walk", "loop"):
        table = Table(title=name, box=None, header_style="bold", title_justify="left")
        headers = ("temperature", "jumps", "draws", "domain", "texts", "looped", "rounds")
        for header in (*headers, "acceptance", "without looped", "slots"):
            table.add_column(header, justify="left" if header == "domain" else "right")
        for row in found[name]:
            for part in (*row["domains"], row["overall"]):
                slots = " ".join(_number(rate) for rate in part["slots"])
                lengths = (part["acceptance_length"], part["acceptance_length_without_looped"])
                table.add_row(
                    f"{row['temperature']:g}",
                    str(row["num_steps"]),
                    str(row["num_draws"]),
                    part["domain"],
                    *(str(part[key]) for key in ("texts", "looped", "rounds")),
                    *(_number(length) for length in lengths),
                    slots,
                )
        if found[name]:
            Console(width=160).print(table)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
