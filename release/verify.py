"""How a staged commit is tried before it becomes main: it is downloaded by its sha into an empty
cache, compared byte by byte with what was sent, and used in a fresh process."""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from .errors import ReleaseError
from .fresh import run_fresh
from .hub import HubRepo
from .plan import LocalFile, local_file
from .push import Verify


def arrives(
    repo: HubRepo,
    files: Mapping[str, LocalFile],
    use: Callable[[Path, str, Path], object] = lambda folder, sha, cache: None,
) -> Verify:
    """A test that what is downloaded is what was sent; ``use`` then gets its folder, its sha and
    the cache around it."""

    def verify(sha: str) -> None:
        with tempfile.TemporaryDirectory(prefix="flashmap-push-") as cache:
            folder = repo.download(sha, Path(cache))
            for path, file in files.items():
                _require_same(path, local_file(folder / path), file)
            use(folder, sha, Path(cache))

    return verify


def loads(repo: HubRepo, files: Mapping[str, LocalFile]) -> Verify:
    """`arrives`, and AutoModel loads it by its id and sha with its own code."""
    script = Path(__file__).resolve().with_name("hub_load.py")
    return arrives(
        repo, files, lambda _, sha, cache: list(run_fresh(script, [repo.id, sha, str(cache)]))
    )


def imports(repo: HubRepo, files: Mapping[str, LocalFile], package: str) -> Verify:
    """`arrives`, and the Python package at the path ``package`` of it imports."""
    script = Path(__file__).resolve().with_name("kernel_load.py")
    return arrives(repo, files, lambda folder, *_: list(run_fresh(script, [str(folder / package)])))


def _require_same(path: str, found: LocalFile, sent: LocalFile) -> None:
    if found.sha256 != sent.sha256:
        raise ReleaseError(
            "download",
            f"{path} with sha256 {found.sha256}",
            f"the {sent.sha256} that was sent",
            "the Hub or the way to it changes files: do not release from this machine",
        )
