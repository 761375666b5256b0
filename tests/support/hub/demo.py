"""`make demo-push`: a release on its way to the Hub and back, with a Hub that runs on this machine.

Builds the embedded drafter's release folder, pushes it with the real client, downloads it as a
stranger would, in a process that has no flashmap, and generates with it. Nothing leaves the
machine.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from flashmap.embedded import embedded_target
from flashmap.references import EMBEDDED
from flashmap.release import bootstrap

from . import pull_script
from .server import LocalHub

REPO, TAG = "me/smollm2-135m-flashmap", "v1.0"
PROMPT, TOKENS = "The three primary colours are", 32


def call(title: str, command: list[str], environment: dict[str, str], shown: str) -> str:
    """Run one step, told before and timed after; returns its stdout."""
    print(f"\n{title}\n  $ {shown}", flush=True)
    began = time.perf_counter()
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"this step failed with status {done.returncode}")
    print(f"  took {time.perf_counter() - began:.0f} s")
    return done.stdout


def flashmap(title: str, environment: dict[str, str], *arguments: str) -> None:
    """Run the command line and show what it says."""
    command = [sys.executable, "-m", "flashmap.cli.main", *arguments]
    out = call(title, command, environment, " ".join(["flashmap", *arguments]))
    print("\n".join(f"  {line}" for line in out.splitlines()))


def main() -> None:
    """Build, push, download, generate."""
    target = embedded_target()
    with LocalHub() as hub, tempfile.TemporaryDirectory(prefix="flashmap-demo-push-") as folder:
        out = str(Path(folder) / "release")
        environment = {**os.environ, **hub.environment("me"), "HF_HOME": f"{folder}/home"}
        print(f"A Hub for this demo answers at {hub.endpoint}; HF_ENDPOINT points there.")
        place = ["--repo-id", REPO, "--tag", TAG]
        flashmap(
            "1. Build the release folder.",
            environment,
            *["release", "build", EMBEDDED, "--out", out, *place],
        )
        push = ["release", "push", out, REPO, "--yes"]
        flashmap("2. Check it, push it in one commit, tag it.", environment, *push)
        pull = [sys.executable, "-P", bootstrap.__file__, pull_script.__file__]
        said = call(
            "3. Download and generate, where flashmap is not installed.",
            [*pull, REPO, TAG, str(target), PROMPT, str(TOKENS)],
            environment,
            f'AutoModel.from_pretrained("{REPO}", revision="{TAG}", trust_remote_code=True)',
        )
        report = json.loads(said.strip().splitlines()[-1])
        print(f"  {len(report['files'])} files of commit {report['commit'][:12]}")
        print(f"  {PROMPT}{report['text']}")
        print(f"  {report['acceptance_length']:.2f} tokens a pass of the target")
    print(f"\nThe same on the real Hub: flashmap release push DIR you/name --tag {TAG}")


if __name__ == "__main__":
    main()
