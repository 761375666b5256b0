"""What every check works with: the folder, read once, and the table that checks enter themselves
into.

A check is one function. It returns what it found in a few words, or raises ReleaseError of its own
name for its finding; what another check owns (an unreadable configuration, say) it lets through,
and is told as skipped. So one fault is told once, by the check that is meant for it:

    @check("licence")
    def licence(release: ReleaseFolder) -> str:
        ...
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashmap.checkpoint import CONFIG
from flashmap.vocabulary import FILE as DRAFT_VOCAB

from .card import read_card
from .contents import (
    CARD,
    CUSTOM_GENERATE,
    GENERATE,
    folder_files,
    read_config,
    read_file,
    read_json,
    read_record,
)
from .errors import ReleaseError
from .loads import load_reports
from .remote_code import read_closure
from .weights import read_headers, weight_paths

if TYPE_CHECKING:
    from flashmap.modeling.configuration_flashmap import FlashMapConfig

OK, FAILED, SKIPPED = "ok", "failed", "skipped"
Header = tuple[tuple[int, ...], str]


@dataclass(frozen=True)
class Finding:
    """Result of one check; ``status`` is "ok", "failed" or "skipped", ``expected`` and ``fix`` are
    empty when all is well."""

    check: str
    status: str
    found: str
    expected: str = ""
    fix: str = ""


@dataclass(frozen=True)
class Wanted:
    """What is asked beyond the folder itself.

    Attributes:
        target: REF of the target, to compare the folder with; None: it is not looked at.
        acceptance: measure the card's acceptance again, which takes minutes.
        prompts: how many prompts to measure on; None: all.
        transformers: versions to load the folder with, beside the installed one, each in an
            environment of its own that is made for it.
    """

    target: str | None = None
    acceptance: bool = False
    prompts: int | None = None
    transformers: tuple[str, ...] = ()


@dataclass
class ReleaseFolder:
    """A release folder under check; what several checks read is read once. Every property raises
    ReleaseError of the check that owns what is wrong with it.

    Attributes:
        path: the folder.
        wanted: what is asked beyond it.
        blamed: files that a finding was told of.
    """

    path: Path
    wanted: Wanted = field(default_factory=Wanted)
    blamed: set[str] = field(default_factory=set)

    @cached_property
    def files(self) -> dict[str, dict[str, Any]]:
        """Every file by path, see `folder_files`; release.json too."""
        return folder_files(self.path, record=True)

    @cached_property
    def raw_config(self) -> dict[str, Any]:
        """config.json as written."""
        return read_json(self.path, CONFIG, "config")

    @cached_property
    def config(self) -> "FlashMapConfig":
        """config.json, validated."""
        return read_config(self.path)

    @cached_property
    def code(self) -> dict[str, bytes]:
        """The remote code's files by name."""
        return read_closure(self.path)

    @cached_property
    def custom_generate(self) -> dict[str, bytes]:
        """What `generate(custom_generate=...)` takes, by path."""
        own = {name for name in self.files if name.startswith(f"{CUSTOM_GENERATE}/")}
        return {name: read_file(self.path, name) for name in sorted({GENERATE, *own})}

    @cached_property
    def headers(self) -> dict[str, Header]:
        """Shape and dtype of every stored tensor, from the headers alone."""
        paths = weight_paths(self.path)
        return {name: header for path in paths for name, header in read_headers(path)[0].items()}

    @cached_property
    def record(self) -> dict[str, Any]:
        """release.json."""
        return read_record(self.path)

    def require_as_built(self, names: Iterable[str]) -> None:
        """Leave it to the record, by a ReleaseError of its name, if one of these files is not as
        release.json lists it: what was made from them need not fit any more."""
        recorded = self.record["files"]
        changed = [name for name in names if recorded.get(name) != self.files.get(name)]
        if changed:
            raise ReleaseError(
                "record", f"{', '.join(changed)} not as built", "the build's files", "build again"
            )

    @cached_property
    def card(self) -> str:
        """The card's text."""
        return read_card(read_file(self.path, CARD))

    @cached_property
    def reports(self) -> list[dict[str, Any]]:
        """How it loads for strangers, see `load_reports`."""
        return list(load_reports(self.path, self.wanted.transformers))

    @property
    def has_draft_vocab(self) -> bool:
        """Whether a ranking of the target's tokens lies in the folder."""
        return (self.path / DRAFT_VOCAB).exists()


Run = Callable[[ReleaseFolder], str]


@dataclass(frozen=True)
class Check:
    """An entry of the table.

    Attributes:
        name: what users see.
        run: the function.
        needs: themes that have to be free of findings before it runs.
        asked: whether it runs, given what is wanted.
        theme: the last part of the function's module.
    """

    name: str
    run: Run
    needs: frozenset[str]
    asked: Callable[[Wanted], bool]

    @property
    def theme(self) -> str:
        """Which file of checks/ it is in."""
        return self.run.__module__.rpartition(".")[2]


CHECKS: dict[str, Check] = {}


def check(
    name: str, *, needs: Iterable[str] = (), asked: Callable[[Wanted], bool] = lambda wanted: True
) -> Callable[[Run], Run]:
    """Enter the function below into the table under ``name``, after what is there."""

    def enter(run: Run) -> Run:
        assert name not in CHECKS, name
        CHECKS[name] = Check(name, run, frozenset(needs), asked)
        return run

    return enter


def run_check(entry: Check, release: ReleaseFolder, before: Mapping[str, Finding]) -> Finding:
    """Run one check; whatever goes wrong in it is its finding. ``before`` holds those that ran."""
    failed = {name for name, finding in before.items() if finding.status == FAILED}
    broken = sorted(name for name in failed if CHECKS[name].theme in entry.needs)
    if broken:
        return _skipped(entry.name, " and ".join(broken))
    try:
        return Finding(entry.name, OK, entry.run(release))
    except ReleaseError as error:
        told = error.check in failed or error.check not in before
        if error.check != entry.name and error.check in CHECKS and told:
            return _skipped(entry.name, error.check)
        release.blamed |= error.files
        return Finding(entry.name, FAILED, error.found, error.expected, error.fix)
    except Exception as error:  # noqa: BLE001 - whatever lies in the folder is a finding
        text = f"{type(error).__name__}: {' '.join(str(error).split())} in {release.path}"
        return Finding(entry.name, FAILED, text, "a folder that can be checked", "build again")


def _skipped(name: str, because: str) -> Finding:
    fix = f"mend what {because} found first"
    return Finding(name, SKIPPED, f"not run, for {because} failed", "a folder to look at", fix)
