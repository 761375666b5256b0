"""What a push would change: the files that are here, the files that are there, and the difference.

A Hub names small files by git's sha1 of their content and large ones by sha256, so both are
computed here once and compared with whichever a listing shows.
"""

import hashlib
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# The Hub puts it into every repository and reads its own settings from it.
KEPT = ".gitattributes"
_CHUNK = 1 << 20


@dataclass(frozen=True)
class LocalFile:
    """A file to be pushed: where its bytes are, their number, and both names a Hub may give
    them."""

    source: Path | bytes
    size: int
    sha256: str
    blob_id: str


@dataclass(frozen=True)
class RemoteFile:
    """A file as a Hub lists it; ``sha256`` is known for large files only."""

    size: int
    blob_id: str
    sha256: str | None

    def holds(self, local: LocalFile) -> bool:
        """Whether its content is that of ``local``."""
        same = self.sha256 == local.sha256 if self.sha256 else self.blob_id == local.blob_id
        return same and self.size == local.size


def local_file(source: Path | bytes) -> LocalFile:
    """Read a file, or take its bytes, once."""
    stream = io.BytesIO(source) if isinstance(source, bytes) else source.open("rb")
    with stream as file:
        size = file.seek(0, io.SEEK_END)
        file.seek(0)
        sha256, blob = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
        while chunk := file.read(_CHUNK):
            sha256.update(chunk)
            blob.update(chunk)
    return LocalFile(source, size, sha256.hexdigest(), blob.hexdigest())


@dataclass(frozen=True)
class Plan:
    """What one commit has to do.

    Attributes:
        files: what the repository is to hold, by path.
        head: the commit of main that was looked at; None if there is no repository yet.
        remote: what that commit holds.
    """

    files: Mapping[str, LocalFile]
    head: str | None
    remote: Mapping[str, RemoteFile]

    @property
    def added(self) -> list[str]:
        """Paths that are new there."""
        return sorted(self.files.keys() - self.remote.keys())

    @property
    def changed(self) -> list[str]:
        """Paths whose content there is another."""
        both = self.files.keys() & self.remote.keys()
        return sorted(path for path in both if not self.remote[path].holds(self.files[path]))

    @property
    def deleted(self) -> list[str]:
        """Paths that are there and not here."""
        return sorted(self.remote.keys() - self.files.keys() - {KEPT})

    @property
    def empty(self) -> bool:
        """Whether the repository holds exactly the files already."""
        return self.head is not None and not (self.added or self.changed or self.deleted)

    def seen_in(self, remote: Mapping[str, RemoteFile]) -> str:
        """How another tree differs from the files, in a few words; empty if it does not."""
        there = Plan(self.files, "", remote)
        kinds = {"missing": there.added, "different": there.changed, "left over": there.deleted}
        return "; ".join(
            f"{kind}: {', '.join(paths[:3])}{' ...' if len(paths) > 3 else ''}"
            for kind, paths in kinds.items()
            if paths
        )
