"""`kill -9` at every step of a push: main is one whole release, old or new, and a second run
finishes."""

import os
import re
import signal
import subprocess
import sys

import pytest
from support.hub import push_child
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
from support.hub.server import LocalHub

from flashmap.release.hub import HubRepo
from flashmap.release.verify import arrives

# Every kind of call, in the order of a push.
STEPS = {
    "whoami": "GET /api/whoami",
    "plan": "GET .*/revision/main",
    "tree": "GET .*/tree/",
    "refs": "GET .*/refs",
    "branch": "POST .*/branch/",
    "metadata": "POST /api/validate-yaml",
    "preupload": "POST .*/preupload/release",
    "batch": "POST .*/objects/batch",
    "upload": "PUT /upload",
    "verify": "POST /verify",
    "stage": "POST .*/commit/release",
    "compare": "GET .*/revision/release",
    "download": "GET .*/resolve/",
    "preupload to main": "POST .*/preupload/main",
    "main": "POST .*/commit/main",
    "tag": "POST .*/tag/",
    "delete": "DELETE .*/branch/",
}


def start_push() -> "subprocess.Popen[str]":
    """The push in a process of its own, which finds what this one does."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.Popen(
        [sys.executable, push_child.__file__], stderr=subprocess.PIPE, text=True, env=env
    )


def assert_whole(hub: LocalHub) -> None:
    """Main and every tag are one release or the other, and main has at most one new commit."""
    repo = remote_repo(hub)
    assert remote_files(hub) in (OLD, NEW)
    assert {ref: remote_files(hub, ref) for ref in repo.refs if ref.startswith("refs/tags/")} in (
        {"refs/tags/v1": OLD},
        {"refs/tags/v1": OLD, "refs/tags/v2": NEW},
    )
    assert len(history(hub)) in (2, 3)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", STEPS)
def test_killed(step: str, after: bool, released: LocalHub) -> None:
    started: list[subprocess.Popen[str]] = []
    fault = released.order(STEPS[step], after=after, do=lambda: started[0].kill())
    started.append(start_push())
    _, err = started[0].communicate(timeout=60)
    assert started[0].returncode == -signal.SIGKILL, err
    assert fault.times == 0
    assert_whole(released)
    push_files(NEW, verify=arrives(HubRepo(REPO), planned(NEW)))
    assert remote_files(released) == remote_files(released, "v2") == NEW
    assert len(history(released)) == 3
    expected = {"refs/heads/main", "refs/tags/v1", "refs/tags/v2"}
    assert set(remote_repo(released).refs) == expected


def test_the_steps_are_all_there_are(released: LocalHub) -> None:
    process = start_push()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    asked_by_downloads = ["HEAD .*/resolve/", "GET .*/revision/[0-9a-f]{40}$"]
    patterns = [*STEPS.values(), *asked_by_downloads]
    unknown = [line for line in released.lines() if not any(re.search(p, line) for p in patterns)]
    assert unknown == []
