"""The tensors of a checkpoint in any usual form: safetensors, or torch's own files without the code
that they may carry.
"""

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashmap.checkpoint import INDEX, LFS_POINTER, WEIGHTS

from .errors import ReleaseError
from .weights import read_tensors, weight_paths

if TYPE_CHECKING:
    from torch import Tensor

TORCH_WEIGHTS, TORCH_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
TORCH_SUFFIXES = (".bin", ".pt", ".pth")
# Under which a training script keeps the weights among other things.
WRAPPERS = ("state_dict", "model_state_dict", "model", "module")


def read_state_dict(source: Path) -> "tuple[dict[str, Tensor], list[str]]":
    """Tensors by name of a checkpoint folder or file, and the names of what is no tensor.

    Raises ReleaseError if there is no checkpoint, or a damaged one, or one that cannot be read
    without running code.
    """
    tensors: dict[str, Tensor] = {}
    others: list[str] = []
    for path in _checkpoint_files(source):
        if path.suffix == ".safetensors":
            tensors |= read_tensors(path)
            continue
        content = _load(path)
        while inner := _inner(content):
            others += [str(name) for name, value in content.items() if value is not inner]
            content = inner
        _require_tensors(content, path)
        tensors |= {str(name): value for name, value in content.items() if _is_tensor(value)}
        others += [str(name) for name, value in content.items() if not _is_tensor(value)]
    return tensors, others


def _checkpoint_files(source: Path) -> list[Path]:
    if source.is_file():
        return [source]
    if (source / INDEX).is_file() or (source / WEIGHTS).is_file():
        return weight_paths(source)
    if (source / TORCH_INDEX).is_file():
        return _torch_shards(source)
    if (source / TORCH_WEIGHTS).is_file():
        return [source / TORCH_WEIGHTS]
    found = sorted(path for path in source.glob("*") if path.suffix in TORCH_SUFFIXES)
    if len(found) != 1:
        names = ", ".join(path.name for path in found[:3]) or "no weights"
        raise ReleaseError(
            "weights",
            f"{names} in {source}",
            f"{WEIGHTS}, {TORCH_WEIGHTS} (or their shards with an index), or one torch file",
            "name the file instead of the folder" if found else "copy the weights there",
        )
    return found


def _torch_shards(folder: Path) -> list[Path]:
    try:
        names = set(
            json.loads((folder / TORCH_INDEX).read_text(encoding="utf-8"))["weight_map"].values()
        )
        paths = [folder / Path(name).name for name in sorted(names)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ReleaseError(
            "weights", f"{folder / TORCH_INDEX} unreadable ({error})", "an index", "copy it again"
        ) from error
    if missing := [path.name for path in paths if not path.is_file()]:
        raise ReleaseError(
            "weights",
            f"{len(missing)} of {len(paths)} shards missing ({', '.join(missing[:3])}) in {folder}",
            "every file that the index names",
            "copy them there",
        )
    return paths


def _load(path: Path) -> Any:
    import torch

    try:
        with path.open("rb") as file:
            pointer = file.read(len(LFS_POINTER)) == LFS_POINTER
        if pointer:
            raise EOFError("it is a Git LFS pointer")
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = " ".join(str(error).split())
        found = f"{path} with more than tensors, which would run code ({reason[:160]})"
        fix = "save its tensors where it is trusted: torch.save(model.state_dict(), path)"
    except (OSError, EOFError, RuntimeError, ValueError, KeyError, IndexError) as error:
        found = f"{path} unreadable ({' '.join(str(error).split())[:160] or type(error).__name__})"
        fix = "fetch or copy it again"
    raise ReleaseError(
        "weights", found, "a state dict that torch.load(weights_only=True) reads", fix
    )


def _inner(content: Any) -> Mapping[str, Any] | None:
    """The mapping in which a training script keeps the weights, if it is not `content` itself."""
    values = [content.get(name) for name in WRAPPERS] if isinstance(content, Mapping) else []
    return next((value for value in values if isinstance(value, Mapping) and value), None)


def _require_tensors(content: Any, path: Path) -> None:
    if not isinstance(content, Mapping) or not any(map(_is_tensor, content.values())):
        raise ReleaseError(
            "weights",
            f"no tensors by name in {path}",
            f"a state dict, bare or under one of {', '.join(WRAPPERS)}",
            "save it with torch.save(model.state_dict(), path)",
        )


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)
