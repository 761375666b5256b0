"""What must never be published: credentials, and files that run code when they are read."""

import os
import pickletools
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

# Shapes of credentials that their issuers document; each would be valid for whoever finds it.
SECRETS = {
    "a Hugging Face token": rb"\bhf_[A-Za-z0-9]{30,}",
    "a Hugging Face organisation's token": rb"\bapi_org_[A-Za-z0-9]{30,}",
    "an AWS key": rb"\bA(?:KIA|SIA)[0-9A-Z]{16}\b",
    "a Google key": rb"\bAIza[A-Za-z0-9_-]{35}",
    "a Slack token": rb"\bxox[abprs]-[A-Za-z0-9-]{20,}",
    "a GitLab token": rb"\bglpat-[A-Za-z0-9_-]{20,}",
    "a GitHub token": rb"\b(?:gh[pousr]_[A-Za-z0-9]{36}|github_pat_[A-Za-z0-9_]{60,})",
    "an API key": rb"\bsk-[A-Za-z0-9_-]{32,}",
    "a private key": rb"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----",
}
PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib"}
_SECRET = re.compile(b"|".join(b"(%b)" % pattern for pattern in SECRETS.values()))
_STREAMS = tuple(bytes([0x80, protocol]) for protocol in (2, 3, 4, 5))
_WINDOW, _OVERLAP = 1 << 22, 256


def find_secret(path: Path) -> str | None:
    """What kind of credential stands in the text of a file; None if there is none."""
    for text in _texts(path):
        if found := _SECRET.search(text):
            return list(SECRETS)[(found.lastindex or 1) - 1]
    return None


def _texts(path: Path) -> Iterator[bytes]:
    """The file in overlapping windows; of a weight file the header alone, which is its text."""
    with path.open("rb") as file:
        if path.suffix == ".safetensors":
            yield file.read(min(int.from_bytes(file.read(8), "little"), path.stat().st_size))
            return
        tail = b""
        while chunk := file.read(_WINDOW):
            yield tail + chunk
            tail = chunk[-_OVERLAP:]


def may_be_pickle(path: Path) -> bool:
    """Whether a file is a pickle by its name, by how it begins, or as torch's archive of one."""
    if path.suffix.lower() in PICKLES:
        return True
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith(".pkl") for name in archive.namelist())
    with path.open("rb") as file:
        start = file.read(_WINDOW)
    return start[:2] in _STREAMS or _is_old_pickle(start)


def _is_old_pickle(content: bytes) -> bool:
    """Whether this begins with a whole pickle of protocol 0 or 1, which has no mark of its own: its
    instructions are read up to the last one, none is followed."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        try:
            pickletools.dis(content, out=nowhere)
        except (ValueError, IndexError):
            return False
    return True
