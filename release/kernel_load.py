"""Imports a kernel package by path, as the PyPI package `kernels` does; prints its names as JSON.

Run before a commit becomes main, through `bootstrap`, in a process that has no flashmap. Imports
nothing of this project.
"""

import importlib.util
import json
import sys
from pathlib import Path


def main(folder: Path) -> None:
    """Import the package under the name that its metadata gives."""
    name = json.loads((folder / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    if spec is None or spec.loader is None:
        sys.exit(f"{folder} is no package")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    sys.stdout.write(json.dumps({"names": module.__all__}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
