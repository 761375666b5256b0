"""Checks a release folder: a table of small functions, each looking at one thing that has gone
wrong in public releases.

A check yields findings, or raises ReleaseError for its one finding. All run, so that one call shows
everything there is to mend; one that cannot run because the configuration or the weights are
unreadable says so.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashmap.checkpoint import CONFIG, INDEX

from .contents import (
    CARD,
    GENERATE,
    LICENCE,
    RECORD,
    REQUIREMENTS,
    folder_files,
    read_config,
    read_record,
    read_tensors,
    require_finite,
    require_tensors,
    weight_paths,
)
from .errors import ReleaseError
from .fresh import run_fresh
from .remote_code import AUTO_MAP, CONFIGURATION, MODELING, code_digest, read_closure, read_stamp

if TYPE_CHECKING:
    from flashmap.modeling.configuration_flashmap import FlashMapConfig

OK, FAILED, SKIPPED = "ok", "failed", "skipped"
# The Hub puts these into every repository.
HUB_FILES = {".gitattributes"}
# Where one of these fails, the folder's code may be anybody's, and is not run.
TRUSTED = ("remote-code", "code-digest", "record")


@dataclass(frozen=True)
class Finding:
    """Result of one check; ``status`` is "ok", "failed" or "skipped", ``expected`` and ``fix`` are
    empty when all is well."""

    check: str
    status: str
    found: str
    expected: str = ""
    fix: str = ""


class ReleaseFolder:
    """A release folder under check; what several checks read is read once."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def config(self) -> "tuple[dict[str, Any], FlashMapConfig]":
        """config.json as written and validated. Raises ReleaseError."""
        return read_config(self.path)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every stored tensor, from the headers alone. Raises ReleaseError."""
        from safetensors import SafetensorError, safe_open

        shapes: dict[str, tuple[int, ...]] = {}
        for path in weight_paths(self.path):
            try:
                with safe_open(path, framework="pt") as file:
                    names = list(file.keys())
                    shapes.update({name: tuple(file.get_slice(name).get_shape()) for name in names})
            except (SafetensorError, OSError) as error:
                raise ReleaseError(
                    "weights", f"{path} damaged ({error})", "whole files", "build again"
                ) from error
        return shapes


Check = Callable[[ReleaseFolder], Iterator[Finding]]


def check_release(folder: Path) -> list[Finding]:
    """Run every check on ``folder``, in the table's order; what is wrong inside never raises.

    Raises ReleaseError if there is no such folder.
    """
    if not folder.is_dir():
        raise ReleaseError(
            "folder",
            f"no folder {folder}",
            "a release folder",
            "build one with: flashmap release build SOURCE --out DIR",
        )
    release = ReleaseFolder(folder)
    findings: list[Finding] = []
    for name, check in CHECKS.items():
        failed = {finding.check for finding in findings if finding.status == FAILED}
        untrusted = [other for other in TRUSTED if other in failed]
        if name == "fresh-load" and untrusted:
            findings.append(
                Finding(
                    name,
                    SKIPPED,
                    f"not run, for {' and '.join(untrusted)} failed: the code may be tampered with",
                    "code and files as they were built",
                    "mend those findings first",
                )
            )
        else:
            findings += _run(name, check, release)
    return findings


def _run(name: str, check: Check, release: ReleaseFolder) -> list[Finding]:
    try:
        return list(check(release))
    except ReleaseError as error:
        return [Finding(name, FAILED, error.found, error.expected, error.fix)]
    except Exception as error:  # noqa: BLE001 - whatever lies in the folder is a finding
        text = f"{type(error).__name__}: {' '.join(str(error).split())} in {release.path}"
        return [Finding(name, FAILED, text, "a folder that can be checked", "build again")]


def _files(release: ReleaseFolder) -> Iterator[Finding]:
    required = (CONFIG, MODELING, CONFIGURATION, GENERATE, CARD, LICENCE, RECORD)
    missing = [name for name in required if not (release.path / name).is_file()]
    weight_paths(release.path)
    if missing:
        yield Finding(
            "files", FAILED, f"{', '.join(missing)} missing", "every required file", "build again"
        )
    else:
        yield Finding("files", OK, f"{len(required)} required files and the weights")


def _config(release: ReleaseFolder) -> Iterator[Finding]:
    raw, config = release.config
    yield Finding(
        "config",
        OK,
        f"valid, target_layer_ids {config.target_layer_ids}, block_size {config.block_size}",
    )
    wanted = {
        "architectures": ["FlashMapDraftModel"],
        "auto_map": AUTO_MAP,
        "speculators_model_type": "flashmap",
    }
    for key, value in wanted.items():
        if raw.get(key) != value:
            yield Finding(
                "config", FAILED, f"{key} is {raw.get(key)!r}", repr(value), "build again"
            )
    if raw.get("flow_map", True) is not True:
        yield Finding(
            "config",
            FAILED,
            "flow_map is false",
            "a flow map",
            "release the second training stage's weights",
        )


def _remote_code(release: ReleaseFolder) -> Iterator[Finding]:
    files = read_closure(release.path)
    yield Finding("remote-code", OK, f"{len(files)} files, each named by {MODELING}")
    digest, stamp = code_digest(files), read_stamp(files[CONFIGURATION])
    stated = {
        f"the stamp in {CONFIGURATION}": stamp,
        f"code_digest in {CONFIG}": release.config[0].get("code_digest"),
    }
    wrong = {where: value for where, value in stated.items() if value != digest}
    for where, value in wrong.items():
        fix = "a shipped file was edited after the build: edit the source and build again"
        yield Finding("code-digest", FAILED, f"{where} is {value!r}", digest, fix)
    if not wrong:
        yield Finding("code-digest", OK, digest[:16])


def _weights(release: ReleaseFolder) -> Iterator[Finding]:
    require_tensors(release.config[1], release.shapes)
    yield Finding("weights", OK, f"{len(release.shapes)} tensors, names and shapes complete")


def _finite(release: ReleaseFolder) -> Iterator[Finding]:
    names = list(release.shapes)
    for path in weight_paths(release.path):
        require_finite(read_tensors(path).items())
    yield Finding("finite", OK, f"{len(names)} tensors")


def _stray(release: ReleaseFolder) -> Iterator[Finding]:
    # Engines read every *.safetensors file of a folder, and the Hub shows the rest to everybody.
    code = {path.name for path in release.path.glob("*.py")} & read_closure(release.path).keys()
    known = {CONFIG, CARD, LICENCE, RECORD, INDEX, GENERATE, REQUIREMENTS} | HUB_FILES | code
    known |= {path.name for path in weight_paths(release.path)}
    stray = [
        f"{name} ({row['kind']})" if "kind" in row else name
        for name, row in folder_files(release.path, record=True).items()
        if "kind" in row or name not in known
    ]
    if stray:
        yield Finding(
            "stray", FAILED, ", ".join(stray[:5]), "no other files", "remove them, or build again"
        )
    else:
        yield Finding("stray", OK, "none")


def _record(release: ReleaseFolder) -> Iterator[Finding]:
    recorded, found = read_record(release.path), folder_files(release.path)
    for name in HUB_FILES - recorded.keys():
        found.pop(name, None)
    problems = {
        "changed since the build": [
            name for name in recorded.keys() & found.keys() if recorded[name] != found[name]
        ],
        "missing": list(recorded.keys() - found.keys()),
        "not recorded": list(found.keys() - recorded.keys()),
    }
    texts = [f"{', '.join(sorted(names)[:5])} {what}" for what, names in problems.items() if names]
    if texts:
        text = "; ".join(texts)
        yield Finding("record", FAILED, text, f"the files that {RECORD} lists", "build again")
    else:
        yield Finding("record", OK, f"{len(recorded)} files as they were built")


def _fresh_load(release: ReleaseFolder) -> Iterator[Finding]:
    script = Path(__file__).resolve().with_name("fresh_load.py")
    (report,) = list(run_fresh(script, [str(release.path.resolve())]))[-1:] or [{}]
    kinds = ("missing", "unexpected", "mismatched", "on_meta", "not_finite")
    problems = [f"{kind}: {', '.join(report[kind][:3])}" for kind in kinds if report.get(kind)]
    version = report.get("transformers")
    if problems or not report:
        text = "; ".join(problems) or "no report"
        yield Finding(
            "fresh-load",
            FAILED,
            text,
            "every tensor loaded, none left over",
            "build from a whole checkpoint",
        )
    else:
        text = (
            f"{report['class']} with {report['parameters']:,} parameters, transformers "
            f"{version}, no flashmap"
        )
        yield Finding("fresh-load", OK, text)


# Cheap ones first; a later check may assume nothing about the ones before it.
CHECKS: dict[str, Check] = {
    "files": _files,
    "config": _config,
    "remote-code": _remote_code,
    "weights": _weights,
    "finite": _finite,
    "stray": _stray,
    "record": _record,
    "fresh-load": _fresh_load,
}
