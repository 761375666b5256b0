"""`flashmap release convert`: checkpoints of other forms as a source for the build."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .options import Json
from .output import print_json, results_on_stdout

if TYPE_CHECKING:
    from flashmap.release.convert import Conversion

CONVERT_EXAMPLE = "Example: flashmap release convert run/checkpoint_best --out models/mine"


def convert(
    source: Annotated[
        Path, typer.Argument(metavar="SRC", help="A checkpoint folder, or a torch file in one.")
    ],
    out: Annotated[Path, typer.Option(help="Folder to write: absent or empty.")],
    target: Annotated[
        str | None,
        typer.Option(
            help="Its target (a REF), to fill in what the checkpoint does not say of it.",
            show_default=False,
        ),
    ] = None,
    revision: Annotated[
        str | None,
        typer.Option(help="The target's revision, if nothing else states it.", show_default=False),
    ] = None,
    licence: Annotated[
        str | None,
        typer.Option(
            "--license", help="The weights' licence, if no card states it.", show_default=False
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Convert a checkpoint in speculators' format, or with torch's weight files, for release
    build, and say which checks a build of it would still fail."""
    with results_on_stdout():
        from flashmap.release.convert import convert_checkpoint
        from flashmap.release.outlook import remaining_findings

        done = convert_checkpoint(source, out, target=target, revision=revision, licence=licence)
        failing = remaining_findings(done.folder)
    if json:
        findings = [asdict(finding) for finding in failing]
        print_json({**asdict(done), "folder": str(done.folder), "failing": findings})
        return
    print(f"{done.folder}: {', '.join(done.files)}, for {done.target_model}")
    for name in done.derived:
        print(f"not stated, taken from weights or target, or computed: {name}")
    for name in done.dropped:
        print(f"left out, the target's own: {name}")
    for name in done.unplaced:
        print(f"no place for: {name}", file=sys.stderr)
    if done.unfilled:
        print(_to_fill(done), file=sys.stderr)
    print(f"checks that a build of it would fail: {len(failing) or 'none'}")
    for one in failing:
        print(f"{one.check}: found {one.found}; expected {one.expected}. {one.fix}")


def _to_fill(done: "Conversion") -> str:
    why = f"{done.unread}. " if done.unread else ""
    return (
        f"{why}To be filled in: {', '.join(done.unfilled)}; state them in "
        f"{done.folder / 'config.json'}, or convert again with --target and --revision"
    )
