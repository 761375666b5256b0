"""What stops a push before or in the middle of it is one message, which never holds the token."""

import errno
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import HfApi, constants
from support.hub import push_child
from support.hub.client import NEW, OLD, planned, push_files, remote_files, remote_repo
from support.hub.server import LocalHub

from flashmap.release.errors import ReleaseError
from flashmap.release.hub import HubRepo
from flashmap.release.plan import local_file
from flashmap.release.push import make_plan, push
from flashmap.release.verify import arrives


@pytest.fixture(autouse=True)
def secret(hub: LocalHub, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Whatever is raised or logged by these tests is searched for tokens."""
    yield
    assert [user.token for user in hub.users.values() if user.token in caplog.text] == []


def refused(hub: LocalHub, repo_id: str = "ada/drafter") -> ReleaseError:
    """The error that a push ends in."""
    with pytest.raises(ReleaseError) as caught:
        push_files(NEW, repo_id=repo_id)
    error = caught.value
    assert error.found and error.expected and error.fix and "\n" not in str(error)
    assert [user.token for user in hub.users.values() if user.token in repr(error)] == []
    return error


def test_no_token(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    error = refused(hub)
    assert error.check == "token" and "hf auth login" in error.fix and "HF_TOKEN" in error.fix
    assert hub.log == []


def test_the_token_that_the_client_saved(
    hub: LocalHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    place = Path(constants.HF_TOKEN_PATH)
    place.parent.mkdir(parents=True)
    place.write_text(hub.user("ada").token)
    push_files(OLD, "v1")
    assert remote_files(hub) == OLD


def test_a_revoked_token(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_" + "y" * 34)
    error = refused(hub)
    assert "refuses" in error.found and "y" * 34 not in str(error)


@pytest.mark.parametrize("token", ["hf_abc\x01def", "hf_abc def", "hf_abcä"])
def test_a_token_that_is_none(token: str, hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    assert "abc" not in str(refused(hub)) and hub.log == []


def test_a_token_that_may_only_read(released: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", released.user("ada", "read").token)
    error = refused(released)
    assert "ada" in error.found and "read" in error.found
    assert remote_files(released) == OLD


@pytest.mark.parametrize("existing", [True, False])
def test_no_rights(existing: bool, released: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", released.user("bob").token)
    error = refused(released, "ada/drafter" if existing else "ada/another")
    assert (
        "no right to write to the model repository ada/" in error.found
        and "namespace ada" in error.found
    )
    assert remote_files(released) == OLD


def test_a_private_repository_of_somebody_else(
    released: LocalHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote_repo(released).private = True
    monkeypatch.setenv("HF_TOKEN", released.user("bob").token)
    refused(released)
    assert remote_files(released) == OLD


@pytest.mark.parametrize(
    "repo_id", ["drafter", "ada/b/c", "ada/a b", "ada/--x", "ada/x..y", "", "/", "ada/", "../x"]
)
def test_an_illegal_id(repo_id: str) -> None:
    with pytest.raises(ReleaseError) as caught:
        HubRepo(repo_id)
    assert caught.value.check == "repo-id" and repr(repo_id) in caught.value.found


def test_no_network(hub: LocalHub, monkeypatch: pytest.MonkeyPatch, waits: list[float]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    error = refused(hub)
    assert address in error.found and "network" in error.fix
    assert sum(waits) < 20


def test_offline_on_purpose(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    done = subprocess.run([sys.executable, push_child.__file__], capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert "ReleaseError" in last and "unset HF_HUB_OFFLINE" in last and hub.log == []


def test_a_full_disk(released: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp/flashmap-push-x/blob")

    monkeypatch.setattr(HfApi, "snapshot_download", full)
    verify = arrives(HubRepo("ada/drafter"), planned(NEW))
    with pytest.raises(ReleaseError) as caught:
        push_files(NEW, verify=verify)
    assert "full disk" in caught.value.found and "/tmp/flashmap-push-x" in caught.value.found
    assert "again" in caught.value.fix and remote_files(released) == OLD


def test_a_file_that_vanishes(released: LocalHub, tmp_path: Path) -> None:
    files, gone = planned(NEW), tmp_path / "model.safetensors"
    gone.write_bytes(b"\0" * 99)
    files[gone.name] = local_file(gone)
    gone.unlink()
    repo = HubRepo("ada/drafter")
    with pytest.raises(ReleaseError, match=gone.name):
        push(repo, make_plan(repo, files, None), message="Release")
    assert remote_files(released) == OLD
