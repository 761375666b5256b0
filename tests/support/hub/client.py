"""Points the real huggingface_hub client of this process at a LocalHub, and makes its waits
short."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import constants, file_download

from flashmap.release.hub import HubRepo
from flashmap.release.plan import LocalFile, local_file
from flashmap.release.push import Mark, Pushed, Verify, make_plan, push

from .server import LocalHub
from .store import MAIN, Commit, Repo

if TYPE_CHECKING:  # a child process that pushes should start fast
    import pytest

REPO = "ada/drafter"
OLD = {
    "config.json": b'{"version": 1}',
    "README.md": b"---\nlicense: mit\n---\n# One\n",
    "model-00001-of-00002.safetensors": b"\1" * 900,
    "model-00002-of-00002.safetensors": b"\2" * 700,
}
NEW = {
    "config.json": b'{"version": 2}',
    "README.md": b"---\nlicense: mit\n---\n# Two\n",
    "model.safetensors": bytes(range(256)) * 40,
    "eval/golden.json": b"[0.25, 1.5]\n",
}


def point_client(
    monkeypatch: "pytest.MonkeyPatch", hub: LocalHub, cache: Path, name: str | None, role: str
) -> None:
    """Make this process, and those it starts, a client of `hub` with that user's token."""
    for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in hub.environment(name, role).items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("HF_HOME", str(cache))
    # The client reads these when it is imported.
    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
    template = f"{hub.endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(file_download, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "token"))


def record_waits(monkeypatch: "pytest.MonkeyPatch") -> list[float]:
    """Turn every sleep of this process into an entry of the list."""
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    return waits


def planned(contents: Mapping[str, bytes]) -> dict[str, LocalFile]:
    """Files to push, from their bytes."""
    return {path: local_file(content) for path, content in contents.items()}


def push_files(
    contents: Mapping[str, bytes],
    tag: str | None = "v2",
    *,
    verify: Verify = lambda sha: None,
    pull_request: bool = False,
    repo_id: str = REPO,
) -> Pushed:
    """Plan and push, as the command does."""
    repo, mark = HubRepo(repo_id), Mark(tag) if tag else None
    repo.require_writer()
    plan = make_plan(repo, planned(contents), mark)
    return push(
        repo, plan, message=f"Release {tag}", mark=mark, verify=verify, pull_request=pull_request
    )


def remote_repo(hub: LocalHub, repo_id: str = REPO, kind: str = "model") -> Repo:
    """The repository as its owner sees it."""
    return hub.store.repo(kind, repo_id, repo_id.partition("/")[0])


def remote_files(hub: LocalHub, revision: str = "main", repo_id: str = REPO) -> dict[str, bytes]:
    """What a revision holds, without the Hub's own file."""
    files = hub.store.files(remote_repo(hub, repo_id), revision)
    files.pop(".gitattributes")
    return files


def history(hub: LocalHub, repo_id: str = REPO) -> list[Commit]:
    """The commits of main, newest first."""
    repo = remote_repo(hub, repo_id)
    return [hub.store.commits[oid] for oid in hub.store.history(repo, repo.refs[MAIN])]


def somebody_commits(hub: LocalHub, path: str = "notes.txt", content: bytes = b"mine") -> str:
    """Another writer's commit to main; returns its sha."""
    with hub.store.lock:
        entry = hub.store.put(content)
        repo = remote_repo(hub)
        commit, _ = hub.store.commit(repo, "main", {path: entry}, author="bob", title="notes")
    return commit.oid
