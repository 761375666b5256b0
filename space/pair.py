"""The drafter and the target that the page shows: which two, and loading them once.

A Space on the Hub needs nothing but transformers: a FlashMap release brings its own code. Where the
flashmap package is installed, it loads the pair, checks more, and knows the embedded pair.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

# The two variables. Both, or neither.
DRAFT, TARGET = "FLASHMAP_DRAFT", "FLASHMAP_TARGET"
# Written beside the application by `flashmap release space`: the commits that it was pushed for.
PINS = Path(__file__).with_name("pins.json")


class Names(NamedTuple):
    """A pair by name: local folders, Hub ids with an optional ``@revision``, or `EMBEDDED`'s."""

    draft: str
    target: str


EMBEDDED = Names("smollm2-135m", "smollm2-135m")
HUB = Names("j-shen/FlashMap-Qwen3-8B", "Qwen/Qwen3-8B")


@dataclass
class Pair:
    """A loaded pair.

    Attributes:
        names: what was loaded.
        target: the causal language model.
        draft: its drafter, on the same device in the same dtype.
        tokenizer: the target's.
        is_warm: whether both have run in this process; see `race.warm_up`.
    """

    names: Names
    target: Any
    draft: Any
    tokenizer: Any
    is_warm: bool = False

    @property
    def dtype(self) -> str:
        """The dtype of both, as in "bfloat16"."""
        return str(self.target.dtype).removeprefix("torch.")

    @property
    def block_size(self) -> int:
        """Drafts a round."""
        return int(self.draft.config.block_size)

    @property
    def jumps(self) -> int:
        """The most jumps a draft that the drafter has a grid for."""
        return max(map(int, self.draft.config.jump_grids))


def choose(environment: Mapping[str, str], pins: Path = PINS) -> Names:
    """The pair that the two variables name; else the pinned one; else the default of this machine.

    Raises:
        ValueError: only one of the variables is set.
    """
    draft, target = environment.get(DRAFT, "").strip(), environment.get(TARGET, "").strip()
    if draft and target:
        return Names(draft, target)
    if draft or target:
        alone, other = (DRAFT, TARGET) if draft else (TARGET, DRAFT)
        raise ValueError(f"{alone} is set and {other} is not: set both, since a drafter fits one"
                         " target, or neither.")  # fmt: skip
    if pins.is_file():
        commits = json.loads(pins.read_text(encoding="utf-8"))
        at = {role: f"{pin['repo_id']}@{pin['revision']}" for role, pin in commits.items()}
        return Names(at["draft"], at["target"])
    return HUB if torch.cuda.is_available() else EMBEDDED


def load(names: Names) -> Pair:
    """Load a pair, on the GPU if there is one.

    Raises:
        ValueError: it cannot be loaded, or the drafter's code is not of this project.
    """
    try:
        from flashmap import load_pair
    except ImportError:
        target, draft, tokenizer = _load_released(names)
    else:
        target, draft, tokenizer = load_pair(names.target, names.draft)
    return Pair(names, target, draft, tokenizer)


def _load_released(names: Names) -> tuple[Any, Any, Any]:
    """The pair by transformers alone, with the code that the drafter's release carries."""
    from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype: Any = torch.bfloat16 if device == "cuda" else "auto"
    name, _, revision = names.target.partition("@")
    at: dict[str, Any] = {"revision": revision or None}
    tokenizer: Any = AutoTokenizer.from_pretrained(name, **at)
    target: Any = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **at)
    name, _, revision = names.draft.partition("@")
    draft: Any = AutoModel.from_pretrained(
        name, revision=revision or None, dtype=target.dtype, trust_remote_code=True
    )
    if not hasattr(draft, "stream_generate"):
        raise ValueError(
            f"{names.draft} carries code that cannot stream: name a folder or repository made by"
            " `flashmap release build`, or install the flashmap package beside this page."
        )
    return target.to(device).eval(), draft.to(device).eval(), tokenizer
