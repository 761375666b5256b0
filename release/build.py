"""Builds a release folder: weights, explicit configuration, remote code, card, licence, golden
outputs and measurements, complete and repeatable.

The same source gives the same bytes, so a second build changes nothing; a folder that holds
anything but an earlier build is never replaced (see `place`).
"""

import inspect
import platform
from dataclasses import dataclass
from importlib import metadata, resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashmap import __version__, modeling
from flashmap.checkpoint import CONFIG
from flashmap.machine import checkout_commit
from flashmap.vocabulary import FILE as DRAFT_VOCAB

from . import golden
from .card import Facts, render_card
from .contents import (
    CARD,
    EVAL,
    GOLDEN,
    LICENCE,
    PICTURE,
    RECIPE,
    RECORD,
    folder_files,
    read_config,
    read_file,
    read_json,
    write_json,
)
from .draft_vocab import drafted_tokens
from .errors import ReleaseError
from .grid_modes import grid_mode
from .measurements import Measurement, read_measurements
from .names import require_repo_id, require_tag
from .picture import require_current_picture
from .place import publish, workplace
from .remote_code import AUTO_MAP, code_digest, custom_generate, read_closure, stamped
from .weights import (
    SHARD_SIZE,
    read_tensors,
    require_finite,
    require_one_dtype,
    require_tensors,
    weight_paths,
    write_weights,
)

if TYPE_CHECKING:
    from torch import Tensor

    from flashmap.modeling.configuration_flashmap import FlashMapConfig

# Facts that only the drafter's source knows; passed on where it states them.
PASSED_ON = (
    "num_target_layers",
    "target_revision",
    "target_vocab_hash",
    "mask_token_id",
    "flow_map",
    "draft_vocab_size",
    "max_position_embeddings",
)
DEFAULT_POSITIONS = 131072  # what engines assume where the configuration does not say


@dataclass(frozen=True)
class Build:
    """What a build did.

    Attributes:
        folder: the release folder.
        changed: whether anything there is different from before.
        files: size in bytes of every file by path.
        digest: sha256 of the remote code.
    """

    folder: Path
    changed: bool
    files: dict[str, int]
    digest: str


def build_release(
    source: Path,
    out: Path,
    *,
    tag: str | None = None,
    repo_id: str | None = None,
    max_shard_size: str | int = SHARD_SIZE,
) -> Build:
    """Build the release folder ``out`` from ``source``: config.json, weights, and what else lies
    beside them (README.md, recipe.toml, draft_vocab.safetensors, eval/*.json and their prompts).

    ``tag`` and ``repo_id`` say where the release is going: they stand in the card, in release.json
    and in custom_generate/generate.py. Weights above ``max_shard_size`` are split. Raises
    ReleaseError if the source is incomplete or holds NaN, if no repository can have the id or the
    tag, or if ``out`` holds files that no build wrote, and as `workplace`.
    """
    _require_sound(source, tag, repo_id)
    closure = read_closure(Path(next(iter(modeling.__path__))))
    code = stamped({**closure, **custom_generate(repo_id, tag)})
    tensors = {
        name: tensor for path in weight_paths(source) for name, tensor in read_tensors(path).items()
    }
    config = read_config(source)
    require_tensors(config, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    written = _release_config(source, config, tensors, code_digest(code))
    require_finite(tensors.items())
    measurements = read_measurements(source)
    contents = {
        **code,
        **_source_files(source, measurements),
        CONFIG: write_json(written),
        GOLDEN: write_json(_golden_outputs(config, tensors)),
        LICENCE: resources.files("flashmap").joinpath(LICENCE).read_bytes(),
    }
    out = out.resolve()  # so that a symlink given as OUT is followed rather than replaced
    with workplace(out) as scratch:
        for name, content in contents.items():
            (scratch / name).parent.mkdir(exist_ok=True)
            (scratch / name).write_bytes(content)
        write_weights(tensors, scratch, max_shard_size)
        record = _record(written, repo_id, tag)
        facts = Facts.of(scratch, record)
        (scratch / CARD).write_bytes(render_card(_own_card(source), facts))
        files = folder_files(scratch)
        (scratch / RECORD).write_bytes(write_json({**record, "files": files}))
        changed = publish(scratch, out)
    sizes = {name: row["size"] for name, row in folder_files(out, record=True).items()}
    return Build(out, changed, sizes, written["code_digest"])


def _require_sound(source: Path, tag: str | None, repo_id: str | None) -> None:
    if tag is not None:
        require_tag(tag)
    if repo_id is not None:
        require_repo_id(repo_id)
    if not source.is_dir():
        raise ReleaseError(
            "source", f"no folder {source}", "a drafter's folder", "name a models/ entry or a path"
        )


def _release_config(
    source: Path, config: "FlashMapConfig", tensors: "dict[str, Tensor]", digest: str
) -> dict[str, Any]:
    """Every field written out, so that no reader's defaults matter, and what engines look for."""
    raw = read_json(source, CONFIG, "config")
    fields = [
        name
        for name in inspect.signature(type(config).__init__).parameters
        if name not in ("self", "kwargs")
    ]
    dtype = require_one_dtype(
        (str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()), source
    )
    return {
        **{name: getattr(config, name) for name in fields},
        "mask_token_id": 0,  # read by engines that pad a block; this drafter never embeds its slots
        "max_position_embeddings": DEFAULT_POSITIONS,
        **{name: raw[name] for name in PASSED_ON if name in raw},
        "draft_vocab_size": drafted_tokens(raw, config.vocab_size),
        "architectures": ["FlashMapDraftModel"],
        "auto_map": AUTO_MAP,
        "model_type": "flashmap",
        "speculators_model_type": "flashmap",
        "tie_word_embeddings": False,
        "dtype": dtype,
        "torch_dtype": dtype,  # the same for transformers 4.57
        # An engine's reader sizes its cache by these and refuses a drafter without the markov keys.
        "num_key_value_heads": config.num_attention_heads,
        "head_dim": config.hidden_size // config.num_attention_heads,
        "markov_rank": 1,
        "markov_head_type": "vanilla",
        "flashmap_version": __version__,
        "code_digest": digest,
    }


def _source_files(source: Path, measurements: list[Measurement]) -> dict[str, bytes]:
    """What the source states beside weights and configuration, shipped as it is."""
    found = {measured.name: measured.content for measured in measurements}
    for measured in measurements:
        prompts = measured.prompts_file(source)
        if prompts is not None:
            found[f"{EVAL}/{prompts.name}"] = prompts.read_bytes()
    for name in (RECIPE, DRAFT_VOCAB, PICTURE):
        if (source / name).exists():
            found[name] = read_file(source, name)
    require_current_picture(found.get(PICTURE), measurements)
    return found


def _own_card(source: Path) -> bytes | None:
    return read_file(source, CARD) if (source / CARD).exists() else None


def _golden_outputs(config: "FlashMapConfig", tensors: "dict[str, Tensor]") -> dict[str, Any]:
    from flashmap.modeling.modeling_flashmap import FlashMapDraftModel

    model = FlashMapDraftModel(config)
    model.load_state_dict(tensors)
    return {
        "inputs": "by the rule in flashmap's release/golden.py",
        "dtype": "float32",
        "tolerance": golden.TOLERANCE,
        "versions": _versions(),
        "logits": golden.golden_logits(model),
    }


def _versions() -> dict[str, str]:
    names = ("torch", "transformers", "safetensors", "huggingface-hub")
    return {
        "flashmap": __version__,
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in names},
    }


def _record(config: dict[str, Any], repo_id: str | None, tag: str | None) -> dict[str, Any]:
    """What release.json says beside the files' digests."""
    return {
        "versions": _versions(),
        "commit": checkout_commit(),
        "code_digest": config["code_digest"],
        "grid_mode": grid_mode(config["jump_grids"], config["vocab_size"]),
        "target_model": config["target_model"],
        "target_revision": config.get("target_revision"),
        "target_vocab_hash": config.get("target_vocab_hash"),
        "repo_id": repo_id,
        "tag": tag,
    }
