"""`flashmap release`: make a folder that anybody can load with AutoModel, and check one."""

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .options import Json
from .output import busy, print_json, results_on_stdout
from .release_convert import CONVERT_EXAMPLE, convert
from .release_push import kernels, push, space
from .release_vocab import GRIDS_EXAMPLE, VOCAB_EXAMPLE, grids, vocab

if TYPE_CHECKING:
    from flashmap.release.check import Finding

release_app = typer.Typer(
    help="Build, describe, check and push release folders.",
    no_args_is_help=True,
    rich_markup_mode=None,
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
    max_shard_size: Annotated[
        str, typer.Option(help="Weights above it are split into several files.")
    ] = "5GB",
    json: Json = False,
) -> None:
    """Build a complete release folder: weights, configuration, remote code, card, licence."""
    with results_on_stdout():
        from flashmap.references import EMBEDDED, drafter_folder
        from flashmap.release.build import build_release

        folder = drafter_folder(source) if source == EMBEDDED else Path(source)
        done = build_release(folder, out, tag=tag, repo_id=repo_id, max_shard_size=max_shard_size)
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
    target: Annotated[
        str | None,
        typer.Option(help="Compare it with this target too (a REF).", show_default=False),
    ] = None,
    acceptance: Annotated[
        bool, typer.Option("--acceptance", help="Measure the card's acceptance again; minutes.")
    ] = False,
    prompts: Annotated[
        int | None,
        typer.Option(help="Prompts to measure on [default: all the card's].", show_default=False),
    ] = None,
    transformers: Annotated[
        list[str] | None,
        typer.Option(
            metavar="VERSION",
            help="Load it with this version too; may be repeated.",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Check a release folder, loading it in a fresh process that has no flashmap. Exit 1 if a check
    fails."""
    if acceptance and target is None:
        raise ValueError("--acceptance needs --target: acceptance is that of a target")
    if prompts is not None and prompts < 1:
        raise ValueError(f"--prompts {prompts}: ask for at least 1 prompt")
    if prompts is not None and not acceptance:
        raise ValueError("--prompts needs --acceptance: it says how many prompts to measure on")
    with results_on_stdout(), busy("checking") as say:
        from flashmap.release.check import Wanted, check_release

        wanted = Wanted(target, acceptance, prompts, tuple(transformers or ()))
        findings = check_release(folder, wanted, say=say)
    _report(findings, json=json)


def _report(findings: "list[Finding]", *, json: bool) -> None:
    """Print findings; exit 1 if one of them failed."""
    from flashmap.release.check import FAILED, OK

    if json:
        print_json([asdict(finding) for finding in findings])
    else:
        for finding in findings:
            print(f"{finding.status:<7} {finding.check:<15} {finding.found}")
            if finding.status == FAILED:
                print(f"{'':<23} expected {finding.expected}. {finding.fix}")
        count = Counter(finding.status for finding in findings)
        others = "".join(f", {count[name]} {name}" for name in count if name != OK)
        print(f"{count[OK]} passed{others or ', 0 failed'}")
    if any(finding.status == FAILED for finding in findings):
        raise typer.Exit(1)


@release_app.command(epilog="Example: flashmap release card models/smollm2-135m")
def card(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A models/ entry or a release folder.")
    ],
    picture: Annotated[
        bool, typer.Option(help="Draw acceptance by slot where that is not up to date.")
    ] = True,
    json: Json = False,
) -> None:
    """Make the generated parts of a model card anew; what people wrote in it stays."""
    with results_on_stdout():
        from flashmap.release.card import write_card

        done = write_card(folder, picture=picture)
    if json:
        print_json({"card": str(done.card), "changed": done.changed})
        return
    print(f"{done.card}: {', '.join(done.changed) + ' written' if done.changed else 'unchanged'}")


release_app.command(
    epilog="Example: flashmap release push release-out me/my-drafter --tag v1.0 --dry-run"
)(push)
release_app.command(
    epilog="Example: flashmap release space me/demo --draft me/my-drafter@v1.0 --yes"
)(space)
release_app.command(epilog="Example: flashmap release kernels me/flashmap-kernels --yes")(kernels)
