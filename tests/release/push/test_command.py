"""`flashmap release push | space | kernels`: what they print, ask and refuse."""

import io
import json
import sys
from pathlib import Path

import huggingface_hub
import pytest
from support.commands import Ended, Run, assert_one_message
from support.hub.client import history, push_files, remote_files, remote_repo
from support.hub.server import LocalHub

from flashmap.release import model_repo, verify
from flashmap.release.check import FAILED, Finding
from flashmap.release.plan import local_file

FILES = {"config.json": b"{}", "model.safetensors": b"\0" * 99, "eval/a.json": b"[]"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that counts as checked, and is compared but not loaded when it has arrived."""
    root = tmp_path / "out"
    record = {"files": {}, "tag": "v1", "repo_id": "ada/drafter"}
    for path, content in {**FILES, "release.json": json.dumps(record).encode()}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)
    monkeypatch.setattr(model_repo, "check_release", lambda folder: [])
    monkeypatch.setattr(verify, "loads", verify.arrives)
    return root


@pytest.fixture
def run(run: Run, hub: LocalHub) -> Run:
    """The command line, whose every output is searched for tokens."""

    def call(*arguments: object) -> Ended:
        ended = run(*arguments)
        assert [token for token in hub.users if token in ended.out + ended.err] == []
        return ended

    return call


def test_push_and_push_again(folder: Path, hub: LocalHub, run: Run) -> None:
    ended = run("release", "push", folder, "ada/drafter", "--yes")
    assert ended.status == 0, ended.err
    commit = history(hub)[0].oid
    assert ended.out.splitlines()[-1] == f"{hub.endpoint}/ada/drafter: pushed, commit {commit}, v1"
    assert remote_files(hub, "v1").keys() == {*FILES, "release.json"}
    again = run("release", "push", folder, "ada/drafter", "--yes")
    assert again.status == 0 and "unchanged" in again.out and commit in again.out
    document = json.loads(run("release", "push", folder, "ada/drafter", "--yes", "--json").out)
    assert (document["changed"], document["commit"]) == (False, commit)
    assert len(history(hub)) == 2


def test_a_dry_run_sends_nothing(
    folder: Path, hub: LocalHub, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    push_files({"config.json": b"{}", "eval/a.json": b"[1]", "old.bin": b"x"}, "v0")
    hub.log.clear()
    monkeypatch.delenv("HF_TOKEN")  # nothing is sent, so nobody has to sign in
    ended = run("release", "push", folder, "ada/drafter", "--dry-run", "--json")
    document = json.loads(ended.out)
    assert [line for line in hub.lines() if not line.startswith("GET")] == []
    rows = {row["path"]: row for row in document["files"]}
    assert {path: row["change"] for path, row in rows.items()} == {
        "config.json": "keep",
        "eval/a.json": "change",
        "model.safetensors": "add",
        "release.json": "add",
    }
    assert rows["model.safetensors"]["size"] == 99
    assert rows["model.safetensors"]["sha256"] == local_file(b"\0" * 99).sha256
    assert document["deleted"] == ["old.bin"] and document["head"] == history(hub)[0].oid
    text = run("release", "push", folder, "ada/drafter", "--dry-run").out
    for row in document["files"]:
        assert f"{row['sha256']}  {row['path']}" in text
    assert "delete" in text and "old.bin" in text


def test_nobody_can_be_asked(folder: Path, hub: LocalHub, run: Run) -> None:
    ended = run("release", "push", folder, "ada/drafter")
    assert ended.status == 2 and "--yes" in ended.err and hub.log == []


class Terminal(io.StringIO):
    """Somebody who types."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("answer", "status"), [("y\n", 0), ("n\n", 1), ("", 1)])
def test_somebody_is_asked(
    answer: str,
    status: int,
    folder: Path,
    hub: LocalHub,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    ended = run("release", "push", folder, "ada/drafter")
    assert ended.status == status and "Send this?" in ended.err
    assert (("model", "ada/drafter") in hub.store.repos) is (status == 0)


def test_private_and_pull_requests(folder: Path, hub: LocalHub, run: Run) -> None:
    run("release", "push", folder, "ada/drafter", "--yes", "--private")
    assert remote_repo(hub).private
    (folder / "config.json").write_text('{"more": 1}')
    ended = run("release", "push", folder, "ada/drafter", "--yes", "--pr")
    # The tag it was built with is in use.
    assert_one_message(ended, "v1", "choose another --tag")
    (folder / "release.json").write_text('{"files": {}}')
    ended = run("release", "push", folder, "ada/drafter", "--tag", "v2", "--yes", "--pr")
    assert ended.status == 0 and f"{hub.endpoint}/ada/drafter/discussions/1" in ended.out
    assert remote_files(hub)["config.json"] == b"{}"


def test_folders_that_are_not_ready(
    folder: Path, hub: LocalHub, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    push = ("release", "push", folder)
    assert_one_message(run(*push, "ada/other", "--yes"), "ada/drafter", "ada/other")
    assert_one_message(run(*push, "ada/drafter", "--tag", "v2", "--yes"), "v1", "v2")
    assert_one_message(run(*push, "drafter", "--yes"), "owner/name")
    (folder / "notes.md").write_text("hf_" + "a" * 34)
    assert_one_message(run(*push, "ada/drafter", "--yes"), "notes.md", "Hugging Face token")
    (folder / "notes.md").unlink()
    (folder / "release.json").write_text('{"files": {}}')
    assert_one_message(run(*push, "ada/drafter", "--yes"), "--tag")
    finding = Finding("record", FAILED, "README.md changed", "as built", "build again")
    monkeypatch.setattr(model_repo, "check_release", lambda folder: [finding])
    ended = run(*push, "ada/drafter", "--yes")
    assert_one_message(ended, "README.md changed", f"flashmap release check {folder}")
    monkeypatch.undo()
    assert hub.store.repos == {}


def test_space(hub: LocalHub, run: Run, tmp_path: Path) -> None:
    push_files({"config.json": b"{}"}, "v1", repo_id="ada/target")
    push_files({"config.json": b'{"target_model": "ada/target"}'}, "v1")
    card = "---\ntitle: A\nsdk: gradio\nsdk_version: 6.0.0\napp_file: app.py\n---\n"
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "README.md").write_text(card)
    (tmp_path / "app" / "app.py").write_text("import gradio\n")
    space = ("release", "space", "ada/demo", "--folder", tmp_path / "app", "--yes")
    ended = run(*space, "--draft", "ada/drafter@v1", "--json")
    assert ended.status == 0 and json.loads(ended.out)["changed"], ended.err
    pins = json.loads(hub.store.files(remote_repo(hub, "ada/demo", "space"))["pins.json"])
    assert pins["draft"]["revision"] == history(hub)[0].oid
    assert pins["target"]["revision"] == history(hub, "ada/target")[0].oid
    assert_one_message(run(*space, "--draft", "ada/gone"), "ada/gone")


def test_kernels(hub: LocalHub, run: Run) -> None:
    ended = run("release", "kernels", "ada/ops", "--dry-run", "--json")
    if not hasattr(huggingface_hub.constants, "REPO_TYPES_WITH_KERNEL"):
        assert_one_message(ended, huggingface_hub.__version__)
        return
    document = json.loads(ended.out)
    assert document["repo_type"] == "kernel" and document["mark"] == "v1"
    paths = {row["path"] for row in document["files"]}
    assert "build/torch-universal/metadata.json" in paths
