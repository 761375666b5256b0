"""Checks of a release's files as files: are they there, plain, safe to publish, and storable
everywhere?"""

import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path

from flashmap.checkpoint import CONFIG

from ..checking import ReleaseFolder, check
from ..contents import CARD, GENERATE, GOLDEN, LICENCE, RECORD
from ..errors import ReleaseError
from ..hazards import find_secret, may_be_pickle
from ..remote_code import CONFIGURATION, MODELING

REQUIRED = (CONFIG, MODELING, CONFIGURATION, GENERATE, CARD, LICENCE, GOLDEN, RECORD)
# What Windows cannot store, and what a repository keeps for itself.
BAD_NAME = re.compile(
    r'[<>:"|?*\\\x00-\x1f]|^ |[ .]$|^(con|prn|aux|nul|com\d|lpt\d)(\.|$)|^\.git$', re.I
)
LONGEST_NAME = 255  # bytes
# Limits of a Hub: of any file, and of one that is kept as text.
LARGEST_FILE, LARGEST_TEXT = 50 * 10**9, 10 * 10**6
STORED_APART = (".safetensors", ".png")


def _regular(release: ReleaseFolder) -> Iterator[str]:
    """Paths of the regular files that no finding was told of."""
    return (
        name
        for name, row in release.files.items()
        if "kind" not in row and name not in release.blamed
    )


@check("files")
def required(release: ReleaseFolder) -> str:
    """Every file that a release has to have, the weights aside."""
    missing = [name for name in REQUIRED if name not in release.files]
    if missing:
        raise ReleaseError(
            "files",
            f"{', '.join(missing)} missing in {release.path}",
            "every required file",
            "restore it, or build again",
            missing,
        )
    return f"{len(REQUIRED)} required files among {len(release.files)}"


@check("links")
def links(release: ReleaseFolder) -> str:
    """Links and special files: a clone of the repository would not have what they stand for."""
    kinds = ("symlink", "special file", "unreadable")
    odd = {name: row["kind"] for name, row in release.files.items() if row.get("kind") in kinds}
    # A folder in the place of a file.
    odd |= {
        name: row["kind"]
        for name, row in release.files.items()
        if "kind" in row and (name in REQUIRED or Path(name).suffix)
    }
    if odd:
        raise ReleaseError(
            "links",
            ", ".join(f"{name} ({kind})" for name, kind in list(odd.items())[:5]),
            "plain files only",
            "replace it by its content, or remove it",
            odd,
        )
    return "none"


@check("names")
def names(release: ReleaseFolder) -> str:
    """Names that some system cannot hold, or holds as one."""
    folded: dict[str, list[str]] = {}
    for name in release.files:
        folded.setdefault(unicodedata.normalize("NFC", name).casefold(), []).append(name)
    clashing = [name for group in folded.values() if len(group) > 1 for name in group]
    bad = [
        name
        for name in release.files
        if any(BAD_NAME.search(p) or len(p.encode()) > LONGEST_NAME for p in name.split("/"))
    ]
    if clashing or bad:
        told = [f"{' and '.join(clashing)} differ in case only"] if clashing else []
        told += [f"{', '.join(map(repr, bad[:5]))} cannot be stored everywhere"] if bad else []
        raise ReleaseError(
            "names",
            "; ".join(told),
            "names that every system can hold",
            "rename or remove them",
            [*clashing, *bad],
        )
    return f"{len(release.files)} names"


@check("pickles")
def pickles(release: ReleaseFolder) -> str:
    """Files that can run code when they are read."""
    found = [name for name in _regular(release) if may_be_pickle(release.path / name)]
    if found:
        raise ReleaseError(
            "pickles",
            f"{', '.join(found[:5])}, which may run code when read",
            "safetensors and text only",
            "remove it; convert weights to safetensors",
            found,
        )
    return "none"


@check("secrets")
def secrets(release: ReleaseFolder) -> str:
    """Credentials in any file; what was once on a Hub has been copied."""
    found = {name: find_secret(release.path / name) for name in _regular(release)}
    told = {name: kind for name, kind in found.items() if kind}
    if told:
        raise ReleaseError(
            "secrets",
            ", ".join(f"what looks like {kind} in {name}" for name, kind in told.items()),
            "no credentials in what is published",
            "remove it, and revoke it if it was real",
            told,
        )
    return f"none in {len(found)} files"


@check("sizes")
def sizes(release: ReleaseFolder) -> str:
    """Files that are empty, or larger than a Hub takes."""
    wrong = {}
    for name in _regular(release):
        size = release.files[name]["size"]
        limit = LARGEST_FILE if name.endswith(STORED_APART) else LARGEST_TEXT
        if not 0 < size <= limit:
            wrong[name] = f"{name} has {size:,} bytes" + (f", over {limit:,}" if size else "")
    if wrong:
        raise ReleaseError(
            "sizes",
            ", ".join(wrong.values()),
            "files that hold something, within a Hub's limits",
            "restore it, or build with a smaller --max-shard-size",
            wrong,
        )
    total = sum(row.get("size", 0) for row in release.files.values())
    return f"{total:,} bytes in {len(release.files)} files"
