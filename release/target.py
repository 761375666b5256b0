"""What a ranking needs to know of a target: its tokenizer and the ids that matter, no weights."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashmap.checkpoint import read_json
from flashmap.embedded import SMOLLM2
from flashmap.pair import load_tokenizer, vocabulary_hash
from flashmap.prompts import MARK
from flashmap.references import EMBEDDED

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATION = "generation_config.json"


@dataclass(frozen=True)
class Target:
    """A target's side of a draft vocabulary.

    Attributes:
        name, revision: as `named_target` has them.
        folder: where its tokenizer lies.
        tokenizer: in the form that the library `tokenizers` writes.
        template: its chat template (several have names), if it has one.
        specials: the special tokens that a template may ask for, by name.
        vocab_hash: sha256 of its vocabulary.
        vocab_size: rows of its embedding.
        required: ids that a drafter has to be able to say: end tokens, and what the chat template
            writes around messages.
    """

    name: str
    revision: str | None
    folder: Path
    tokenizer: str
    template: str | dict[str, str] | None
    specials: dict[str, str]
    vocab_hash: str
    vocab_size: int
    required: list[int]


def read_target(ref: str) -> Target:
    """Read what a REF says about a target. Raises ValueError if it cannot be used."""
    from transformers import AutoConfig

    tokenizer, folder = load_tokenizer(ref)
    if not tokenizer.is_fast:
        raise ValueError(
            f"{folder}: the tokenizer has no tokenizer.json, which counting needs; write one with"
            " AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False).get_text_config()
    highest = max(tokenizer.get_vocab().values())
    if highest >= config.vocab_size:
        raise ValueError(
            f"{folder}: the tokenizer has ids up to {highest}, the target's embedding"
            f" {config.vocab_size} rows (vocab_size in config.json); put the target's own tokenizer"
            " files there"
        )
    name, revision = named_target(ref)
    return Target(
        name,
        revision,
        folder,
        tokenizer.backend_tokenizer.to_str(),
        tokenizer.chat_template,
        {name: str(one) for name, one in tokenizer.special_tokens_map.items() if _is_one(one)},
        vocabulary_hash(tokenizer),
        config.vocab_size,
        _required(tokenizer, folder, config.eos_token_id),
    )


def named_target(ref: str) -> tuple[str, str | None]:
    """The name that a drafter or a ranking states for the target of a REF, and the revision that
    the REF names."""
    if ref == EMBEDDED:
        return SMOLLM2.model, SMOLLM2.revision
    local = Path(ref).expanduser()
    name, _, revision = (local.resolve().name, "", "") if local.is_dir() else ref.partition("@")
    return name, revision or None


def _is_one(token: Any) -> bool:
    return not isinstance(token, list | tuple)


def _required(tokenizer: "PreTrainedTokenizerBase", folder: Path, eos: Any) -> list[int]:
    generation = read_json(folder / GENERATION) if (folder / GENERATION).is_file() else {}
    ids = {tokenizer.eos_token_id}
    for stops in (eos, generation.get("eos_token_id")):
        ids.update(stops if isinstance(stops, list) else [stops])
    if tokenizer.chat_template:
        turns = [{"role": role, "content": MARK} for role in ("user", "assistant", "user")]
        text: Any = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        for part in text.split(MARK):
            ids.update(tokenizer(part, add_special_tokens=False)["input_ids"])
    return sorted(id_ for id_ in ids if id_ is not None)
