"""One sound release for every test here, to be copied and broken."""

import shutil
from pathlib import Path

import pytest
from support.releases import write_source

from flashmap.release.build import build_release
from flashmap.release.card import write_card


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A release that passes every check."""
    folder = tmp_path_factory.mktemp("release")
    source = write_source(folder / "source")
    write_card(source)  # draws the picture too
    return build_release(source, folder / "out", tag="v1", repo_id="me/it").folder


@pytest.fixture
def copy(sound: Path, tmp_path: Path) -> Path:
    """A copy of it, to be broken."""
    return Path(shutil.copytree(sound, tmp_path / "copy"))
