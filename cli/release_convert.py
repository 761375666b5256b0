"""`flashmap release convert`: checkpoints of other forms as a source for the build."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from .options import Json
from .output import print_json, results_on_stdout

CONVERT_EXAMPLE = "Example: flashmap release convert run/checkpoint_best --out models/mine"


def convert(
    source: Annotated[
        Path, typer.Argument(metavar="SRC", help="A checkpoint folder, or a torch file in one.")
    ],
    out: Annotated[Path, typer.Option(help="Folder to write: absent or empty.")],
    target: Annotated[
        str | None, typer.Option(help="Target to record [default: as the checkpoint says].")
    ] = None,
    json: Json = False,
) -> None:
    """Convert a checkpoint in speculators' format, or with torch's weight files, for release
    build."""
    with results_on_stdout():
        from flashmap.release.convert import convert_checkpoint

        done = convert_checkpoint(source, out, target=target)
    if json:
        print_json({**asdict(done), "folder": str(done.folder)})
        return
    print(f"{done.folder}: {', '.join(done.files)}, for {done.target_model}")
    for name in done.derived:
        print(f"not stated, taken from the weights or computed: {name}")
    for name in done.dropped:
        print(f"left out, the target's own: {name}")
    for name in done.unplaced:
        print(f"no place for: {name}", file=sys.stderr)
