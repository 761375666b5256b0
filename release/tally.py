"""What has been counted so far, kept in a file that is whole at every moment."""

import json
import time
from collections.abc import Mapping
from pathlib import Path

from flashmap.files import write_whole

SAVE_SECONDS = 2.0  # between two times that it is written down


class Tally:
    """Counts of the pieces done, continued from `path` if they are of the same work.

    Args:
        path: the file.
        fingerprint: of everything that the counts depend on.
    """

    def __init__(self, path: Path, fingerprint: str) -> None:
        self.path = path
        self.fingerprint = fingerprint
        self.done: set[int] = set()
        self.counts: dict[int, int] = {}
        self._saved = time.monotonic()
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
            if state["fingerprint"] == fingerprint:
                self.done = set(state["done"])
                self.counts = {int(token): count for token, count in state["counts"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return  # there is none

    def add(self, piece: int, counts: Mapping[int, int]) -> None:
        """Count a piece in; now and then write everything down."""
        self.done.add(piece)
        for token, count in counts.items():
            self.counts[token] = self.counts.get(token, 0) + count
        if time.monotonic() - self._saved >= SAVE_SECONDS:
            self.save()

    def save(self) -> None:
        """Write everything down. Raises ValueError if that fails."""
        state = {
            "fingerprint": self.fingerprint,
            "done": sorted(self.done),
            "counts": self.counts,
        }
        write_whole(self.path, json.dumps(state).encode())
        self._saved = time.monotonic()

    def remove(self) -> None:
        """Forget what was written down."""
        self.path.unlink(missing_ok=True)
