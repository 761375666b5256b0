"""`flashmap release push | space | kernels`: publish a folder on the Hub, in one commit that is
whole or not there."""

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import Json
from .output import print_json, results_on_stdout

if TYPE_CHECKING:
    from flashmap.release.hub import HubRepo
    from flashmap.release.plan import LocalFile, Plan
    from flashmap.release.push import Mark, Verify

RepoId = Annotated[str, typer.Argument(metavar="REPO_ID", help="The repository, as owner/name.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print what would be sent and deleted, and send nothing.")
]
PullRequest = Annotated[
    bool, typer.Option("--pr", help="Open a pull request instead of committing to main.")
]
Private = Annotated[
    bool, typer.Option("--private", help="Make the repository private, if it is created.")
]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask before sending.")]


def push(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The release folder.")],
    repo_id: RepoId,
    tag: Annotated[
        str | None,
        typer.Option(help="Name of the release [default: the one it was built with]."),
    ] = None,
    dry_run: DryRun = False,
    pr: PullRequest = False,
    private: Private = False,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Check a release folder and push it as one commit, which is loaded from the Hub before it
    becomes main; then tag it. Run again, it finishes what a failure left, or changes nothing."""
    publication = _Publication(dry_run, pr, private, yes, json)
    with results_on_stdout():
        from flashmap.release.model_repo import release_files, release_mark
        from flashmap.release.verify import loads

        repo = publication.repository(repo_id)
        files = release_files(folder)
        mark = release_mark(folder, repo_id, tag)
    publication.publish(repo, files, mark, loads(repo, files), f"Release {mark.name}")


def space(
    repo_id: RepoId,
    draft: Annotated[str, typer.Option(help="The drafter on the Hub: owner/name[@revision].")],
    target: Annotated[
        str | None, typer.Option(help="The target [default: the one the drafter names].")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="The application [default: space/ of the checkout].")
    ] = None,
    dry_run: DryRun = False,
    pr: PullRequest = False,
    private: Private = False,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Push the Gradio application as a Space that pins the drafter's and the target's commits."""
    publication = _Publication(dry_run, pr, private, yes, json)
    with results_on_stdout():
        from flashmap.release.space_repo import Pin, pin, space_files, target_of
        from flashmap.release.verify import arrives

        repo = publication.repository(repo_id, "space")
        drafter = pin(draft)
        pins: dict[str, Pin] = {"draft": drafter, "target": pin(target or target_of(drafter))}
        files = space_files(folder or _space_folder(), pins)
    message = f"Show {drafter.repo_id} at {drafter.revision[:12]}"
    publication.publish(repo, files, None, arrives(repo, files), message)


def kernels(
    repo_id: RepoId,
    version: Annotated[
        int,
        typer.Option(min=1, max=9999, help="Version of the interface: the branch that users name."),
    ] = 1,
    dry_run: DryRun = False,
    pr: PullRequest = False,
    private: Private = False,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Push the fused operations as a kernel repository, for the PyPI package `kernels`."""
    publication = _Publication(dry_run, pr, private, yes, json)
    with results_on_stdout():
        from flashmap import kernels as room
        from flashmap.release.kernel_repo import VARIANT, kernel_files
        from flashmap.release.push import Mark
        from flashmap.release.verify import imports

        repo = publication.repository(repo_id, "kernel")
        files = kernel_files(Path(next(iter(room.__path__))), repo_id, version)
    mark, verify = Mark(f"v{version}", moves=True), imports(repo, files, VARIANT)
    publication.publish(repo, files, mark, verify, f"Kernels, version {version}")


def _space_folder() -> Path:
    from flashmap.references import checkout_root

    root = checkout_root()
    if root is None:
        raise ValueError(
            "this flashmap is installed from a package, which holds no Space: name the "
            "application's folder with --folder"
        )
    return root / "space"


@dataclass(frozen=True)
class _Publication:
    """The options that every kind of push has, and what they make of it."""

    dry_run: bool
    pull_request: bool
    private: bool
    yes: bool
    json: bool

    def __post_init__(self) -> None:
        if not (self.dry_run or self.yes) and (self.json or not sys.stdin.isatty()):
            raise typer.BadParameter("nobody can be asked here: give --yes, or --dry-run")

    def repository(self, repo_id: str, kind: str = "model") -> "HubRepo":
        """The repository, which the token may write to unless nothing is to be sent."""
        from flashmap.release.hub import HubRepo

        repo = HubRepo(repo_id, kind)
        if not self.dry_run:
            repo.require_writer()
        return repo

    def publish(
        self,
        repo: "HubRepo",
        files: "Mapping[str, LocalFile]",
        mark: "Mark | None",
        verify: "Verify",
        message: str,
    ) -> None:
        """Plan, show, ask, push, and tell what was done."""
        with results_on_stdout():
            from flashmap.release.push import make_plan, push

            plan = make_plan(repo, files, mark)
        document = _document(repo, plan, mark)
        if not self.json:
            _show(document, kept=self.dry_run)
        if self.dry_run:
            if self.json:
                print_json(document)
            return
        if not (self.yes or plan.empty):
            typer.confirm("Send this?", err=True, abort=True)
        with results_on_stdout():
            done = push(
                repo,
                plan,
                message=message,
                mark=mark,
                verify=verify,
                private=self.private,
                pull_request=self.pull_request,
                report=_report,
            )
        if self.json:
            print_json(document | asdict(done))
        elif done.pull_request:
            print(f"{done.pull_request}: commit {done.commit}; merged, push again to name it")
        else:
            state = "pushed" if done.changed else "unchanged"
            named = f", {done.mark}" if done.mark else ""
            print(f"{done.url}: {state}, commit {done.commit}{named}")


def _report(step: str) -> None:
    if sys.stderr.isatty():
        print(step, file=sys.stderr)


def _document(repo: "HubRepo", plan: "Plan", mark: "Mark | None") -> dict[str, Any]:
    """The plan as it is printed."""
    changes = {**dict.fromkeys(plan.added, "add"), **dict.fromkeys(plan.changed, "change")}
    return {
        "repo_id": repo.id,
        "repo_type": repo.kind,
        "url": repo.url,
        "head": plan.head,
        "mark": mark.name if mark else None,
        "files": [
            {
                "path": path,
                "size": file.size,
                "sha256": file.sha256,
                "change": changes.get(path, "keep"),
            }
            for path, file in sorted(plan.files.items())
        ],
        "deleted": plan.deleted,
    }


def _show(document: dict[str, Any], *, kept: bool) -> None:
    head = document["head"] or "no repository yet"
    print(f"{document['repo_type']} {document['url']}, main at {head}")
    for row in document["files"]:
        if kept or row["change"] != "keep":
            print(f"{row['change']:<7} {row['size']:>14,}  {row['sha256']}  {row['path']}")
    for path in document["deleted"]:
        print(f"{'delete':<7} {'':>14}  {'':<64}  {path}")
