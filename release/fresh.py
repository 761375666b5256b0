"""Runs a script in a fresh process that stands for a stranger's machine.

Another working folder, an empty cache of remote code, no network, and no flashmap (see
`bootstrap`). The script reports by printing JSON objects, one a line.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flashmap.openmp import bound_spinning

from .errors import ReleaseError

BOOTSTRAP = Path(__file__).resolve().with_name("bootstrap.py")
LAST_WORDS = 5.0  # seconds: a process that it started may keep stderr open


def run_fresh(
    script: Path, arguments: list[str], *, timeout: float = 900.0, python: Path | None = None
) -> Iterator[dict[str, Any]]:
    """Run ``script`` and yield each JSON object it prints, as it comes; ``python`` is another
    interpreter than this one.

    Raises ReleaseError if it fails or takes more than ``timeout`` seconds, with the last line of
    its stderr.
    """
    interpreter = str(python or sys.executable)
    # -P: the script's own folder must not be searched, or its neighbours would hide packages of
    # their names.
    command = [interpreter, "-P", "-B", str(BOOTSTRAP), str(script.resolve()), *arguments]
    with (
        tempfile.TemporaryDirectory(prefix="flashmap-fresh-") as folder,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env=_environment(Path(folder)),
            encoding="utf-8",
            errors="replace",
        ) as process,
    ):
        said: list[str] = []  # not in a file: a full disk may be what it says
        listener = threading.Thread(target=lambda: said.extend(process.stderr or ()), daemon=True)
        listener.start()
        timer = threading.Timer(timeout, process.kill)
        timer.start()
        try:
            for line in process.stdout or ():
                if line.startswith("{"):  # anything else is chatter of a library
                    yield json.loads(line)
            if process.wait() != 0:
                listener.join(LAST_WORDS)
                raise _failure(script, process.returncode, said)
        finally:
            timer.cancel()
            process.kill()
            listener.join(LAST_WORDS)


def _environment(folder: Path) -> dict[str, str]:
    hidden = {"PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP"}
    inherited = {name: value for name, value in os.environ.items() if name not in hidden}
    bound_spinning(inherited)
    return {
        **inherited,
        "HF_HUB_OFFLINE": "1",
        "HF_MODULES_CACHE": str(folder / "modules"),
        "PYTHONIOENCODING": "utf-8",
    }


def _failure(script: Path, status: int, said: list[str]) -> ReleaseError:
    lines = [line.strip() for line in said if line.strip()]
    return ReleaseError(
        "fresh-process",
        f"{script.name} ended with status {status}: {lines[-1] if lines else 'no message'}",
        "a clean end in a process without flashmap",
        "read the message; it is what a user of the release would see",
    )
