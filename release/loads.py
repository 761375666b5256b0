"""How a folder loads for strangers: in fresh processes that have no flashmap, with the installed
transformers and with others."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .environments import environment_with
from .errors import ReleaseError
from .fresh import run_fresh

SCRIPT = Path(__file__).resolve().with_name("fresh_load.py")


def load_reports(folder: Path, versions: Iterable[str]) -> Iterator[dict[str, Any]]:
    """What `fresh_load` says of ``folder``: first with the installed transformers.

    Raises ReleaseError of the check "load" where it does not load, or a version cannot be had.
    """
    yield _load(folder, None)
    for version in versions:
        with environment_with(version) as python:
            yield _load(folder, python)


def _load(folder: Path, python: Path | None) -> dict[str, Any]:
    try:
        reports = list(run_fresh(SCRIPT, [str(folder.resolve())], python=python))
    except ReleaseError as error:
        raise ReleaseError("load", error.found, error.expected, error.fix) from error
    if not reports:
        raise ReleaseError(
            "load", f"no report from {SCRIPT.name}", "a folder that loads", "build again"
        )
    return reports[-1]
