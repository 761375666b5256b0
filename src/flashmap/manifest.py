"""A folder's manifest: what a finished folder holds, so that a later run can tell whole from
damaged.

Sizes are compared on every use. Contents are hashed only when something hints at a change (a file's
time differs from the recorded one: the folder was copied, restored or edited) or when the caller
asks, because hashing a model takes longer than most commands that need it.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

NAME = "flashmap-manifest.json"


def file_sha256(path: Path) -> str:
    """The file's sha256 as 64 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(folder: Path, recipe: dict[str, Any]) -> None:
    """Record every file of ``folder`` beside ``recipe``: what it was made from, compared again by
    find_damage."""
    files = {
        path.name: {
            "size": path.stat().st_size,
            "mtime_ns": path.stat().st_mtime_ns,
            "sha256": file_sha256(path),
        }
        for path in sorted(folder.iterdir())
        if path.name != NAME
    }
    text = json.dumps({"recipe": recipe, "files": files}, indent=2, sort_keys=True)
    (folder / NAME).write_text(text + "\n", encoding="utf-8")


def find_damage(folder: Path, recipe: dict[str, Any], *, hash_all: bool = False) -> str | None:
    """Why ``folder`` is not the finished result of ``recipe``, in a few words; None if it is."""
    if not folder.is_dir():
        return "there is no such folder"
    try:
        manifest = json.loads((folder / NAME).read_text(encoding="utf-8"))
        files, made_by = manifest["files"], manifest["recipe"]
        expected = {
            name: (row["size"], row["mtime_ns"], row["sha256"]) for name, row in files.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its {NAME} cannot be read ({type(error).__name__})"
    if made_by != recipe:
        return "it was made by another version"
    for name, (size, mtime_ns, sha256) in expected.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        found = path.stat()
        if found.st_size != size:
            return f"{name} has {found.st_size} bytes, {size} were written"
        if (hash_all or found.st_mtime_ns != mtime_ns) and file_sha256(path) != sha256:
            return f"{name} has changed since it was written"
    return None
