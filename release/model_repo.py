"""A release folder on its way to a model repository: what is looked at before it leaves."""

from pathlib import Path

from flashmap.checkpoint import read_json

from .check import FAILED, check_release
from .contents import RECORD
from .errors import ReleaseError
from .plan import LocalFile, local_file
from .push import Mark
from .safety import publishable


def release_files(folder: Path) -> dict[str, LocalFile]:
    """The files of a release folder. Raises ReleaseError unless every check passes and all of it
    may be published."""
    failed = [finding for finding in check_release(folder) if finding.status == FAILED]
    if failed:
        raise ReleaseError(
            "check",
            f"{len(failed)} failed checks in {folder}, the first is {failed[0].check}: "
            f"{failed[0].found}",
            "a release folder that passes every check",
            f"see: flashmap release check {folder}",
        )
    return {path: local_file(source) for path, source in publishable(folder).items()}


def release_mark(folder: Path, repo_id: str, tag: str | None) -> Mark:
    """The tag of a release: the one it was built for. Raises ReleaseError if it was built for
    another repository or tag than is asked for, or if none is known."""
    record = read_json(folder / RECORD)
    for name, built, asked in (
        ("repo-id", record.get("repo_id"), repo_id),
        ("tag", record.get("tag"), tag),
    ):
        if built and asked and built != asked:
            raise ReleaseError(
                name,
                f"a folder built with --{name} {built}",
                f"one built with --{name} {asked}",
                "build it again: its files name where it is published",
            )
    found = tag or record.get("tag")
    if not found:
        raise ReleaseError(
            "tag",
            f"neither --tag nor a tag in {folder / RECORD}",
            "a name for the release",
            "give --tag, as in --tag v1.0, to build and push",
        )
    return Mark(found)
