"""Builds a release folder: weights, explicit configuration, card, licence and the remote code,
complete and repeatable.

The folder is written under a temporary name and renamed when whole. The same source gives the same
bytes, so a second build changes nothing; a folder that holds anything but an earlier build is never
replaced.
"""

import hashlib
import inspect
import json
import shutil
import tempfile
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashmap import __version__, modeling

from .errors import ReleaseError
from .remote_code import AUTO_MAP, code_digest, read_closure, stamped

if TYPE_CHECKING:
    from torch import Tensor

    from flashmap.modeling.configuration_flashmap import FlashMapConfig

CONFIG, WEIGHTS, CARD, LICENCE, RECORD = (
    "config.json",
    "model.safetensors",
    "README.md",
    "LICENSE",
    "release.json",
)
INDEX = "model.safetensors.index.json"
# Facts about the target that only the drafter's source knows; passed on where it states them.
PASSED_ON = (
    "max_position_embeddings",
    "num_target_layers",
    "target_revision",
    "target_vocab_hash",
    "mask_token_id",
    "flow_map",
)


@dataclass(frozen=True)
class Build:
    """What a build did.

    Attributes:
        folder: the release folder.
        changed: whether anything there is different from before.
        files: size in bytes of every file by name.
        digest: sha256 of the remote code.
    """

    folder: Path
    changed: bool
    files: dict[str, int]
    digest: str


def build_release(
    source: Path, out: Path, *, tag: str | None = None, repo_id: str | None = None
) -> Build:
    """Build the release folder ``out`` from ``source``: config.json, weights and README.md.

    ``tag`` and ``repo_id`` say where the release is going and are recorded in release.json. Raises
    ReleaseError if the source is incomplete, or if ``out`` holds files that no build wrote.
    """
    code = stamped(read_closure(Path(next(iter(modeling.__path__)))))
    tensors = _read_tensors(source)
    digest = code_digest(code)
    config = _release_config(source, tensors, digest)
    texts = {
        **code,
        CARD: _read_card(source),
        LICENCE: _read_licence(),
        CONFIG: _json_bytes(config),
    }
    # Resolved, so that a symlink given as OUT is followed rather than replaced.
    out = out.resolve()
    _require_earlier_build(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
    try:
        for name, content in texts.items():
            (scratch / name).write_bytes(content)
        _write_tensors(tensors, scratch / WEIGHTS)
        files = folder_files(scratch)
        record = {
            "files": files,
            "flashmap_version": __version__,
            "target_model": config["target_model"],
            "target_revision": config.get("target_revision"),
            "repo_id": repo_id,
            "tag": tag,
        }
        (scratch / RECORD).write_bytes(_json_bytes(record))
        scratch.chmod(0o755)  # mkdtemp's folders are for their owner only
        changed = not (
            out.is_dir() and folder_files(out, record=True) == folder_files(scratch, record=True)
        )
        if changed:
            _replace(out, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return Build(
        out, changed, {path.name: path.stat().st_size for path in sorted(out.iterdir())}, digest
    )


def folder_files(folder: Path, *, record: bool = False) -> dict[str, dict[str, Any]]:
    """Size and sha256 of every file below ``folder`` by path; with ``record`` release.json too."""
    rows = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_dir() or (name == RECORD and not record):
            continue
        with path.open("rb") as file:
            rows[name] = {
                "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
                "size": path.stat().st_size,
            }
    return rows


def _json_bytes(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def read_config(folder: Path) -> "tuple[dict[str, Any], FlashMapConfig]":
    """The folder's config.json as written, and as a FlashMapConfig. Raises ReleaseError."""
    from flashmap.modeling.configuration_flashmap import FlashMapConfig

    path = folder / CONFIG
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(raw, dict) or raw.get("model_type") != "flashmap":
            raise ValueError(
                "it is not the configuration of a FlashMap drafter (model_type 'flashmap')"
            )
        config = FlashMapConfig.from_dict(raw)
    except (OSError, ValueError, TypeError) as error:
        raise ReleaseError(
            "config",
            f"{path}: {error}",
            "a readable, valid FlashMap configuration",
            "mend or restore the file",
        ) from error
    return raw, config


def _release_config(source: Path, tensors: "dict[str, Tensor]", digest: str) -> dict[str, Any]:
    """Every field written out, so that no reader's defaults matter, and what engines look for."""
    raw, config = read_config(source)
    fields = [
        name
        for name in inspect.signature(type(config).__init__).parameters
        if name not in ("self", "kwargs")
    ]
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()})
    if len(dtypes) != 1:
        raise ReleaseError(
            "weights",
            f"dtypes {', '.join(dtypes)} in {source}",
            "one dtype",
            "save the whole checkpoint in one dtype",
        )
    return {
        **{name: getattr(config, name) for name in fields},
        "mask_token_id": 0,  # read by engines that pad a block; this drafter never embeds its slots
        **{name: raw[name] for name in PASSED_ON if name in raw},
        "architectures": ["FlashMapDraftModel"],
        "auto_map": AUTO_MAP,
        "model_type": "flashmap",
        "speculators_model_type": "flashmap",
        "tie_word_embeddings": False,
        "dtype": dtypes[0],
        "torch_dtype": dtypes[0],  # the same for transformers 4.57
        # An engine's reader sizes its cache by these and refuses a drafter without the markov keys.
        "num_key_value_heads": config.num_attention_heads,
        "head_dim": config.hidden_size // config.num_attention_heads,
        "markov_rank": 1,
        "markov_head_type": "vanilla",
        "flashmap_version": __version__,
        "code_digest": digest,
    }


def weight_paths(folder: Path) -> list[Path]:
    """The folder's weight files: those its index names, else the one. Raises ReleaseError."""
    names = [WEIGHTS]
    if (folder / INDEX).is_file():
        try:
            names = sorted(
                set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
            )
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ReleaseError(
                "weights",
                f"{folder / INDEX} unreadable ({error})",
                "an index with a weight_map",
                "save the weights again",
            ) from error
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ReleaseError(
            "weights",
            f"{folder} without {', '.join(missing[:3])}",
            "every weight file",
            "copy or save the weights again",
        )
    return [folder / name for name in names]


def _read_tensors(source: Path) -> "dict[str, Tensor]":
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = {}
    for path in weight_paths(source):
        try:
            tensors.update(load_file(path))
        except SafetensorError as error:
            raise ReleaseError(
                "weights",
                f"{path} damaged ({error})",
                "whole safetensors files",
                "copy or save the weights again",
            ) from error
    return tensors


def _write_tensors(tensors: "dict[str, Tensor]", path: Path) -> None:
    from safetensors.torch import save_file

    # Views and tied tensors share storage, which the format refuses; transposed ones would be
    # stored in another order.
    clones = {name: tensor.clone().contiguous() for name, tensor in sorted(tensors.items())}
    save_file(clones, path, metadata={"format": "pt"})
    path.chmod(0o644)  # like its neighbours; the writer makes it private


def _read_card(source: Path) -> bytes:
    try:
        return (source / CARD).read_bytes()
    except OSError as error:
        raise ReleaseError(
            "card",
            f"no readable {source / CARD}",
            "a model card beside the weights",
            "write one: what the drafter is for, how it was trained, its acceptance, its limits",
        ) from error


def _read_licence() -> bytes:
    return resources.files("flashmap").joinpath(LICENCE).read_bytes()


def _require_earlier_build(out: Path) -> None:
    """Refuse to replace anything but an earlier build: what was written by hand is never lost."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    recorded: Any = None
    if out.is_dir() and (out / RECORD).is_file():
        try:
            recorded = json.loads((out / RECORD).read_text(encoding="utf-8"))["files"]
        except (ValueError, KeyError, TypeError):
            recorded = None
    found = folder_files(out) if out.is_dir() else {}
    own = recorded if isinstance(recorded, dict) else {}
    foreign = sorted(name for name, row in found.items() if own.get(name) != row)
    if recorded is None or foreign:
        what = (
            f"{len(foreign)} files that no build wrote ({', '.join(foreign[:3])})"
            if foreign
            else "something else"
        )
        raise ReleaseError(
            "out",
            f"{out} with {what}",
            "an empty or absent folder, or an earlier build",
            "name another --out, or move it away",
        )


def _replace(out: Path, scratch: Path) -> None:
    """Put ``scratch`` in the place of ``out``; at no moment are both gone."""
    old = scratch.with_name(scratch.name + ".old")
    if out.exists():
        out.rename(old)
    try:
        scratch.rename(out)
    except OSError:
        if old.exists():
            old.rename(out)
        raise
    shutil.rmtree(old, ignore_errors=True)
