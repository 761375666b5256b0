"""`release push`: one commit, looked at before it becomes main, and nothing done twice."""

import pytest
from support.hub.client import (
    NEW,
    OLD,
    history,
    planned,
    push_files,
    remote_files,
    remote_repo,
    somebody_commits,
)
from support.hub.server import LocalHub

from flashmap.release.errors import ReleaseError
from flashmap.release.hub import HubRepo
from flashmap.release.push import Mark, make_plan, push

WRITES = ("POST", "PUT", "DELETE")


def writes(hub: LocalHub) -> list[str]:
    return [line for line in hub.lines() if line.startswith(WRITES)]


def refs(hub: LocalHub) -> set[str]:
    return set(remote_repo(hub).refs)


def test_a_first_push_is_one_commit_and_a_tag(hub: LocalHub) -> None:
    done = push_files(OLD, "v1")
    first, initial = history(hub)
    assert remote_files(hub) == remote_files(hub, "v1") == OLD
    assert (first.parent, first.oid, done.changed) == (initial.oid, done.commit, True)
    assert refs(hub) == {"refs/heads/main", "refs/tags/v1"}


def test_a_release_replaces_the_one_before_in_one_commit(released: LocalHub) -> None:
    before = history(released)
    push_files(NEW)
    assert remote_files(released) == remote_files(released, "v2") == NEW  # the old shards are gone
    assert remote_files(released, "v1") == OLD
    assert history(released)[1:] == before
    assert ".gitattributes" in released.store.files(remote_repo(released))


def test_an_unchanged_plan_writes_nothing(released: LocalHub) -> None:
    before = history(released)
    done = push_files(OLD, "v1")
    assert (done.changed, done.commit) == (False, before[0].oid)
    assert history(released) == before
    assert writes(released) == []


def test_only_what_changed_is_sent(released: LocalHub) -> None:
    push_files({**OLD, "config.json": b"{}"})
    assert [line for line in released.lines() if line.startswith("PUT")] == []


def test_the_staged_commit_is_tried_while_main_is_the_old_release(released: LocalHub) -> None:
    seen: list[str] = []

    def verify(sha: str) -> None:
        seen.append(sha)
        assert remote_files(released, sha) == NEW
        assert remote_files(released) == OLD
        assert refs(released) == {"refs/heads/main", "refs/heads/release/v2", "refs/tags/v1"}

    push_files(NEW, verify=verify)
    assert len(seen) == 1


def test_what_does_not_load_never_becomes_main(released: LocalHub) -> None:
    def verify(sha: str) -> None:
        raise ReleaseError("fresh-process", "a crash", "a clean end", "mend it")

    with pytest.raises(ReleaseError, match="a crash"):
        push_files(NEW, verify=verify)
    assert remote_files(released) == OLD and "refs/tags/v2" not in refs(released)
    push_files(NEW)
    assert remote_files(released) == NEW and len(history(released)) == 3
    assert refs(released) == {"refs/heads/main", "refs/tags/v1", "refs/tags/v2"}


def test_a_staging_branch_of_another_push_is_not_trusted(released: LocalHub) -> None:
    repo, store = remote_repo(released), released.store
    store.set_ref(repo, "refs/heads/release/v2", "main")
    stray = {"virus.py": store.put(b"import os")}
    store.commit(repo, "release/v2", stray, author="bob", title="mine")
    push_files(NEW)
    assert remote_files(released) == NEW


# --- somebody else


@pytest.mark.parametrize("step", ["branch/release", "commit/release", "commit/main"])
def test_a_moved_head_is_refused_with_both_heads(step: str, released: LocalHub) -> None:
    seen = history(released)[0].oid
    came: list[str] = []
    released.order(f"POST .*/{step}", do=lambda: came.append(somebody_commits(released)))
    with pytest.raises(ReleaseError) as caught:
        push_files(NEW)
    assert caught.value.check == "head"
    assert seen in caught.value.found and came[0] in caught.value.found
    assert "notes.txt" in caught.value.found
    assert history(released)[0].oid == came[0]  # theirs is still there
    assert "refs/tags/v2" not in refs(released)


def test_a_head_that_moved_after_the_plan_is_refused(released: LocalHub) -> None:
    repo, mark = HubRepo("ada/drafter"), Mark("v2")
    plan = make_plan(repo, planned(NEW), mark)
    theirs = somebody_commits(released)
    with pytest.raises(ReleaseError, match=f"(?s){theirs}.*{plan.head}"):
        push(repo, plan, message="Release v2", mark=mark)
    assert history(released)[0].oid == theirs


def test_a_repository_that_somebody_filled_meanwhile(hub: LocalHub) -> None:
    hub.order("POST .*/repos/create", after=True, do=lambda: somebody_commits(hub))
    with pytest.raises(ReleaseError, match="somebody else created"):
        push_files(OLD, "v1")
    assert remote_files(hub) == {"notes.txt": b"mine"}


def test_a_tag_in_use_is_refused_before_anything_is_sent(released: LocalHub) -> None:
    with pytest.raises(ReleaseError) as caught:
        push_files(NEW, "v1")
    assert "v1" in caught.value.found and history(released)[0].oid in caught.value.found
    assert writes(released) == []


@pytest.mark.parametrize("tag", ["", "a b", "../x", "-x", "release/1", "v1^"])
def test_an_odd_tag(tag: str, hub: LocalHub) -> None:
    with pytest.raises(ReleaseError, match="tag"):
        make_plan(HubRepo("ada/drafter"), planned(OLD), Mark(tag))


def test_files_that_the_repository_ignores(released: LocalHub) -> None:
    somebody_commits(released, ".gitignore", b"eval/*\n")
    with pytest.raises(ReleaseError) as caught:
        push_files(NEW)
    assert "eval/golden.json" in caught.value.found and ".gitignore" in caught.value.fix
    assert "refs/tags/v2" not in refs(released)
    files = remote_files(released)
    files.pop(".gitignore")
    assert files == OLD


def test_metadata_that_the_hub_refuses(released: LocalHub) -> None:
    with pytest.raises(ReleaseError, match="metadata"):
        push_files({**NEW, "README.md": b"---\n{[\n---\n"})
    assert remote_files(released) == OLD


# --- pull requests


def test_a_pull_request_leaves_main_alone(released: LocalHub) -> None:
    done = push_files(NEW, pull_request=True)
    assert done.pull_request == f"{released.endpoint}/ada/drafter/discussions/1"
    assert remote_files(released) == OLD and remote_files(released, "refs/pr/1") == NEW
    assert refs(released) == {"refs/heads/main", "refs/tags/v1", "refs/pr/1"}


def test_a_pull_request_is_opened_once(released: LocalHub) -> None:
    released.order("POST .*/commit/main", after=True, status=502)
    first = push_files(NEW, pull_request=True)
    assert push_files(NEW, pull_request=True) == first
    assert "refs/pr/2" not in refs(released)


def test_a_merged_pull_request_is_tagged(released: LocalHub) -> None:
    push_files(NEW, pull_request=True)
    repo = remote_repo(released)
    repo.refs["refs/heads/main"] = repo.refs["refs/pr/1"]
    assert push_files(NEW, pull_request=True).pull_request is None
    tried: list[str] = []
    done = push_files(NEW, verify=tried.append)
    assert not done.changed and tried == [done.commit]
    assert remote_files(released, "v2") == NEW


def test_a_stranger_may_propose(released: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", released.user("bob").token)
    assert push_files(NEW, pull_request=True).pull_request
    assert remote_files(released) == OLD
