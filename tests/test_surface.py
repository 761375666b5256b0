"""Freezes what others script against: a change here needs a CHANGELOG entry."""

import importlib.metadata
import tomllib
from pathlib import Path

import flashmap

ROOT = Path(__file__).resolve().parents[1]


def test_public_names() -> None:
    assert sorted(flashmap.__all__) == [
        "FlashMapCache",
        "FlashMapConfig",
        "FlashMapDraftModel",
        "FlashMapGenerateOutput",
        "__version__",
        "load_pair",
    ]


def test_every_public_name_resolves_and_is_listed() -> None:
    for name in flashmap.__all__:
        assert getattr(flashmap, name) is not None
        assert name in dir(flashmap)


def test_distribution_name_and_command() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == "flashmap-hub"
    assert project["scripts"] == {"flashmap": "flashmap.cli.main:main"}
    try:
        installed = importlib.metadata.version("flashmap-hub")
    except importlib.metadata.PackageNotFoundError:
        return  # run from the tree, without an installation
    assert installed == flashmap.__version__
