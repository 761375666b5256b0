"""`flashmap release`: make a folder that anybody can load with AutoModel, and check one."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from .options import Json
from .output import print_json, results_on_stdout
from .release_convert import CONVERT_EXAMPLE, convert
from .release_vocab import GRIDS_EXAMPLE, VOCAB_EXAMPLE, grids, vocab

release_app = typer.Typer(
    help="Build and check release folders.", no_args_is_help=True, rich_markup_mode=None
)


release_app.command(epilog=VOCAB_EXAMPLE)(vocab)
release_app.command(epilog=GRIDS_EXAMPLE)(grids)
release_app.command(epilog=CONVERT_EXAMPLE)(convert)


@release_app.command(epilog="Example: flashmap release build models/smollm2-135m --out release-out")
def build(
    source: Annotated[
        str, typer.Argument(help="A models/ entry, by name or path, or a checkpoint folder.")
    ],
    out: Annotated[Path, typer.Option(help="Folder to write: absent, empty, or an earlier build.")],
    tag: Annotated[str | None, typer.Option(help="The tag it will be released under.")] = None,
    repo_id: Annotated[str | None, typer.Option(help="The Hub repository it is meant for.")] = None,
    json: Json = False,
) -> None:
    """Build a complete release folder: weights, configuration, remote code, card, licence."""
    with results_on_stdout():
        from flashmap.references import EMBEDDED, drafter_folder
        from flashmap.release.build import build_release

        folder = drafter_folder(source) if source == EMBEDDED else Path(source)
        done = build_release(folder, out, tag=tag, repo_id=repo_id)
    if json:
        print_json({**asdict(done), "folder": str(done.folder)})
        return
    size = sum(done.files.values())
    state = "built" if done.changed else "unchanged"
    print(
        f"{done.folder}: {state}, {len(done.files)} files, {size:,} bytes, code digest "
        f"{done.digest[:16]}"
    )


@release_app.command(epilog="Example: flashmap release check release-out")
def check(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The release folder.")],
    json: Json = False,
) -> None:
    """Check a release folder, loading it in a fresh process that has no flashmap. Exit 1 if a check
    fails."""
    with results_on_stdout():
        from flashmap.release.check import FAILED, SKIPPED, check_release

        findings = check_release(folder)
    failed = [finding for finding in findings if finding.status == FAILED]
    skipped = [finding for finding in findings if finding.status == SKIPPED]
    if json:
        print_json([asdict(finding) for finding in findings])
    else:
        for finding in findings:
            print(f"{finding.status:<7} {finding.check:<13} {finding.found}")
            if finding.expected:
                print(f"{'':<21} expected {finding.expected}. {finding.fix}")
        passed = len(findings) - len(failed) - len(skipped)
        rest = f", {len(skipped)} skipped" if skipped else ""
        print(f"{passed} passed, {len(failed)} failed{rest}")
    if failed:
        raise typer.Exit(1)
