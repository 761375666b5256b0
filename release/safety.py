"""Which files of a folder may be published: no secrets, no pickles, nothing from outside of it.

What was once on a Hub has been copied, so this is looked at before anything is sent.
"""

import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

from .errors import ReleaseError

# Shapes of credentials that their issuers document; each would be valid for whoever finds it.
SECRETS = {
    "a Hugging Face token": rb"\bhf_[A-Za-z0-9]{30,}",
    "an AWS key": rb"\bAKIA[0-9A-Z]{16}\b",
    "a GitHub token": rb"\b(?:gh[pousr]_[A-Za-z0-9]{36}|github_pat_[A-Za-z0-9_]{60,})",
    "an API key": rb"\bsk-[A-Za-z0-9_-]{32,}",
    "a private key": rb"-----BEGIN [A-Z ]*PRIVATE KEY-----",
}
_SECRET = re.compile(b"|".join(b"(%b)" % pattern for pattern in SECRETS.values()))
PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib"}
# What tools leave behind; never meant to be published, and no reason to stop.
LITTER = {"__pycache__", ".DS_Store", ".gitattributes"}
_WINDOW, _OVERLAP = 1 << 22, 256


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
        if path.suffix in PICKLES or _is_pickle(path):
            raise _unsafe(
                "pickle", f"{path}, which may be a pickle", "no file that can run code when read"
            )
        files[name.as_posix()] = path
    if not files:
        raise _unsafe("folder", f"no files in {folder}", "a folder to publish")
    for path in files.values():
        _require_no_secret(path)
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


def _is_pickle(path: Path) -> bool:
    """Whether a file is one whatever its name: a stream of protocol 2 to 5, or torch's archive of
    one."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith(".pkl") for name in archive.namelist())
    with path.open("rb") as file:
        return file.read(2) in (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


def _require_no_secret(path: Path) -> None:
    for text in _texts(path):
        if found := _SECRET.search(text):
            kind = list(SECRETS)[(found.lastindex or 1) - 1]
            raise ReleaseError(
                "secret",
                f"what looks like {kind} in {path}",
                "no credentials in what is published",
                "remove it, and revoke it if it was real; nothing was sent",
            )


def _texts(path: Path) -> Iterator[bytes]:
    """The file in overlapping windows; of a weight file, the header alone, which is its only
    text."""
    with path.open("rb") as file:
        if path.suffix == ".safetensors":
            yield file.read(int.from_bytes(file.read(8), "little"))
            return
        tail = b""
        while chunk := file.read(_WINDOW):
            yield tail + chunk
            tail = chunk[-_OVERLAP:]
