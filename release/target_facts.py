"""What a drafter's config.json states of its target, read from the target's own files, without its
weights."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashmap.pair import load_tokenizer, vocabulary_hash
from flashmap.references import EMBEDDED, HUB_ID

from .errors import ReleaseError
from .target import named_target

# A drafter with another value of these was trained for another target.
DECIDED = ("num_target_layers", "target_hidden_size", "target_vocab_hash")
REVISION = "target_revision"


@dataclass(frozen=True)
class TargetFacts:
    """What a REF says about a target.

    Attributes:
        ref: the REF.
        name: see `named_target`.
        fields: by their names in config.json; without what `unread` kept from being read.
        unread: why the target could not be looked at; empty if it was.
    """

    ref: str
    name: str
    fields: dict[str, Any]
    unread: str

    @property
    def is_folder(self) -> bool:
        """Whether the REF is a folder, whose name need not be the model's."""
        return self.ref != EMBEDDED and Path(self.ref).expanduser().is_dir()


def read_facts(ref: str) -> TargetFacts:
    """Look at the target of a REF.

    A name that cannot be looked up just now, for want of a network say, is no error. Raises
    ValueError for a path without a folder, and a folder that holds no target.
    """
    from transformers import AutoConfig

    unread = ""
    try:
        tokenizer, folder = load_tokenizer(ref)
    except ValueError as error:
        if not HUB_ID.fullmatch(ref.partition("@")[0]) or Path(ref).exists():
            raise
        unread = str(error)
    name, revision = named_target(ref)
    stated = {REVISION: revision} if revision else {}
    if unread:
        return TargetFacts(ref, name, stated, unread)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False).get_text_config()
    fields = {
        "num_target_layers": config.num_hidden_layers,
        "target_hidden_size": config.hidden_size,
        "target_vocab_hash": vocabulary_hash(tokenizer),
        "vocab_size": config.vocab_size,
        **stated,
    }
    if folder.parent.name == "snapshots":  # of the Hub's cache, named by the commit
        fields[REVISION] = folder.name
    return TargetFacts(ref, name, fields, "")


def require_same_target(fields: dict[str, Any], facts: TargetFacts) -> None:
    """Raise ReleaseError if a drafter of these `fields` was made for another target."""
    both = fields.keys() & facts.fields.keys()
    other = [name for name in DECIDED if name in both and fields[name] != facts.fields[name]]
    if "vocab_size" in both and fields["vocab_size"] > facts.fields["vocab_size"]:  # may be padded
        other.append("vocab_size")
    if other:
        raise ReleaseError(
            "target-match",
            ", ".join(f"{name} {fields[name]!r}" for name in other),
            f"{', '.join(repr(facts.fields[name]) for name in other)}, as {facts.ref} has it",
            "name the target that the drafter was trained for",
        )
