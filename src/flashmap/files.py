"""Files that are there whole or not at all, whatever happens to the disk or the process."""

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def write_whole(path: Path, content: bytes) -> None:
    """Put `content` in the place of `path`, which stays as it was if that fails.

    Raises ValueError naming the path and the system's reason.
    """
    # One name, so that what a killed process leaves is overwritten by the next.
    scratch = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with scratch.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    except OSError as error:
        _remove(scratch)
        raise ValueError(
            f"{path} cannot be written: {error.strerror or error}; nothing was changed"
        ) from error


def write_figure(path: Path, figure: Any, **settings: Any) -> None:
    """`write_whole` of a matplotlib figure as PNG; `settings` are those of its `savefig`."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", **settings)
    write_whole(path, picture.getvalue())


@contextmanager
def only_writer(path: Path) -> Iterator[None]:
    """Keep other processes that ask here from writing `path` at the same time.

    Raises ValueError if one is at it, or the folder cannot be written to.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(path.with_name(f".{path.name}.lock"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout as error:
        raise ValueError(
            f"another process is making {path} right now: wait for it to end, or name another"
        ) from error
    except OSError as error:
        raise ValueError(
            f"{path} cannot be written: {error.strerror or error}; name a place that you may write"
            " to"
        ) from error
    try:
        yield
    finally:
        _remove(Path(lock.lock_file))  # while it is held: the next one makes its own
        lock.release()


def _remove(scratch: Path) -> None:
    try:
        scratch.unlink(missing_ok=True)
    except OSError:  # the folder that could not be written to cannot be cleaned either
        return
