"""The demo Space on its way to the Hub: an application folder that says which models it shows.

A Space that follows a model's main branch changes under its visitors, and one day breaks. So the
commits of drafter and target are written into the pushed copy: the card's front matter names the
repositories, and `pins.json` the commits, for the application to read.
"""

import ast
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import RepoCard

from flashmap.checkpoint import CONFIG

from .contents import CARD
from .errors import ReleaseError
from .hub import HubRepo
from .plan import LocalFile, local_file
from .safety import publishable

PINS = "pins.json"
# What the Hub needs to build a Gradio Space the same way every time.
REQUIRED = ("title", "sdk", "sdk_version", "app_file")


class Pin(NamedTuple):
    """A model repository at one commit."""

    repo_id: str
    revision: str


def pin(ref: str) -> Pin:
    """What ``owner/name[@revision]`` is now. Raises ReleaseError if the Hub has no such thing."""
    repo_id, _, revision = ref.partition("@")
    repo = HubRepo(repo_id)
    commit = repo.head(revision or "main")
    if commit is None:
        raise ReleaseError(
            "pin",
            f"no {ref} on {repo.api.endpoint}",
            "a model repository, with that branch, tag or commit",
            "push the drafter first, and check the name",
        )
    return Pin(repo_id, commit)


def target_of(drafter: Pin) -> str:
    """The target that a pushed drafter was trained for, as ``owner/name[@revision]``. Raises
    ReleaseError if it names none."""
    content = HubRepo(drafter.repo_id).read(CONFIG, drafter.revision)
    try:
        config: Any = json.loads(content)
    except ValueError:  # no JSON, or no text
        config = None
    if not isinstance(config, dict) or "target_model" not in config:
        raise ReleaseError(
            "pin",
            f"{drafter.repo_id} whose {CONFIG} names no target_model",
            "a FlashMap drafter",
            "check the name, or give --target",
        )
    revision = config.get("target_revision")
    return f"{config['target_model']}@{revision}" if revision else str(config["target_model"])


def space_files(folder: Path, pins: Mapping[str, Pin]) -> dict[str, LocalFile]:
    """The files of the Space, with ``pins`` (a repository at a commit by role) written into the
    copy.

    Raises ReleaseError for a card without the front matter that a Gradio Space needs, and for
    Python files that do not parse.
    """
    if not folder.is_dir():
        raise ReleaseError(
            "space", f"no folder {folder}", "the Gradio application", "name it with --folder"
        )
    files = {path: local_file(source) for path, source in publishable(folder).items()}
    card = _read_card(folder, files)
    for path in files:
        if path.endswith(".py"):
            _require_python(folder / path)
    card.data["models"] = sorted({pinned.repo_id for pinned in pins.values()})
    commits = {role: pinned._asdict() for role, pinned in pins.items()}
    return {
        **files,
        CARD: local_file(str(card).encode()),
        PINS: local_file((json.dumps(commits, indent=2) + "\n").encode()),
    }


def _read_card(folder: Path, files: Mapping[str, LocalFile]) -> RepoCard:
    try:
        card = RepoCard((folder / CARD).read_text(encoding="utf-8"))
        problems = [f"no {key}" for key in REQUIRED if not card.data.get(key)]
        if not problems and card.data["sdk"] != "gradio":
            problems.append(f"sdk {card.data['sdk']}")
        if not problems and card.data["app_file"] not in files:
            problems.append(f"no file {card.data['app_file']}")
    except Exception as error:  # noqa: BLE001 - whatever the YAML reader raises is about the card
        problems = [" ".join(str(error).split())]
    if not problems:
        return card
    raise ReleaseError(
        "space",
        f"{folder / CARD}: {', '.join(problems)}",
        f"front matter with {', '.join(REQUIRED)}, and sdk gradio",
        "write it at the top of the card, between two lines ---",
    )


def _require_python(path: Path) -> None:
    try:
        ast.parse(path.read_bytes(), filename=str(path))
    except SyntaxError as error:
        raise ReleaseError(
            "space", f"{path}:{error.lineno}: {error.msg}", "Python that parses", "mend the file"
        ) from error
