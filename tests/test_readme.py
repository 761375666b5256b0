"""README tells the truth: its commands exist, its tree is the tree, its examples run."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from flashmap.cli.main import app

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """Contents of the fenced blocks of one language ('' for none)."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [content for found, content in fenced if found == language]


def commands() -> list[str]:
    """Every flashmap command line that README shows; several may share a line."""
    shown = [part for block in blocks("") for part in re.split(r"\n| {3,}", block)]
    pattern = r"(?:\.venv/bin/)?(flashmap (?:demo|generate|bench|doctor|release|train) ?.*)"
    return [match[1] for match in (re.fullmatch(pattern, part) for part in shown) if match]


@pytest.mark.parametrize("command", commands())
def test_commands_and_their_options_exist(command: str) -> None:
    current: Any = typer.main.get_command(app)
    words = shlex.split(command)[1:]
    while words and hasattr(current, "commands"):
        current = current.commands[words.pop(0)]
    known = {name for parameter in current.params for name in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known | {"--help"}


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"\bmake ([a-z-]+)", README))
    assert {"demo", "test"} <= targets
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


def test_the_tree_is_the_tree() -> None:
    (tree,) = (block for block in blocks("") if block.startswith("src/flashmap/"))
    named = set(re.findall(r"^(\S+)/", tree, re.MULTILINE))
    hidden = {"release-out", "build", "dist", "out"}
    folders = [path.name for path in ROOT.iterdir() if path.is_dir()]
    found = {name for name in folders if name[0] != "." and not name.endswith(".egg-info")}
    assert {name.split("/")[0] for name in named} == found - hidden - {"src"} | {"src"}
    for name in re.findall(r"^ {18}(.*)$", tree, re.MULTILINE):
        for module in re.split(r" {2,}", name)[0].split()[:1]:
            assert (ROOT / "modeling" / f"{module}_flashmap.py").exists()


@pytest.mark.slow
def test_the_examples_run(tmp_path: Path) -> None:
    (build,) = (line for line in "\n".join(blocks("")).splitlines() if "release build" in line and
                "release-out" in line)  # fmt: skip
    words = shlex.split(build.replace(".venv/bin/flashmap", ""))
    words[2] = str(ROOT / words[2])
    command = [sys.executable, "-c", "from flashmap.cli.main import main; main()", *words]
    subprocess.run(command, cwd=tmp_path, check=True)
    script = "\n".join(blocks("python"))
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert re.search(r"\d+ tokens, \d+\.\d\d a pass of the target", done.stdout)
    assert re.search(r"^[1-8] drafts kept: '", done.stdout, re.MULTILINE)
    *_, streamed = re.split(r"^\d drafts kept: .*\n", done.stdout, flags=re.MULTILINE)
    assert len(streamed.split()) > 20
