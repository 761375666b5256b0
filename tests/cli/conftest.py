"""Runs the command line in this process, and keeps a tiny pair on disk for it."""

from pathlib import Path

import pytest
from support.commands import run  # noqa: F401  # a fixture
from support.pair_folders import write_pair


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair(tmp_path_factory.mktemp("cli-pair"))
