"""Environments made for one check and thrown away: this interpreter with another transformers.

Everything else, torch above all, comes from the running environment; pip puts the other version and
what it needs in front of it.
"""

import site
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import ReleaseError

MINUTES = 10


@contextmanager
def environment_with(version: str) -> Iterator[Path]:
    """The interpreter of an environment that has this version of transformers.

    Raises ReleaseError if it cannot be installed.
    """
    with tempfile.TemporaryDirectory(prefix="flashmap-venv-") as folder:
        venv.create(folder, with_pip=True, symlinks=True)
        python = Path(folder, "bin" if sys.platform != "win32" else "Scripts", "python")
        _borrow_packages(Path(folder))
        done = subprocess.run(
            [
                str(python), "-m", "pip", "install", "--quiet", "--no-input",
                "--disable-pip-version-check", f"transformers=={version}",
            ],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=60 * MINUTES,
        )  # fmt: skip
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            raise ReleaseError(
                "load",
                f"transformers {version} cannot be installed: {(lines or ['pip failed'])[-1]}",
                "a version that the package index has",
                "name another --transformers, or go online",
            )
        yield python


def _borrow_packages(folder: Path) -> None:
    """Let the environment fall back on the running one's packages."""
    base = {"base": str(folder), "platbase": str(folder)}
    own = Path(sysconfig.get_path("purelib", "venv", vars=base))
    places = [path for path in (*site.getsitepackages(), *sys.path) if Path(path).is_dir()]
    found = dict.fromkeys(path for path in places if Path(path).name == "site-packages")
    (own / "borrowed.pth").write_text("\n".join(found) + "\n", encoding="utf-8")
