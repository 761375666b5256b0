"""A release's weights: read, compared with what the configuration asks for, and written.

Engines read every safetensors file of a folder, and a tensor that is missing is filled with random
numbers, so files, names, shapes and dtype are all exact or refused.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from flashmap import checkpoint
from flashmap.checkpoint import INDEX, WEIGHTS

from .contents import write_json
from .errors import ReleaseError

if TYPE_CHECKING:
    from torch import Tensor

    from flashmap.modeling.configuration_flashmap import FlashMapConfig

SHARD_SIZE = "5GB"
DTYPES = ("float32", "bfloat16", "float16", "float64")
SAVE_AGAIN = "copy or save the weights again"


def weight_paths(folder: Path) -> list[Path]:
    """The folder's weight files: those its index names, else the one. Raises ReleaseError."""
    try:
        return checkpoint.weight_paths(folder)
    except ValueError as error:
        blamed = [INDEX] if (folder / INDEX).exists() else [WEIGHTS]
        raise ReleaseError(
            "weight-files", str(error), "every weight file", SAVE_AGAIN, blamed
        ) from error


def read_headers(path: Path) -> "tuple[dict[str, tuple[tuple[int, ...], str]], dict[str, str]]":
    """Shape and dtype (as safetensors writes it) of every tensor of a file, and its metadata.

    Raises ReleaseError if the file is damaged.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            shapes = {n: (tuple(s.get_shape()), str(s.get_dtype())) for n, s in slices.items()}
            return shapes, dict(file.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise _damaged(path, error) from error


def read_tensors(path: Path) -> "dict[str, Tensor]":
    """The tensors of one weight file. Raises ReleaseError if it is damaged."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> ReleaseError:
    return ReleaseError(
        "weight-files", f"{path} damaged ({error})", "whole files", SAVE_AGAIN, [path.name]
    )


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


def require_one_dtype(dtypes: Iterable[str], where: Path) -> str:
    """The one dtype among ``dtypes``. Raises ReleaseError if there are several, or it is none that
    every reader takes."""
    found = sorted(set(dtypes))
    if len(found) != 1 or found[0] not in DTYPES:
        raise ReleaseError(
            "dtype",
            f"dtypes {', '.join(found)} in {where}",
            f"one dtype: {', '.join(DTYPES)}",
            "save the whole checkpoint in one of them",
        )
    return found[0]


def write_weights(tensors: "Mapping[str, Tensor]", folder: Path, max_shard_size: str | int) -> None:
    """Write model.safetensors, or shards with an index above ``max_shard_size`` (bytes, or text
    such as "5GB"). Raises ReleaseError for a size that is none, OSError if the disk refuses."""
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    # Views and tied tensors share storage, which the format refuses; transposed ones would be
    # stored in another order.
    clones = {name: tensor.clone().contiguous() for name, tensor in sorted(tensors.items())}
    try:
        if not re.match("0*[1-9]", str(max_shard_size)):
            raise ValueError("It does not begin with a number above 0.")
        split = split_torch_state_dict_into_shards(clones, max_shard_size=max_shard_size)
    except ValueError as error:
        raise ReleaseError(
            "weights", f"shard size {max_shard_size!r}", "a size such as 5GB", str(error)
        ) from error
    for name, members in split.filename_to_tensors.items():
        shard = {member: clones[member] for member in members}
        try:
            save_file(shard, folder / name, metadata={"format": "pt"})
        except SafetensorError as error:  # what it makes of a full disk
            raise OSError(f"{name}: {error}") from error
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX).write_bytes(write_json(index))
