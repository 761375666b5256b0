"""What a release folder and its source consist of, read the same way by the build and by the check.

Everything that reads a folder raises ReleaseError with the file's name, and opens regular files
only: a pipe would be waited for without end.
"""

import hashlib
import json
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashmap import checkpoint
from flashmap.checkpoint import CONFIG

from .errors import ReleaseError

if TYPE_CHECKING:
    from torch import Tensor

    from flashmap.modeling.configuration_flashmap import FlashMapConfig

CARD, LICENCE, RECORD = "README.md", "LICENSE", "release.json"
GENERATE, REQUIREMENTS = "custom_generate/generate.py", "custom_generate/requirements.txt"


def folder_files(folder: Path, *, record: bool = False) -> dict[str, dict[str, Any]]:
    """Size and sha256 of every file below ``folder`` by path; with ``record`` release.json too.

    What is no regular file has a ``kind`` instead: folder (an empty one), symlink, special file,
    unreadable.
    """
    rows = {}
    paths = sorted(folder.rglob("*"))
    filled = {path.parent for path in paths}
    for path in paths:
        name = path.relative_to(folder).as_posix()
        if path in filled or (name == RECORD and not record):
            continue
        # Names may hold bytes that are no text, and have to be shown all the same.
        rows[name.encode("utf-8", "backslashreplace").decode()] = _row(path)
    return rows


def _row(path: Path) -> dict[str, Any]:
    try:
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode):
            kinds = {stat.S_IFDIR: "folder", stat.S_IFLNK: "symlink"}
            return {"kind": kinds.get(stat.S_IFMT(found.st_mode), "special file")}
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return {"kind": "unreadable"}
    return {"sha256": digest, "size": found.st_size}


def read_record(folder: Path) -> dict[str, Any]:
    """The files that release.json lists, by name. Raises ReleaseError."""
    path = folder / RECORD
    try:
        if not path.is_file():
            raise ValueError("no regular file of that name")
        files = json.loads(path.read_text(encoding="utf-8"))["files"]
        if not isinstance(files, dict):
            raise ValueError("its files are not an object")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ReleaseError(
            "record",
            f"{RECORD} unreadable ({type(error).__name__}: {error})",
            "the build's record",
            "build again",
        ) from error
    return files


def read_config(folder: Path) -> "tuple[dict[str, Any], FlashMapConfig]":
    """The folder's config.json as written, and as a FlashMapConfig. Raises ReleaseError."""
    from flashmap.modeling.configuration_flashmap import FlashMapConfig

    path = folder / CONFIG
    try:
        raw = checkpoint.read_json(path)
        if raw.get("model_type") != "flashmap":
            raise ValueError(
                "it is not the configuration of a FlashMap drafter (model_type 'flashmap')"
            )
        return raw, FlashMapConfig.from_dict(raw)
    except Exception as error:  # noqa: BLE001 - odd values make transformers raise anything
        caught = error
    raise ReleaseError(
        "config",
        f"{path}: {' '.join(str(caught).split()) or type(caught).__name__}",
        "a readable, valid FlashMap configuration",
        "mend or restore the file",
    ) from caught


def weight_paths(folder: Path) -> list[Path]:
    """The folder's weight files: those its index names, else the one. Raises ReleaseError."""
    try:
        return checkpoint.weight_paths(folder)
    except ValueError as error:
        raise ReleaseError(
            "weights", str(error), "every weight file", "copy or save the weights again"
        ) from error


def read_tensors(path: Path) -> "dict[str, Tensor]":
    """The tensors of one weight file. Raises ReleaseError if it is damaged."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise ReleaseError(
            "weights",
            f"{path} damaged ({error})",
            "whole safetensors files",
            "copy or save the weights again",
        ) from error


def require_tensors(config: "FlashMapConfig", found: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ReleaseError unless ``found``, shapes by name, are the tensors that ``config`` asks
    for."""
    import torch

    from flashmap.modeling.modeling_flashmap import FlashMapDraftModel

    with torch.device("meta"):
        model = FlashMapDraftModel(config)
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    problems = [f"{name} missing" for name in wanted.keys() - found.keys()]
    problems += [f"{name} unknown" for name in found.keys() - wanted.keys()]
    problems += [
        f"{n} {found[n]} instead of {wanted[n]}"
        for n in wanted.keys() & found.keys()
        if wanted[n] != found[n]
    ]
    if problems:
        raise ReleaseError(
            "weights",
            f"{len(problems)} of {len(wanted)} tensors wrong: {', '.join(sorted(problems)[:3])}",
            "the tensors of the configuration",
            "build from a whole checkpoint",
        )


def require_finite(tensors: "Iterable[tuple[str, Tensor]]") -> None:
    """Raise ReleaseError naming the tensors that hold NaN or an infinity."""
    import torch

    broken = sorted(name for name, tensor in tensors if not torch.isfinite(tensor).all())
    if broken:
        raise ReleaseError(
            "finite",
            f"{len(broken)} tensors with NaN or infinities: {', '.join(broken[:3])}",
            "finite numbers",
            "the training run diverged: release another checkpoint",
        )
