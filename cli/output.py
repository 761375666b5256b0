"""What goes where: results on stdout, everything else on stderr, and with --json one document on
stdout and no more."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any


@contextmanager
def results_on_stdout() -> Iterator[None]:
    """Within it, what libraries print to stdout goes to stderr, and their progress bars show on a
    terminal only."""
    from transformers.utils import logging

    bars: Any = logging
    if not sys.stderr.isatty():
        bars.disable_progress_bar()
    with redirect_stdout(sys.stderr):
        yield


@contextmanager
def busy(what: str) -> Iterator[Callable[[str], None]]:
    """A spinner on a terminal's stderr while something takes long; gives what says which part of it
    is under way."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda part: None
        return
    with console.status(what) as status:
        yield lambda part: status.update(f"{what}: {part}")


@contextmanager
def progress_bars() -> Iterator[Callable[[str, int, int], None]]:
    """Within it, a function that is told a stage, what is done and what there is to do: a bar a
    stage on stderr, nothing where that is no terminal."""
    from rich.console import Console
    from rich.progress import Progress, TaskID

    console = Console(stderr=True)
    tasks: dict[str, TaskID] = {}
    with Progress(console=console, disable=not console.is_terminal) as bar:

        def advance(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done, total=total)

        yield advance


def print_json(document: Any) -> None:
    """Write ``document`` as the one JSON document of this run; numbers that JSON lacks are
    refused."""
    print(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False))
