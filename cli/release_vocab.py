"""`flashmap release vocab` and `grids`: what a release needs to know of its target's vocabulary."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .options import Json, Target
from .output import print_json, progress_bars, results_on_stdout

if TYPE_CHECKING:
    from flashmap.release.vocab import Vocabulary

VOCAB_EXAMPLE = (
    "Example: flashmap release vocab --target smollm2-135m --corpus answers.jsonl --out "
    "draft_vocab.safetensors"
)
GRIDS_EXAMPLE = "Example: flashmap release grids --vocab-size 49152 --steps 4 --json"


def vocab(
    target: Target,
    corpus: Annotated[
        list[Path],
        typer.Option(help="A .txt, .jsonl or .parquet file, or a folder of them; more may follow."),
    ],
    out: Annotated[Path, typer.Option(help="File to write, such as draft_vocab.safetensors.")],
    more: Annotated[
        list[Path] | None, typer.Argument(metavar="PATH...", help="More of the corpus.")
    ] = None,
    processes: Annotated[
        int | None, typer.Option(help="Processes that count [default: the cores].")
    ] = None,
    coverage: Annotated[
        float, typer.Option(help="Share of the tokens that the recommended size covers.")
    ] = 0.995,
    json: Json = False,
) -> None:
    """Rank the target's tokens on a corpus, best one that it wrote itself. Goes on where an earlier
    run stopped."""
    with results_on_stdout():
        from flashmap.release.vocab import rank_vocabulary

        with progress_bars() as progress:
            found = rank_vocabulary(
                target,
                [*corpus, *(more or ())],
                out,
                num_processes=processes,
                wanted=coverage,
                progress=progress,
            )
    if json:
        picture = str(found.picture) if found.picture else None
        print_json({**asdict(found), "file": str(found.file), "picture": picture})
        return
    _print_vocabulary(found)


def grids(
    vocab_size: Annotated[int, typer.Option(help="Rows of the target's embedding.")],
    steps: Annotated[int, typer.Option(help="Grids for 1 to this many jumps a draft, up to 64.")],
    mode: Annotated[
        str, typer.Option(help="exact, or compat: the published constants bit for bit.")
    ] = "exact",
    json: Json = False,
) -> None:
    """Compute jump grids: at which times a draft in several jumps stops on its way."""
    with results_on_stdout():
        from flashmap.schedule import jump_grids

        found = jump_grids(vocab_size, steps, mode)
    if json:
        print_json(found)
        return
    for number, times in found.items():
        print(f"{number}: {' '.join(map(str, times))}")


def _print_vocabulary(found: "Vocabulary") -> None:
    from rich.console import Console
    from rich.table import Table

    print(f"{found.file}: {found.tokens:,} tokens of {found.files} files, {found.size:,} bytes")
    print(
        f"{found.distinct:,} of {found.vocab_size:,} tokens came; about {found.unseen:.3%} of other"
        " such text would be tokens that did not"
    )
    table = Table(box=None, header_style="bold")
    for header in ("size", "covers", "leaves"):
        table.add_column(header, justify="right")
    rows = sorted({(row.size, row.coverage) for row in (*found.coverage, found.recommended)})
    for size, coverage in rows:
        style = "bold" if size == found.recommended.size else ""
        table.add_row(f"{size:,}", f"{coverage:.3%}", f"{1.0 - coverage:.3%}", style=style)
    Console(width=80).print(table)
    print(
        f"recommended: draft_vocab_size {found.recommended.size}, which covers"
        f" {found.recommended.coverage:.3%}"
    )
    if found.picture is None:
        print("no picture: matplotlib is not installed (pip install 'flashmap-hub[vocab]')")
    else:
        print(f"curve: {found.picture}")
