"""`flashmap bench`: acceptance and wall clock beside plain decoding of the same target, in the same
run."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from flashmap import machine

from .options import (
    Adaptive,
    Device,
    Draft,
    Dtype,
    Json,
    MaxNewTokens,
    NumCandidates,
    NumDraws,
    NumSteps,
    Target,
    Temperature,
    check_numbers,
)
from .output import print_json, results_on_stdout

MOST_REPEATS = 1000


def bench(
    target: Target,
    draft: Draft,
    prompts: Annotated[
        Path, typer.Option(help="A prompt a line, or .jsonl with prompt and domain a line.")
    ],
    temperature: Temperature = 0.0,
    max_new_tokens: MaxNewTokens = 128,
    repeats: Annotated[int, typer.Option(help="Runs of each prompt; the median time counts.")] = 1,
    num_steps: NumSteps = None,
    num_draws: NumDraws = 1,
    num_candidates: NumCandidates = 1,
    adaptive: Adaptive = False,
    dtype: Dtype = "auto",
    device: Device = None,
    seed: Annotated[int, typer.Option(help="Seed of the first prompt; the next has one more.")] = 0,
    json: Json = False,
) -> None:
    """Measure a drafter: acceptance length and tokens/s beside the same target alone."""
    check_numbers(max_new_tokens, temperature)
    if not 1 <= repeats <= MOST_REPEATS:
        raise ValueError(f"--repeats {repeats}: ask for 1 to {MOST_REPEATS} runs of each prompt")
    from flashmap.prompts import ALL, read_prompts

    from .measure import Settings, measure, summarise

    rows_of_file = read_prompts(prompts)
    with results_on_stdout():
        from flashmap.pair import load_pair

        target_model, draft_model, tokenizer = load_pair(target, draft, device, dtype)
        settings = Settings(
            max_new_tokens,
            temperature,
            num_steps,
            num_draws,
            num_candidates,
            adaptive,
            repeats,
            seed,
            raw=not tokenizer.chat_template,
        )
        protocol = _protocol(target, draft, prompts, len(rows_of_file), settings, target_model)
        if not json:
            _print_protocol(protocol)
        with _progress(len(rows_of_file)) as advance:
            samples = measure(target_model, draft_model, tokenizer, rows_of_file, settings, advance)
    domains = list(dict.fromkeys(sample.domain for sample in samples))
    rows = [
        summarise(
            domain,
            [sample for sample in samples if sample.domain == domain],
            greedy=temperature == 0,
        )
        for domain in domains
    ]
    overall = summarise(ALL, samples, greedy=temperature == 0)
    if json:
        print_json({"protocol": protocol, "rows": rows, "overall": overall})
    else:
        _print_table(rows if domains == [ALL] else [*rows, {**overall, "domain": "overall"}])


def _protocol(
    target: str, draft: str, prompts: Path, count: int, settings: Any, target_model: Any
) -> dict[str, Any]:
    from .measure import WARM_UP_TOKENS

    sampled = "do_sample=True, top_k=0, top_p=1" if settings.temperature else "do_sample=False"
    return {
        "target": target,
        "draft": draft,
        "prompts": {"file": str(prompts), "count": count},
        "template": "none (raw prompts)"
        if settings.raw
        else "the tokenizer's chat template, one user turn",
        "temperature": settings.temperature,
        "max_new_tokens": settings.max_new_tokens,
        "num_steps": settings.num_steps,
        "num_draws": settings.num_draws,
        "num_candidates": settings.num_candidates,
        "adaptive": settings.adaptive,
        "repeats": settings.repeats,
        "seed": settings.seed,
        "dtype": str(target_model.dtype).removeprefix("torch."),
        "device": machine.device_name(target_model.device),
        "plain": f"target.generate of the same target with {sampled}, right before or after "
        f"FlashMap in turns",
        "seconds": "wall clock with the prompt's own pass, median over the repeats",
        "warm_up": f"one run of {WARM_UP_TOKENS} tokens a side, not counted",
        "acceptance_length": "tokens a verification pass, bonus token included, before the cut at "
        "max_new_tokens",
        "looped": "outputs whose last 8 tokens stand at their end 4 times, evenly spaced by at "
        "most 64 tokens",
        **machine.provenance(),
    }


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """A progress bar over prompts on stderr, nothing where that is no terminal; gives what moves it
    on."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("prompts", total=total)
        yield lambda: bar.advance(task)


def _print_protocol(protocol: dict[str, Any]) -> None:
    for key, value in protocol.items():
        pairs = (
            ", ".join(f"{name} {item}" for name, item in value.items())
            if isinstance(value, dict)
            else value
        )
        print(f"{key}: {pairs}", file=sys.__stdout__)


def _print_table(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    headers = {
        "domain": "domain",
        "prompts": "prompts",
        "tokens": "tokens",
        "rounds": "rounds",
        "acceptance_length": "acceptance",
        "acceptance_length_without_looped": "without looped",
        "tokens_per_second": "tokens/s",
        "plain_tokens_per_second": "plain tokens/s",
        "speedup": "speedup",
        "identical": "identical",
        "looped": "looped",
    }
    for header in headers.values():
        table.add_column(header, justify="left" if header == "domain" else "right")
    for row in rows:
        table.add_row(*(_cell(row[key]) for key in headers))
    # A pipe gets whole lines, however wide: a table cut to 80 columns is of no use to a script.
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
