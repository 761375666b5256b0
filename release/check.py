"""Checks a release folder with the table of small checks in checks/, each looking at one thing that
has gone wrong in public releases.

All run, so that one call shows everything there is to mend.
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from .checking import (
    CHECKS,
    FAILED,
    OK,
    SKIPPED,
    Check,
    Finding,
    ReleaseFolder,
    Wanted,
    run_check,
)
from .errors import ReleaseError

__all__ = ["CHECKS", "FAILED", "OK", "SKIPPED", "Finding", "Wanted", "check_release"]

# The files of checks/ in the order in which they run; importing one enters its functions. What is
# left over and what has changed is told after everything that may say more about a file, and the
# folder's own code runs after that.
THEMES = (
    "files",
    "code",
    "configuration",
    "weights",
    "card",
    "leftovers",
    "loading",
    "against_target",
)
for _theme in THEMES:
    import_module(f"{__package__}.checks.{_theme}")


def check_release(
    folder: Path,
    wanted: Wanted | None = None,
    *,
    say: Callable[[str], None] = lambda name: None,
) -> list[Finding]:
    """Run every check on ``folder``, in the table's order; what is wrong inside never raises.

    ``say`` is told the name of each check before it runs. Raises ReleaseError if there is no such
    folder.
    """
    if not folder.is_dir():
        raise ReleaseError(
            "folder",
            f"no folder {folder}",
            "a release folder",
            "build one with: flashmap release build SOURCE --out DIR",
        )
    release = ReleaseFolder(folder, wanted or Wanted())
    return run_checks([e for e in CHECKS.values() if e.asked(release.wanted)], release, say)


def run_checks(
    entries: list[Check], release: ReleaseFolder, say: Callable[[str], None] = lambda name: None
) -> list[Finding]:
    """The findings of these checks on ``release``, in their order."""
    found: dict[str, Finding] = {}
    for entry in entries:
        say(entry.name)
        found[entry.name] = run_check(entry, release, found)
    return list(found.values())
