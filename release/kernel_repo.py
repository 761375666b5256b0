"""The fused operations as a Hub kernel repository, which the PyPI package `kernels` loads.

Its layout is build/VARIANT/, a Python package with a metadata.json. Ours are plain PyTorch and
Triton, so one variant serves every device: torch-universal. The package's `__init__.py` is made
here, because the source folder must not have one.
"""

import ast
import hashlib
import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from .contents import CARD, LICENCE
from .errors import ReleaseError
from .plan import LocalFile, local_file
from .safety import publishable

VARIANT = "build/torch-universal"
NAME = "flashmap"
CARD_TEXT = f"""---
library_name: kernels
license: mit
tags:
- kernel
---
# FlashMap's fused operations

The operations of FlashMap drafters (norms, rotary embeddings, counter-based random numbers), as
plain PyTorch and, where it is installed, Triton.

```python
from kernels import get_kernel

{NAME} = get_kernel("REPO_ID", version=VERSION, trust_remote_code=True)
```
"""


def kernel_files(folder: Path, repo_id: str, version: int) -> dict[str, LocalFile]:
    """The repository's files, staged from the modules of ``folder``. Raises ReleaseError for a
    module that would not load on its own."""
    modules = {
        path: source.read_bytes()
        for path, source in publishable(folder).items()
        if path.endswith(".py")
    }
    if not modules:
        raise ReleaseError(
            "kernels", f"no Python files in {folder}", "the fused operations", "name their folder"
        )
    code = {**modules, "__init__.py": _package(modules)}
    digest = hashlib.sha256()
    for path in sorted(code):
        digest.update(path.encode() + b"\0" + code[path] + b"\0")
    metadata = {
        # The module's name when it is loaded: two builds in one process must not meet.
        "id": f"_{NAME}_{digest.hexdigest()[:16]}",
        "name": NAME,
        "version": version,
        "license": "MIT",
        "python-depends": [],
        "backend": {"type": "cpu"},
    }
    card = CARD_TEXT.replace("REPO_ID", repo_id).replace("VERSION", str(version))
    contents = {
        CARD: card.encode(),
        LICENCE: resources.files("flashmap").joinpath(LICENCE).read_bytes(),
        f"{VARIANT}/metadata.json": (json.dumps(metadata, indent=2) + "\n").encode(),
        **{f"{VARIANT}/{path}": content for path, content in code.items()},
    }
    return {path: local_file(content) for path, content in contents.items()}


def _package(modules: Mapping[str, bytes]) -> bytes:
    """An `__init__.py` that offers what each module lists in `__all__`."""
    lines, names = ['"""Fused operations of FlashMap drafters."""', ""], []
    for path, content in sorted(modules.items()):
        public = _public_names(path, content)
        lines += [f"from .{path.removesuffix('.py')} import {name}" for name in public]
        names += public
    return "\n".join([*lines, "", f"__all__ = {sorted(names)!r}", ""]).encode()


def _public_names(path: str, content: bytes) -> list[str]:
    names: list[str] = []
    for node in ast.walk(ast.parse(content, filename=path)):
        if isinstance(node, ast.ImportFrom | ast.Import):
            roots = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            roots += [alias.name for alias in node.names if isinstance(node, ast.Import)]
            level = node.level if isinstance(node, ast.ImportFrom) else 0
            if level > 1 or (level == 0 and any(root.startswith(NAME) for root in roots)):
                raise ReleaseError(
                    "kernels",
                    f"{path}:{node.lineno}: {ast.unparse(node)}",
                    "relative imports of siblings only: the package is not there when it is loaded",
                    "write it as: from .sibling import name",
                )
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names = list(ast.literal_eval(node.value))
    return names
