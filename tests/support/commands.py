"""How a command ended, and what the end of a failed one looks like."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from flashmap.cli.main import main


class Ended(NamedTuple):
    """Exit status and everything that was written."""

    status: int
    out: str
    err: str


Run = Callable[..., Ended]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs the command line in this process."""

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


def refs(pair: Path) -> list[object]:
    """The options that name the target and the drafter of a folder."""
    return ["--target", pair / "target", "--draft", pair / "draft"]


def assert_one_message(ended: Ended, *words: object) -> None:
    """Exit 1, nothing on stdout, and one line on stderr that says all of `words`."""
    assert ended.status == 1
    assert ended.out == ""
    assert "Traceback" not in ended.err
    messages = [line for line in ended.err.splitlines() if line.strip()]
    assert len(messages) == 1 and messages[0].startswith("flashmap: "), ended.err
    missing = [word for word in words if str(word) not in ended.err]
    assert not missing, f"{ended.err!r} lacks {missing}"
