"""Which files of a folder may be published: no secrets, no pickles, nothing from outside of it.

What was once on a Hub has been copied, so this is looked at before anything is sent.
"""

from pathlib import Path

from .errors import ReleaseError
from .hazards import find_secret, may_be_pickle

# What tools leave behind; never meant to be published, and no reason to stop.
LITTER = {"__pycache__", ".DS_Store", ".gitattributes"}


def publishable(folder: Path) -> dict[str, Path]:
    """Every file below ``folder`` that a push takes along, by path.

    A symlink stands for the file it points to, if that is inside. Raises ReleaseError, naming the
    file, for what must not be published.
    """
    root = folder.resolve()
    files: dict[str, Path] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if LITTER & set(name.parts) or (path.is_dir() and not path.is_symlink()):
            continue
        _require_inside(path, root)
        if any(part.startswith(".") for part in name.parts):
            raise _unsafe("stray", f"{path}, a hidden file", "files that are meant to be seen")
        if may_be_pickle(path):
            raise _unsafe(
                "pickle", f"{path}, which may be a pickle", "no file that can run code when read"
            )
        if secret := find_secret(path):
            raise ReleaseError(
                "secret",
                f"what looks like {secret} in {path}",
                "no credentials in what is published",
                "remove it, and revoke it if it was real; nothing was sent",
            )
        files[name.as_posix()] = path
    if not files:
        raise _unsafe("folder", f"no files in {folder}", "a folder to publish")
    return files


def _unsafe(check: str, found: str, expected: str) -> ReleaseError:
    return ReleaseError(check, found, expected, "remove it; nothing was sent")


def _require_inside(path: Path, root: Path) -> None:
    if path.is_symlink() and not path.resolve().is_relative_to(root):
        raise _unsafe(
            "symlink", f"{path} -> {path.readlink()}", "links that stay inside the folder"
        )
    if not path.is_file():
        raise _unsafe("stray", f"{path}, which is no regular file", "regular files only")
