"""Runs the command line in this process, and keeps a tiny pair on disk for it."""

import sys
from pathlib import Path

import pytest
from support.commands import Ended, Run
from support.pair_folders import write_drafter, write_target

from flashmap.cli.main import main


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli-pair")
    write_target(folder / "target")
    write_drafter(folder / "draft")
    return folder


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: object) -> Ended:
        monkeypatch.setattr(sys, "argv", ["flashmap", *map(str, arguments)])
        capfd.readouterr()
        try:
            main()
            status = 0
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else int(error.code is not None)
        return Ended(status, *capfd.readouterr())

    return call
