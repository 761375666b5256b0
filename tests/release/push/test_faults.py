"""A push over a bad connection: it ends as if nothing had happened, or with one message and main as
it was."""

from contextlib import suppress
from typing import Any

import pytest
from support.hub.client import (
    NEW,
    OLD,
    REPO,
    history,
    planned,
    push_files,
    remote_files,
    remote_repo,
)
from support.hub.faults import FOREVER
from support.hub.server import LocalHub

from flashmap.release.errors import ReleaseError
from flashmap.release.hub import HubRepo
from flashmap.release.push import Pushed
from flashmap.release.verify import arrives

STAGING, MAIN = "POST .*/commit/release", "POST .*/commit/main"
# What happens once, at each kind of call that a push makes.
PASSING: dict[str, tuple[str, dict[str, Any]]] = {
    "whoami is busy": ("GET /api/whoami", {"status": 503}),
    "listing fails": ("GET .*/tree/", {"status": 500}),
    "listing is cut": ("GET .*/tree/", {"cut": True, "after": True}),
    "branch fails": ("POST .*/branch/", {"status": 500}),
    "branch exists, the answer is lost": ("POST .*/branch/", {"status": 500, "after": True}),
    "branch exists, the connection is cut": ("POST .*/branch/", {"cut": True, "after": True}),
    "metadata cannot be checked": ("POST /api/validate-yaml", {"status": 502}),
    "preupload is cut": ("POST .*/preupload/", {"cut": True}),
    "batch fails": ("POST .*/batch", {"status": 503}),
    "upload fails": ("PUT /upload", {"status": 500}),
    "upload is cut": ("PUT /upload", {"cut": True}),
    "upload is there, the answer is lost": ("PUT /upload", {"status": 504, "after": True}),
    "upload is slow": ("PUT /upload", {"delay": 0.3}),
    "verify fails": ("POST /verify", {"status": 500}),
    "staging fails": (STAGING, {"status": 500}),
    "staged, the answer is lost": (STAGING, {"status": 500, "after": True}),
    "staging is cut": (STAGING, {"cut": True}),
    "download fails": ("GET .*/resolve/.*model.safetensors", {"status": 503}),
    "download is cut": ("GET .*/resolve/.*model.safetensors", {"cut": True, "after": True}),
    "main fails": (MAIN, {"status": 502}),
    "main is there, the answer is lost": (MAIN, {"status": 500, "after": True}),
    "main is there, the connection is cut": (MAIN, {"cut": True, "after": True}),
    "main is cut": (MAIN, {"cut": True}),
    "tag fails": ("POST .*/tag/", {"status": 500}),
    "tagged, the answer is lost": ("POST .*/tag/", {"status": 500, "after": True}),
    "deleting the branch fails": ("DELETE .*/branch/", {"status": 500}),
    "branch deleted, the answer is lost": ("DELETE .*/branch/", {"cut": True, "after": True}),
}


def push_new() -> Pushed:
    """Push, trying what arrives."""
    return push_files(NEW, verify=arrives(HubRepo(REPO), planned(NEW)))


def assert_released(hub: LocalHub) -> None:
    """One new commit on main, tagged, and nothing left over."""
    assert remote_files(hub) == remote_files(hub, "v2") == NEW
    assert len(history(hub)) == 3
    expected = {"refs/heads/main", "refs/tags/v1", "refs/tags/v2"}
    assert set(remote_repo(hub).refs) == expected


@pytest.mark.parametrize("case", PASSING)
def test_what_passes_is_outlived(case: str, released: LocalHub) -> None:
    pattern, what = PASSING[case]
    fault = released.order(pattern, **what)
    push_new()
    assert fault.times == 0, "the fault did not happen"
    assert_released(released)


def test_faults_at_every_kind_of_call_at_once(released: LocalHub) -> None:
    for pattern, what in PASSING.values():
        released.order(pattern, **what)
    for _ in range(5):  # more trouble than one run puts up with
        with suppress(ReleaseError):
            push_new()
    assert_released(released)


def test_creating_the_repository_outlives_a_lost_answer(hub: LocalHub) -> None:
    hub.order("POST .*/repos/create", status=500, after=True)
    push_files(OLD, "v1")
    assert remote_files(hub, "v1") == OLD and len(history(hub)) == 2


@pytest.mark.parametrize("pattern", ["GET /api/whoami", STAGING, MAIN, "POST .*/tag/"])
def test_the_hub_says_how_long_to_wait(
    pattern: str, released: LocalHub, waits: list[float]
) -> None:
    released.order(pattern, status=429, retry_after=37)
    push_new()
    assert_released(released)
    assert max(waits) == 37


def test_a_wait_that_nobody_would_sit_through(released: LocalHub, waits: list[float]) -> None:
    released.order(STAGING, status=429, retry_after=86_400)
    with pytest.raises(ReleaseError, match="429"):
        push_new()
    assert 86_400 not in waits and remote_files(released) == OLD


# What never passes, and whether main has its commit by then.
LASTING = {
    "GET /api/whoami": False,
    "POST .*/branch/": False,
    "POST .*/preupload/": False,
    "POST .*/batch": False,
    "PUT /upload": False,
    STAGING: False,
    "GET .*/resolve/": False,
    MAIN: False,
    "POST .*/tag/": True,
    "DELETE .*/branch/": True,
}


@pytest.mark.parametrize("status", [500, 403])
@pytest.mark.parametrize("pattern", LASTING)
def test_what_lasts_is_one_message_and_a_second_run_finishes(
    pattern: str, status: int, released: LocalHub
) -> None:
    fault = released.order(pattern, status=status, times=FOREVER)
    with pytest.raises(ReleaseError) as caught:
        push_new()
    assert caught.value.found and caught.value.fix and "\n" not in str(caught.value)
    assert remote_files(released) == (NEW if LASTING[pattern] else OLD)
    fault.times = 0
    push_new()
    assert_released(released)


def test_main_is_reached_although_no_answer_ever_comes(released: LocalHub) -> None:
    released.order(MAIN, status=500, after=True, times=FOREVER)
    push_new()
    assert_released(released)
    assert len([line for line in released.lines() if line.endswith("/commit/main")]) == 1


def test_a_hub_that_changes_files_is_found(released: LocalHub) -> None:
    def damage() -> None:
        large = released.store.large
        sha256 = next(key for key, value in large.items() if value == NEW["model.safetensors"])
        large[sha256] = bytes(len(large[sha256]))

    released.order("GET .*/resolve/.*/model.safetensors", do=damage)
    with pytest.raises(ReleaseError, match="sha256"):
        push_new()
    assert remote_files(released)["model-00001-of-00002.safetensors"] == b"\1" * 900
