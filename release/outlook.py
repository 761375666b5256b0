"""What would still keep a drafter's folder from being released."""

from pathlib import Path

from .build import build_release
from .check import CHECKS, FAILED, Finding, Wanted, run_checks
from .checking import ReleaseFolder
from .errors import ReleaseError
from .place import workplace

LATER = "loading"  # the code is the build's own, and takes a fresh process to try


def remaining_findings(source: Path) -> list[Finding]:
    """What `release check` finds in a build of `source`, which is made for that beside it and
    removed; all checks but those that load it. Errors as `workplace`."""
    source = source.resolve()
    with workplace(source.with_name(f".{source.name}.check")) as scratch:
        try:
            built = build_release(source, scratch / "built").folder
        except ReleaseError as error:
            if error.check == "out":
                raise
            return [Finding(error.check, FAILED, error.found, error.expected, error.fix)]
        entries = [
            entry for entry in CHECKS.values() if entry.theme != LATER and entry.asked(Wanted())
        ]
        findings = run_checks(entries, ReleaseFolder(built))
    return [finding for finding in findings if finding.status == FAILED]
