"""A source of a release with everything that one can hold, made of the tiny pair; and what the
checks that run no code find in a release."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from flashmap.release.check import CHECKS, FAILED, Finding, run_checks
from flashmap.release.checking import ReleaseFolder
from flashmap.vocabulary import write_draft_vocab

from .pair_folders import ROWS, TOKENS, write_drafter

PROMPTS = ("good morning", "tell me a story", "what is a drafter?", "sing", "count to ten", "why")
MAX_NEW_TOKENS = 24
RUN_CODE = ("loading", "against_target")


def write_source(folder: Path, **changes: Any) -> Path:
    """A tiny drafter with a card, a recipe, a draft vocabulary, prompts and a measurement."""
    write_drafter(folder, **changes)
    counts = torch.arange(ROWS).flip(0) // 3 * (torch.arange(ROWS) < TOKENS)
    write_draft_vocab(folder / "draft_vocab.safetensors", counts, {})
    rows = [{"prompt": text, "domain": "ab"[index % 2]} for index, text in enumerate(PROMPTS)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recipe.toml").write_text("[run]\nsteps = 12\nmax_length = 64\n")
    write_measurement(folder, walk=[setting(0.0, 2.0), setting(1.0, 1.5)])
    return folder


def write_measurement(folder: Path, **document: Any) -> Path:
    """A document of acceptance in eval/, as `flashmap train eval --json` prints it."""
    path = folder / "eval" / "acceptance.json"
    path.parent.mkdir(exist_ok=True)
    whole = {
        "prompts": {"file": "somewhere/prompts.jsonl", "count": len(PROMPTS)},
        "settings": {"max_new_tokens": MAX_NEW_TOKENS},
        "dtype": "float32",
        "device": "cpu (an abacus)",
        "command": "flashmap train eval recipe.toml",
        "versions": {"torch": "2.13.0"},
        "commit": "1234567890abcdef",
        "date": "2026-01-02",
        "walk": [],
        "loop": [],
        **document,
    }
    path.write_text(json.dumps(whole))
    return path


def setting(temperature: float, length: float) -> dict[str, Any]:
    """One row of such a document: two domains, and all."""

    def row(domain: str, length: float, looped: int) -> dict[str, Any]:
        return {
            "domain": domain,
            "texts": 3,
            "looped": looped,
            "rounds": 30,
            "acceptance_length": length + 0.5,
            "acceptance_length_without_looped": length,
            "slots": [0.5, 0.25, None],
        }

    rows = [row("a", length - 0.25, 0), row("b", length + 0.25, 1)]
    overall = {**row("all", length, 1), "texts": 6}
    return {
        "temperature": temperature,
        "num_steps": 1,
        "num_draws": 1,
        "domains": rows,
        "overall": overall,
    }


def check_statically(folder: Path) -> list[Finding]:
    """The findings of every check that runs nothing of the folder."""
    entries = [entry for entry in CHECKS.values() if entry.theme not in RUN_CODE]
    return run_checks(entries, ReleaseFolder(folder))


def failures(findings: list[Finding]) -> dict[str, str]:
    """What failed, with what was found."""
    return {finding.check: finding.found for finding in findings if finding.status == FAILED}


def run_build(code: str, *arguments: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A build in a process of its own, after `code`."""
    script = (
        "import sys; from pathlib import Path; from flashmap.cli.main import main\n"
        f"{code}\nsys.argv = ['flashmap', 'release', 'build', sys.argv[1], '--out', sys.argv[2]]\n"
        "main()"
    )
    paths = os.pathsep.join(path for path in sys.path if path)
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": paths} | environment,
        capture_output=True,
        text=True,
    )
