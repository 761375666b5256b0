"""Plans: what is here and there, named as git and sha256sum would."""

import hashlib
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from flashmap.release.plan import Plan, RemoteFile, local_file

CONTENTS = {"empty": b"", "text": b"hello\n", "binary": bytes(range(256)) * 9000}


@pytest.mark.parametrize("name", CONTENTS)
def test_names_of_a_file(name: str, tmp_path: Path) -> None:
    content, path = CONTENTS[name], tmp_path / name
    path.write_bytes(content)
    for file in (local_file(path), local_file(content)):
        assert file.size == len(content)
        assert file.sha256 == hashlib.sha256(content).hexdigest()
        if shutil.which("git"):
            done = subprocess.run(["git", "hash-object", path], capture_output=True, text=True)
            assert file.blob_id == done.stdout.strip()


def remote(content: bytes, *, large: bool = False) -> RemoteFile:
    file = local_file(content)
    blob = "of a pointer" if large else file.blob_id
    return RemoteFile(file.size, blob, file.sha256 if large else None)


def test_a_plan_sorts_paths() -> None:
    files = {name: local_file(name.encode()) for name in ("new", "same", "large", "changed")}
    there = {
        "same": remote(b"same"),
        "large": remote(b"large", large=True),
        "changed": remote(b"before"),
        "old": remote(b"old"),
        ".gitattributes": remote(b"* lfs"),
    }
    plan = Plan(files, "head", there)
    assert (plan.added, plan.changed, plan.deleted) == (["new"], ["changed"], ["old"])
    assert not plan.empty
    assert plan.seen_in(there) == "missing: new; different: changed; left over: old"


@pytest.mark.parametrize("large", [True, False])
def test_other_content_of_the_same_size_is_different(large: bool) -> None:
    assert not remote(b"abc", large=large).holds(local_file(b"abd"))
    assert remote(b"abc", large=large).holds(local_file(b"abc"))
    longer = replace(remote(b"abc", large=large), size=4)
    assert not longer.holds(local_file(b"abc"))


def test_a_plan_without_differences_is_empty_only_if_there_is_a_repository() -> None:
    files, there = {"a": local_file(b"a")}, {"a": remote(b"a")}
    assert Plan(files, "head", there).empty and not Plan(files, "head", there).seen_in(there)
    assert not Plan({}, None, {}).empty
