"""A fraction that is no number, has no end or is negative is told of by the name of its option, in
every command that takes one; and so is a number of runs that would never end."""

import typing
from pathlib import Path
from typing import Any

import pytest
from support.commands import Run, assert_one_message, refs

from flashmap.cli.main import app

# What each command needs beside the number; PAIR stands for the options that name a pair.
NEEDED: dict[str, list[str]] = {
    "generate": ["hi", "PAIR"],
    "bench": ["PAIR", "--prompts", "prompts.txt"],
    "release vocab": ["--target", "toy", "--corpus", "prompts.txt", "--out", "v.safetensors"],
    "train run": ["recipe.toml"],
}


def fractions() -> list[tuple[str, str]]:
    """Every command and option whose value is a fraction."""
    groups = {
        "": app,
        **{f"{group.name} ": group.typer_instance for group in app.registered_groups},
    }
    found = []
    for above, group in groups.items():
        for command in group.registered_commands:
            callback: Any = command.callback
            for name, hint in typing.get_type_hints(callback).items():
                if float in (hint, *typing.get_args(hint)):
                    found.append((f"{above}{command.name or callback.__name__}", f"--{name}"))
    return [(command, option.replace("_", "-")) for command, option in found]


def test_options_are_found() -> None:
    assert ("train run", "--seconds") in fractions()


@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
@pytest.mark.parametrize(("command", "option"), fractions())
def test_a_number_that_is_none(
    command: str, option: str, value: str, pair: Path, tmp_path: Path, run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("prompts.txt").write_text("hi\n")
    given = [
        part for word in NEEDED[command] for part in (refs(pair) if word == "PAIR" else [word])
    ]
    ended = run(*command.split(), *given, option, value)
    assert_one_message(ended)
    told = ended.err.replace("_", "-")
    assert f"{option.lstrip('-')}={value}" in told or f"{option} {value}" in told, ended.err


@pytest.mark.parametrize("value", ["-1", "0", "1001", "9" * 30])
def test_a_number_of_repeats_that_is_none(value: str, pair: Path, run: Run) -> None:
    ended = run("bench", *refs(pair), "--prompts", "prompts.txt", "--repeats", value)
    assert_one_message(ended, f"--repeats {value}", "1 to 1000")
