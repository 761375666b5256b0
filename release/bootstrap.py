"""Runs a script as if flashmap were not installed: what somebody has who only loads a release with
transformers.

Started by path in a child process, with the script and its arguments behind it.
"""

import runpy
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Refuse(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Refuse the package, whichever way it is installed, and leave every other name alone."""
        if fullname.partition(".")[0] == "flashmap":
            raise ModuleNotFoundError(
                f"{fullname} is hidden from this process on purpose", name=fullname
            )
        return None


if __name__ == "__main__":
    if "flashmap" in sys.modules:
        sys.exit("flashmap was imported before it could be hidden")
    sys.meta_path.insert(0, _Refuse())
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
