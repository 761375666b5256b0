"""Converts a FlashMap checkpoint of another form into a source folder for `flashmap release build`.

Takes checkpoints with the configuration of the speculators library, or ours, and weights in
safetensors or torch's own files. Nothing in them is executed. What is known is translated, what is
missing is taken from the tensors' shapes where those decide it, and from the target if that is
given; what has no place is named.
"""

import shutil
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashmap.checkpoint import CONFIG, read_json
from flashmap.modeling.configuration_flashmap import FlashMapConfig
from flashmap.schedule import jump_grids
from flashmap.vocabulary import FILE, write_draft_vocab

from .card import read_card, with_licence
from .contents import CARD, read_file, write_json
from .draft_vocab import drafted_tokens
from .errors import ReleaseError
from .foreign import KEPT, own_fields, translate
from .place import publish, workplace
from .state_dict import read_state_dict
from .tables import TABLES, TARGETS, bad_tables, chosen_tokens, table_size
from .target_facts import REVISION, TargetFacts, read_facts, require_same_target
from .weights import SHARD_SIZE, require_finite, require_tensors, write_weights

ANCHOR = "fc.weight"  # by which the drafter is found among other modules
STATED = ("target_model", "vocab_size", "block_size", "target_layer_ids")
OF_TARGET = {"target_model", "vocab_size"}
OWED = ("num_target_layers", REVISION, "target_vocab_hash")
FEWEST_GRIDS = 4


@dataclass(frozen=True)
class Conversion:
    """What a conversion did.

    Attributes:
        folder: what was written, for `flashmap release build`.
        files: their names.
        target_model: the target it is recorded for.
        unread: why the target given could not be looked at; empty if it was, or none was given.
        unfilled: what a release states of its target, and neither source nor target told.
        derived: fields that the source did not state.
        dropped: the target's tensors, which a drafter does not carry.
        unplaced: fields and values of the source that have no place here, by name.
    """

    folder: Path
    files: list[str]
    target_model: str
    unread: str
    unfilled: list[str]
    derived: list[str]
    dropped: list[str]
    unplaced: list[str]


def convert_checkpoint(
    source: Path,
    out: Path,
    *,
    target: str | None = None,
    revision: str | None = None,
    licence: str | None = None,
) -> Conversion:
    """Convert the checkpoint `source`, a folder or a torch file beside its config.json, into the
    folder `out`.

    `target` is a REF of the model that it drafts for: what the source does not say of it is read
    there. `revision` of the target and `licence` of the drafter are for a source without them.

    Raises ReleaseError for a checkpoint that is not whole, is of another model or holds what has no
    place in the drafter, for options that contradict it, and if `out` is not empty; else as
    `read_facts` and `workplace`.
    """
    folder = source.parent if source.is_file() else source
    out = out.resolve()
    _require_empty(out)
    stated, unplaced = translate(read_json(folder / CONFIG))
    facts = read_facts(target) if target is not None else None
    _name_target(stated, facts, revision)
    found, others = read_state_dict(source)
    tensors, outside = _own_tensors(found)
    tables = {name: tensors.pop(name) for name in TABLES if name in tensors}
    dropped = [name for name in TARGETS if tensors.pop(name, None) is not None]
    fields = _sizes(tensors) | stated
    if facts is not None:
        require_same_target(fields, facts)
        fields = facts.fields | fields
    _require_stated(fields, folder)
    if "jump_grids" not in fields:
        steps = fields.get("num_steps", FEWEST_GRIDS)
        steps = FEWEST_GRIDS if steps in range(1, FEWEST_GRIDS) else steps
        fields["jump_grids"] = jump_grids(fields["vocab_size"], steps, "compat")
    config = FlashMapConfig(**fields)
    _require_known(config, tensors)
    require_tensors(config, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    require_finite(tensors.items())
    members = _members(tables, fields, folder)
    card = _card(
        folder, f"# {out.name}\n\nA FlashMap drafter for {config.target_model}.\n", licence
    )
    values = {name: getattr(config, name) for name in own_fields()}
    values |= {name: fields[name] for name in KEPT if name in fields} | {"model_type": "flashmap"}
    files = _write(out, values, tensors, members, folder, card)
    unread = facts.unread if facts else ""
    unfilled = [name for name in OWED if name not in fields]
    derived = sorted(fields.keys() - stated.keys())
    unplaced = sorted([*unplaced, *others, *outside])
    return Conversion(out, files, config.target_model, unread, unfilled, derived, dropped, unplaced)


def _require_empty(out: Path) -> None:
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ReleaseError(
            "out", f"{out} with something in it", "an empty or absent folder", "name another --out"
        )


def _name_target(stated: dict[str, Any], facts: TargetFacts | None, revision: str | None) -> None:
    """Put the target's name and the revision asked for among what the source states."""
    if facts is not None and not (facts.is_folder and "target_model" in stated):
        stated["target_model"] = facts.name
    if revision is not None:
        found = stated.setdefault(REVISION, revision)
        if found != revision:
            raise ReleaseError(
                "target",
                f"--revision {revision}, and {REVISION} {found!r} in {CONFIG}",
                "the one that the drafter was trained for",
                "leave out --revision, or mend the checkpoint's",
            )


def _own_tensors(found: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """The drafter's tensors without what wraps their names, and the names of other modules'."""
    named = {name.replace("_orig_mod.", ""): tensor for name, tensor in found.items()}
    prefixes = [
        name.removesuffix(ANCHOR) for name in named if name == ANCHOR or name.endswith("." + ANCHOR)
    ]
    prefix = min(prefixes, key=len, default="")
    own = {
        name.removeprefix(prefix): tensor
        for name, tensor in named.items()
        if name.startswith(prefix) or name in (*TABLES, *TARGETS)
    }
    outside = [name for name in named if name.removeprefix(prefix) not in own]
    return own, outside


def _sizes(tensors: dict[str, Tensor]) -> dict[str, int]:
    """Sizes of the drafter that its tensors' shapes decide."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    sizes = {}
    for name, tensor, axis in (
        ("hidden_size", "x_embed.weight", 0),
        ("target_hidden_size", "x_embed.weight", 1),
        ("cond_dim", "time_embed.linear_1.weight", 0),
        ("time_embed_dim", "time_embed.linear_1.weight", 1),
        ("intermediate_size", "layers.0.mlp.fc1.weight", 0),
    ):
        if len(shapes.get(tensor, ())) > axis:
            sizes[name] = shapes[tensor][axis]
    layers = {name.split(".")[1] for name in shapes if name.startswith("layers.")}
    if layers:
        sizes["num_hidden_layers"] = len(layers)
    head = shapes.get("layers.0.self_attn.q_norm.weight", (0,))[0]
    if head and sizes.get("hidden_size", 0) % head == 0:
        sizes["num_attention_heads"] = sizes["hidden_size"] // head
    return sizes


def _require_stated(fields: dict[str, Any], folder: Path) -> None:
    missing = [name for name in STATED if name not in fields]
    if missing:
        fix = "give --target" if set(missing) <= OF_TARGET else "add what is missing"
        raise ReleaseError(
            "config",
            f"{folder / CONFIG} without {', '.join(missing)}",
            "what cannot be taken from the weights",
            f"{fix}; it is a fact of the training run",
        )


def _require_known(config: FlashMapConfig, tensors: dict[str, Tensor]) -> None:
    """Name every tensor that has no place in the drafter: without it, it would be another model."""
    from flashmap.modeling.modeling_flashmap import FlashMapDraftModel

    with torch.device("meta"):
        known = FlashMapDraftModel(config).state_dict().keys()
    problems = sorted(tensors.keys() - known)
    problems += [name for name, one in tensors.items() if not one.is_floating_point()]
    if problems:
        raise ReleaseError(
            "weights",
            f"{len(problems)} tensors that this drafter has no place for: {', '.join(problems)}",
            "a FlashMap drafter's floating-point tensors",
            "the checkpoint is of another model, or quantised: convert the one it was made from",
        )


def _members(tables: dict[str, Tensor], fields: dict[str, Any], folder: Path) -> Tensor | None:
    """Which tokens the drafter can say, bool (V); None for all of them or a ranking of its own."""
    vocab_size = fields["vocab_size"]
    size = drafted_tokens(fields, vocab_size)
    if tables and not fields.get("draft_vocab_size"):
        size = table_size(tables)
    if size == vocab_size or (folder / FILE).is_file():
        return None
    if not tables:
        raise ReleaseError(
            "draft-vocab",
            f"draft_vocab_size {size} and no table of the tokens that it means",
            f"t2d or d2t among the weights, or {FILE} beside them",
            f"rank them: flashmap release vocab --target {fields['target_model']} --corpus PATH"
            f" --out {folder / FILE}",
        )
    chosen = chosen_tokens(tables, vocab_size)
    members = torch.zeros(vocab_size, dtype=torch.bool)
    members[chosen] = True
    if int(members.sum()) != size:
        raise bad_tables(f"{int(members.sum())} tokens, draft_vocab_size {size}")
    fields["draft_vocab_size"] = size
    return members


def _write(
    out: Path,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    members: Tensor | None,
    source: Path,
    card: bytes,
) -> list[str]:
    """Write the folder, whole or not at all; returns the names of its files."""
    with workplace(out) as scratch:
        (scratch / CONFIG).write_bytes(write_json(config))
        write_weights(_of_one_dtype(tensors), scratch, SHARD_SIZE)
        if (source / FILE).is_file():
            shutil.copyfile(source / FILE, scratch / FILE)
        elif members is not None:
            about = {"target_model": config["target_model"], "counts": "1: drafted, 0: not"}
            write_draft_vocab(scratch / FILE, members.long(), about)
        (scratch / CARD).write_bytes(card)
        publish(scratch, out)
    return sorted(path.name for path in out.iterdir())


def _of_one_dtype(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors in the one dtype that holds every value exactly."""
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors.values()))
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def _card(source: Path, new: str, licence: str | None) -> bytes:
    """The source's card, or a `new` one, with the licence."""
    content = read_file(source, CARD) if (source / CARD).exists() else new.encode()
    return content if licence is None else with_licence(read_card(content), licence).encode()
