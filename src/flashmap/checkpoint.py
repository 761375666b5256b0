"""Is a model folder whole? Checks made before and after transformers loads it.

transformers fills what a damaged folder lacks with fresh random numbers, or fails with an error
from deep inside; both are found here first and told in one sentence with the path.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
LFS_POINTER = b"version https://git-lfs"


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``. Raises ValueError naming the path if there is none."""
    if not path.is_file():  # a pipe of that name would be waited for without end
        raise ValueError(
            f"{path.parent} holds no {path.name}; it is not a model folder, or its copy is "
            f"incomplete"
        )
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} cannot be read as JSON ({error}); fetch or copy it again"
        ) from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a JSON {type(value).__name__}, expected an object")
    return value


def weight_paths(folder: Path) -> list[Path]:
    """Paths of the safetensors files that ``folder`` loads from: those its index names, else the
    one. Raises ValueError for missing ones and an index that cannot be used."""
    if (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{folder / INDEX} has no weight_map; fetch or copy it again")
        odd = [name for name in weight_map.values() if name != Path(str(name)).name]
        if odd:
            raise ValueError(
                f"{folder / INDEX}: weight_map names {odd[0]!r} as a file, expected the name of one"
                " beside it; fetch or copy it again"
            )
        names = sorted(set(weight_map.values()))
    else:
        names = [WEIGHTS]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ValueError(
            f"{folder}: {len(missing)} of {len(names)} weight files are missing "
            f"({', '.join(missing[:3])}); the download "
            "or copy is incomplete (only safetensors weights are read): fetch them again"
        )
    return [folder / name for name in names]


def weight_files(folder: Path) -> list[Path]:
    """`weight_paths`, each as long as its header says. Raises ValueError for truncated or
    unreadable files too."""
    paths = weight_paths(folder)
    for path in paths:
        _check_length(path)
    return paths


def _check_length(path: Path) -> None:
    from safetensors import SafetensorError, safe_open

    with path.open("rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            raise ValueError(
                f"{path} is a Git LFS pointer, not the weights; fetch them with: git lfs pull"
            )
    try:
        with safe_open(path, framework="pt"):
            pass
    except SafetensorError as error:
        raise ValueError(
            f"{path} is cut short or damaged: {path.stat().st_size} bytes do not hold what its "
            f"header lists ({error}); "
            "delete it and fetch or copy it again"
        ) from error


def require_all_loaded(info: Mapping[str, Iterable[Any]], folder: Path, *, strict: bool) -> None:
    """Raise ValueError if transformers' loading report lists missing tensors, or with ``strict``
    unknown ones."""
    kinds = (
        ("missing_keys", "mismatched_keys", "unexpected_keys")
        if strict
        else ("missing_keys", "mismatched_keys")
    )
    for kind in kinds:
        # A tensor of another shape comes as (name, one shape, other shape).
        rows = (row if isinstance(row, tuple) else (row,) for row in info.get(kind, ()))
        names = sorted(" ".join(map(str, row)) for row in rows)
        if names:
            raise ValueError(
                f"{folder}: {len(names)} {kind.replace('_keys', '')} tensors, the first is "
                f"{names[0]}; the weights do "
                "not belong to this config.json, or are incomplete: fetch or copy both files again"
            )


def require_finite(model: "nn.Module", folder: Path) -> None:
    """Raise ValueError naming the first floating-point parameter of ``model`` that holds NaN or an
    infinity."""
    import torch

    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            bad = int((~torch.isfinite(tensor)).sum())
            raise ValueError(
                f"{folder}: {name} holds {bad} values of {tensor.numel()} that are NaN or "
                f"infinite; every output would "
                "be meaningless. The training run diverged or the file is damaged: use another "
                "checkpoint"
            )
