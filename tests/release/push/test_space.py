"""`release space`: the application's folder, with the commits it shows written in."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.hub.client import history, push_files, remote_repo
from support.hub.server import LocalHub

from flashmap.release.errors import ReleaseError
from flashmap.release.hub import HubRepo
from flashmap.release.plan import local_file
from flashmap.release.push import make_plan, push
from flashmap.release.space_repo import Pin, pin, space_files, target_of

CARD = """---
title: FlashMap
emoji: ⚡
colorFrom: blue
colorTo: green
sdk: gradio
sdk_version: 6.0.0
app_file: app.py
models:
- somebody/placeholder
short_description: Lossless speculative decoding
---

# Text that is kept

models: of the text
"""
PINS = {"draft": Pin("ada/drafter", "a" * 40), "target": Pin("ada/target", "b" * 40)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "space"
    root.mkdir()
    (root / "README.md").write_text(CARD)
    (root / "app.py").write_text("import gradio\n")
    (root / "requirements.txt").write_text("gradio\n")
    return root


def content(files: dict[str, Any], path: str) -> bytes:
    source = files[path].source
    return source if isinstance(source, bytes) else source.read_bytes()


def test_both_commits_are_written_into_the_copy(folder: Path) -> None:
    files = space_files(folder, PINS)
    assert files.keys() == {"README.md", "app.py", "requirements.txt", "pins.json"}
    assert json.loads(content(files, "pins.json")) == {
        "draft": {"repo_id": "ada/drafter", "revision": "a" * 40},
        "target": {"repo_id": "ada/target", "revision": "b" * 40},
    }
    _, front, text = content(files, "README.md").decode().split("---\n", 2)
    expected = yaml.safe_load(CARD.split("---\n")[1]) | {"models": ["ada/drafter", "ada/target"]}
    assert yaml.safe_load(front) == expected
    assert text.strip() == CARD.split("---\n", 2)[2].strip()
    assert (folder / "README.md").read_text() == CARD  # the source is left alone
    assert space_files(folder, PINS) == files


def edit(old: str, new: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / "README.md").write_text(CARD.replace(old, new))


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no card": (lambda f: (f / "README.md").unlink(), "README.md"),
    "no front matter": (lambda f: (f / "README.md").write_text("# Hi\n"), "no title"),
    "no version": (edit("sdk_version: 6.0.0\n", ""), "sdk_version"),
    "another sdk": (edit("sdk: gradio", "sdk: docker"), "sdk docker"),
    "no application": (lambda f: (f / "app.py").unlink(), "app.py"),
    "broken application": (lambda f: (f / "app.py").write_text("def f(:\n"), "app.py:1"),
    "broken YAML": (edit("title: FlashMap", "title: [Flash"), "README.md"),
    "a list": (lambda f: (f / "README.md").write_text("---\n- a\n---\n"), "README.md"),
    "a secret": (lambda f: (f / "run.sh").write_text("hf_" + "a" * 34), "run.sh"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_what_would_not_build_is_refused(kind: str, folder: Path) -> None:
    break_it, word = BROKEN[kind]
    break_it(folder)
    with pytest.raises(ReleaseError) as caught:
        space_files(folder, PINS)
    assert word in caught.value.found and "\n" not in str(caught.value)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ReleaseError, match="gone"):
        space_files(tmp_path / "gone", PINS)


def test_pins_are_what_the_hub_has_now(hub: LocalHub) -> None:
    push_files({"config.json": b"{}"}, "v1", repo_id="ada/target")
    tagged = history(hub, "ada/target")[0].oid
    config = {"target_model": "ada/target", "target_revision": "v1"}
    push_files({"config.json": json.dumps(config).encode()}, "v1")
    push_files({"config.json": b'{"later": 1}'}, "v2", repo_id="ada/target")
    drafter = pin("ada/drafter@v1")
    assert drafter == ("ada/drafter", history(hub)[0].oid)
    assert target_of(drafter) == "ada/target@v1"
    assert pin(target_of(drafter)) == ("ada/target", tagged)
    assert pin("ada/target").revision == history(hub, "ada/target")[0].oid != tagged
    for gone in ("ada/drafter@v9", "ada/gone"):
        with pytest.raises(ReleaseError, match=gone):
            pin(gone)


@pytest.mark.parametrize("config", [b'{"model_type": "llama"}', b"[]", b"{", b"\xff"])
def test_a_repository_that_is_no_drafter(config: bytes, hub: LocalHub) -> None:
    push_files({"config.json": config}, "v1")
    with pytest.raises(ReleaseError, match=r"ada/drafter whose config\.json names no target_model"):
        target_of(pin("ada/drafter"))


def test_no_configuration_is_one_message(hub: LocalHub) -> None:
    push_files({"README.md": b"# None\n"}, "v1")
    with pytest.raises(ReleaseError, match=r"reading config\.json"):
        target_of(pin("ada/drafter"))


def test_it_becomes_a_gradio_space_in_one_commit(hub: LocalHub, folder: Path) -> None:
    files = space_files(folder, PINS)
    repo = HubRepo("ada/demo", "space")
    for changed in (True, False):
        done = push(repo, make_plan(repo, files, None), message="Show it")
        assert done.changed is changed
    remote = remote_repo(hub, "ada/demo", "space")
    assert remote.settings["sdk"] == "gradio" and set(remote.refs) == {"refs/heads/main"}
    found = hub.store.files(remote)
    assert {path: local_file(found[path]).sha256 for path in files} == {
        path: file.sha256 for path, file in files.items()
    }
