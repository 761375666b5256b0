"""Proves an installed wheel: every module of every room is there, unchanged, and imports.

Run it with the interpreter of the environment to test, isolated (-I) and from a folder other than
the checkout, so that nothing can come from the working tree. The checkout is an argument, and is
only read to know what to expect.
"""

import sys
import tomllib
from hashlib import sha256
from importlib import import_module
from pathlib import Path

ENGINES = ("vllm", "sglang")


def main(checkout: Path) -> int:
    """Compare the installed package with the checkout, import it all, count the problems."""
    settings = tomllib.loads((checkout / "pyproject.toml").read_text())
    installed = Path(import_module("flashmap").__path__[0])
    if installed.is_relative_to(checkout / "src"):
        print(f"flashmap comes from the checkout ({installed}), not from a wheel")
        return 1
    problems = 0
    for package, folder in settings["tool"]["setuptools"]["package-dir"].items():
        modules = sorted((checkout / folder).glob("*.py"))
        for source in modules:
            target = installed.joinpath(*package.split(".")[1:], source.name)
            if not target.is_file() or digest(target) != digest(source):
                print(f"{package}: {source.name} is missing in the wheel or differs")
                problems += 1
                continue
            stem = "" if source.stem == "__init__" else f".{source.stem}"
            try:
                import_module(package + stem)
            except ModuleNotFoundError as error:
                if error.name not in ENGINES:  # a plugin's module that extends its engine
                    raise
        print(f"{package}: {len(modules)} modules")
    for name in ("py.typed", "LICENSE"):
        if not (installed / name).is_file():
            print(f"{name} is missing in the wheel")
            problems += 1
    return problems


def digest(path: Path) -> str:
    """The sha256 of a file's content."""
    return sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    sys.exit(1 if main(Path(sys.argv[1])) else 0)
