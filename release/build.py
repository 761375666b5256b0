"""Builds a release folder: weights, explicit configuration, card, licence and the remote code,
complete and repeatable.

The folder is written under a temporary name and renamed when whole; an empty folder that is there
already is kept and filled. The same source gives the same bytes, so a second build changes nothing;
a folder that holds anything but an earlier build is never replaced.
"""

import inspect
import json
import re
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashmap import __version__, modeling
from flashmap.checkpoint import CONFIG, WEIGHTS

from .contents import (
    CARD,
    GENERATE,
    LICENCE,
    RECORD,
    REQUIREMENTS,
    folder_files,
    read_config,
    read_record,
    read_tensors,
    require_finite,
    require_tensors,
    weight_paths,
)
from .errors import ReleaseError
from .remote_code import AUTO_MAP, code_digest, read_closure, stamped

if TYPE_CHECKING:
    from torch import Tensor

# Facts about the target that only the drafter's source knows; passed on where it states them.
PASSED_ON = (
    "max_position_embeddings",
    "num_target_layers",
    "target_revision",
    "target_vocab_hash",
    "mask_token_id",
    "flow_map",
)


REPO_LINE = re.compile(r'^REPO_ID, TAG = "", ""$', re.MULTILINE)


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
    ReleaseError if the source is incomplete or holds NaN, or if ``out`` holds files that no build
    wrote.
    """
    code = stamped(read_closure(Path(next(iter(modeling.__path__)))))
    tensors = {
        name: tensor for path in weight_paths(source) for name, tensor in read_tensors(path).items()
    }
    digest = code_digest(code)
    config = _release_config(source, tensors, digest)
    texts = {
        **code,
        **custom_generate(repo_id, tag),
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
            (scratch / name).parent.mkdir(exist_ok=True)
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
    sizes = {
        path.relative_to(out).as_posix(): path.stat().st_size
        for path in sorted(out.rglob("*"))
        if path.is_file()
    }
    return Build(out, changed, sizes, digest)


def custom_generate(repo_id: str | None, tag: str | None) -> dict[str, bytes]:
    """What ``target.generate(custom_generate=REPO)`` runs, told where its drafter is and under
    which tag, by path."""
    source = Path(__file__).with_name("custom_generate.py").read_text(encoding="utf-8")
    text, count = REPO_LINE.subn(
        lambda _: f"REPO_ID, TAG = {json.dumps(repo_id or '')}, {json.dumps(tag or '')}", source
    )
    assert count == 1, "custom_generate.py has one line for the build to write"
    return {GENERATE: text.encode(), REQUIREMENTS: b"torch>=2.9\ntransformers>=4.57\n"}


def _json_bytes(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


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
    require_tensors(config, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    require_finite(tensors.items())
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
    own: dict[str, Any] = {}
    found: dict[str, Any] = {}
    if out.is_dir():
        found = folder_files(out)
        with suppress(ReleaseError):
            own = read_record(out)
    changed = sorted(name for name in found.keys() & own.keys() if own[name] != found[name])
    foreign = sorted(found.keys() - own.keys())
    if own and not changed and not foreign:
        return
    what = []
    if changed:
        what.append(f"{len(changed)} files changed since the build ({', '.join(changed[:3])})")
    if foreign:
        what.append(f"{len(foreign)} files that no build wrote ({', '.join(foreign[:3])})")
    raise ReleaseError(
        "out",
        f"{out} with {' and '.join(what) or 'something that no build wrote'}",
        "an empty or absent folder, or an earlier build",
        "name another --out, or move it away",
    )


def _fill(out: Path, scratch: Path) -> None:
    """Move the files of ``scratch`` into the empty folder ``out``, which may be somebody's working
    folder or a mount point. The record comes last; a failure leaves ``out`` empty again."""
    names = sorted(
        (path.name for path in scratch.iterdir()), key=lambda name: (name == RECORD, name)
    )
    try:
        for name in names:
            shutil.move(scratch / name, out / name)
    except OSError:
        for name in names:
            if (out / name).is_dir():
                shutil.rmtree(out / name)
            (out / name).unlink(missing_ok=True)
        raise


def _replace(out: Path, scratch: Path) -> None:
    """Put ``scratch`` in the place of ``out``; at no moment are both gone."""
    if out.is_dir() and not any(out.iterdir()):
        _fill(out, scratch)
        return
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
