"""A Hub for a test, and this process as its client, signed in as ada; conftest files import
these."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from .client import OLD, point_client, push_files, record_waits
from .server import LocalHub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LocalHub]:
    with LocalHub() as local:
        point_client(monkeypatch, local, tmp_path / "home", "ada", "write")
        yield local


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The sleeps of this process, which take no time."""
    return record_waits(monkeypatch)


@pytest.fixture
def released(hub: LocalHub, waits: list[float]) -> LocalHub:
    """A Hub where v1 has been released."""
    push_files(OLD, "v1")
    hub.log.clear()
    return hub
