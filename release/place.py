"""Puts a finished folder in its place: whole or not at all, and never at the cost of somebody's
files.

A build, or a conversion, is written in a work folder `.NAME.build` beside its place NAME and moved
there when it is whole, one at a time. What a killed one left, the next one takes up.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from flashmap.files import only_writer

from .contents import RECORD, folder_files, read_record
from .errors import ReleaseError

# Inside the work folder: the new release, the one it replaces, and what is being moved into a
# folder that has to stay.
NEW, OLD, FILLING = "new", "old", "filling.json"


@contextmanager
def workplace(out: Path) -> Iterator[Path]:
    """An empty folder to build in, for `publish`; gone afterwards, whatever happens.

    Raises ReleaseError if ``out`` holds what no build wrote or the disk does not let us, ValueError
    if another build is writing it or nothing can be written beside it.
    """
    if not out.name:
        raise ReleaseError("out", f"--out {out}", "a folder below it", "name another --out")
    work = _work_folder(out)
    try:
        with only_writer(out):
            _take_up(work, out)
            try:
                _require_earlier_build(out)
                (work / NEW).mkdir(parents=True)
                yield work / NEW
            finally:
                if out.exists() or not (work / OLD).exists():
                    shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise ReleaseError(
            "out",
            f"{out} cannot be written ({error.strerror or error}); it is as it was before",
            "a place with room that you may write to",
            "free some room, or name another --out",
        ) from error


def publish(scratch: Path, out: Path) -> bool:
    """Move the finished ``scratch`` to ``out``, if that differs; returns whether it did."""
    for path in (scratch, *scratch.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)  # whatever umask and writers say
    if out.is_dir() and folder_files(out, record=True) == folder_files(scratch, record=True):
        return False
    if not out.exists():
        scratch.rename(out)
    elif _has_to_stay(out):
        _fill(out, scratch)
    else:
        old = scratch.with_name(OLD)
        out.rename(old)
        try:
            scratch.rename(out)
        except OSError:
            old.rename(out)
            raise
    return True


def _work_folder(out: Path) -> Path:
    return out.with_name(f".{out.name}.build")


def _take_up(work: Path, out: Path) -> None:
    """Bring ``out`` back to what it was before a build that was killed, and clear its leftovers."""
    if (work / OLD).is_dir() and not out.exists():
        (work / OLD).rename(out)
    if (work / FILLING).is_file():
        with suppress(ValueError):  # killed while the list was written: nothing had moved
            for name in json.loads((work / FILLING).read_text(encoding="utf-8")):
                _remove(out / name)
    for name in (NEW, OLD, FILLING):
        _remove(work / name)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _require_earlier_build(out: Path) -> None:
    """Refuse to replace anything but an earlier build: what was written by hand is never lost."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    own: dict[str, Any] = {}
    found: dict[str, Any] = {}
    if out.is_dir():
        found = folder_files(out)
        with suppress(ReleaseError):
            own = read_record(out)["files"]
    changed = sorted(name for name in found.keys() & own.keys() if own[name] != found[name])
    foreign = sorted(found.keys() - own.keys())
    if own and not changed and not foreign:
        return
    what = []
    if changed:
        what.append(f"{len(changed)} files changed since the build ({', '.join(changed[:3])})")
    if foreign:
        what.append(f"{len(foreign)} files that no build wrote ({', '.join(foreign[:3])})")
    raise ReleaseError(
        "out",
        f"{out} with {' and '.join(what) or 'something that no build wrote'}",
        "an empty or absent folder, or an earlier build",
        "name another --out, or move it away",
    )


def _has_to_stay(out: Path) -> bool:
    """Whether the folder itself is in use: a mount point, or somebody's working folder."""
    return not any(out.iterdir()) and (os.path.ismount(out) or Path.cwd() == out)


def _fill(out: Path, scratch: Path) -> None:
    """Move the files of ``scratch`` into the empty folder ``out``, the record last; a failure
    leaves ``out`` empty again."""
    names = sorted((path.name for path in scratch.iterdir()), key=lambda n: (n == RECORD, n))
    listed = scratch.with_name(FILLING)
    listed.write_text(json.dumps(names), encoding="utf-8")
    whole = False
    try:
        for name in names:
            shutil.move(scratch / name, out / name)
        whole = True
    finally:
        for name in names if not whole else ():
            _remove(out / name)
        listed.unlink(missing_ok=True)
