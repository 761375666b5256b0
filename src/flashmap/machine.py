"""What a measurement ran on, told the same way by every command that measures: device, versions,
commit, day.
"""

import datetime
import platform
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .references import checkout_root

if TYPE_CHECKING:
    import torch

MEASURED_WITH = ("flashmap-hub", "torch", "transformers")
CPU_INFO = Path("/proc/cpuinfo")


def device_name(device: "torch.device") -> str:
    """The device with its model, such as ``cpu (Intel(R) Xeon(R), x86_64, 2 threads)``."""
    import torch

    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    parts = [_processor(), platform.machine(), f"{torch.get_num_threads()} threads"]
    return f"{device} ({', '.join(part for part in parts if part)})"


def _processor() -> str:
    """The processor's model; empty where the system does not tell."""
    try:
        lines = CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if "model name" in line), "")


def provenance() -> dict[str, Any]:
    """How to repeat a measurement: the command line, the versions of Python and of what decoding
    depends on (None for what is not installed), the checkout's commit, the day in UTC."""
    return {
        "command": shlex.join(["flashmap", *sys.argv[1:]]),
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in MEASURED_WITH},
        },
        "commit": checkout_commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:  # run from the tree, without an installation
        own: str = sys.modules["flashmap"].__version__
        return own if distribution == "flashmap-hub" else None


def checkout_commit() -> str | None:
    """Commit of the checkout this runs from; None for an installed package or a tree without
    git."""
    root = checkout_root()
    if root is None:
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "--verify", "--quiet", "HEAD"],
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return None
    return done.stdout.strip() or None
