"""What a release folder and its source consist of, read the same way by the build, the card and the
check.

Everything that reads a folder raises ReleaseError with the file's name and the check that owns the
finding, and opens regular files only: a pipe would be waited for without end.
"""

import hashlib
import json
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashmap.checkpoint import CONFIG
from flashmap.files import write_whole

from .errors import ReleaseError

if TYPE_CHECKING:
    from flashmap.modeling.configuration_flashmap import FlashMapConfig

CARD, LICENCE, RECORD, RECIPE = "README.md", "LICENSE", "release.json", "recipe.toml"
EVAL = "eval"  # measurements, their prompts, and the golden outputs
GOLDEN = f"{EVAL}/golden.json"
PICTURE = "acceptance.png"
CUSTOM_GENERATE = "custom_generate"
GENERATE, REQUIREMENTS = (
    f"{CUSTOM_GENERATE}/{name}" for name in ("generate.py", "requirements.txt")
)


def folder_files(folder: Path, *, record: bool = False) -> dict[str, dict[str, Any]]:
    """Size and sha256 of every file below ``folder`` by path; with ``record`` release.json too.

    What is no regular file has a ``kind`` instead: empty folder, symlink, special file, unreadable.
    """
    rows = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if (name == RECORD and not record) or _is_filled(path):
            continue
        # Names may hold bytes that are no text, and have to be shown all the same.
        rows[name.encode("utf-8", "backslashreplace").decode()] = _row(path)
    return rows


def _is_filled(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and any(path.iterdir())


def _row(path: Path) -> dict[str, Any]:
    try:
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode):
            kinds = {stat.S_IFDIR: "empty folder", stat.S_IFLNK: "symlink"}
            return {"kind": kinds.get(stat.S_IFMT(found.st_mode), "special file")}
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return {"kind": "unreadable"}
    return {"sha256": digest, "size": found.st_size}


def read_file(folder: Path, name: str) -> bytes:
    """Content of a regular file. Raises ReleaseError of the check "files" if it is absent, of
    "links" if it is something else or cannot be read, of "sizes" if it is empty."""
    path = folder / name
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise ReleaseError(
            "files", f"no {path}", "every required file", "restore it, or build again", [name]
        ) from error
    check, reason = "links", "is no regular file"
    try:
        if stat.S_ISREG(mode):
            content = path.read_bytes()
            if content:
                return content
            check, reason = "sizes", "is empty"
    except OSError as error:
        reason = f"cannot be read ({error.strerror})"
    raise ReleaseError(
        check, f"{path} {reason}", "a plain file with content", "restore it, or build again", [name]
    )


def read_json(folder: Path, name: str, check: str) -> dict[str, Any]:
    """The JSON object in a file. Raises ReleaseError of ``check`` if it holds none, and as
    `read_file`."""
    content = read_file(folder, name)
    try:
        value = json.loads(content)
        if not isinstance(value, dict):
            raise ValueError(f"it holds a {type(value).__name__}")
    except (ValueError, RecursionError) as error:
        raise ReleaseError(
            check,
            f"{folder / name} unreadable ({error})",
            "a JSON object",
            "mend or restore the file, or build again",
            [name],
        ) from error
    return value


def write_json(value: Any) -> bytes:
    """The one way in which releases write JSON: sorted and indented UTF-8."""
    return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def read_record(folder: Path) -> dict[str, Any]:
    """release.json; its ``files`` are rows by path, its ``versions`` by package. Raises
    ReleaseError."""
    record = read_json(folder, RECORD, "record")
    missing = [name for name in ("files", "versions") if not isinstance(record.get(name), dict)]
    if missing:
        raise ReleaseError(
            "record",
            f"{folder / RECORD} without an object `{missing[0]}`",
            "the build's record",
            "build again",
            [RECORD],
        )
    return record


def refresh_record(folder: Path, names: Iterable[str]) -> None:
    """Write the present size and digest of these files into release.json. Raises ReleaseError, and
    ValueError if it cannot be written."""
    record, found = read_record(folder), folder_files(folder)
    record["files"].update({name: found[name] for name in names})
    write_whole(folder / RECORD, write_json(record))


def read_config(folder: Path) -> "FlashMapConfig":
    """The folder's config.json as a FlashMapConfig. Raises ReleaseError."""
    from flashmap.modeling.configuration_flashmap import FlashMapConfig

    raw = read_json(folder, CONFIG, "config")
    try:
        if raw.get("model_type") != "flashmap":
            raise ValueError(
                "it is not the configuration of a FlashMap drafter (model_type 'flashmap')"
            )
        config: FlashMapConfig = FlashMapConfig.from_dict(raw)
        return config
    except Exception as error:  # noqa: BLE001 - odd values make transformers raise anything
        caught = error
    raise ReleaseError(
        "config",
        f"{folder / CONFIG}: {' '.join(str(caught).split()) or type(caught).__name__}",
        "a readable, valid FlashMap configuration",
        "mend or restore the file",
        [CONFIG],
    ) from caught
