"""Which tokens a drafter should be able to say: the target's tokens ranked by how often they come.

`draft_vocab.safetensors` holds the whole ranking, so that whoever serves a drafter chooses how much
of the vocabulary it drafts from. It should be counted on text of the target.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

FILE = "draft_vocab.safetensors"


def rank_tokens(counts: Tensor) -> Tensor:
    """Token ids from the most to the least frequent, int64 (V); ties by id, for `counts` (V)."""
    return torch.argsort(counts, descending=True, stable=True)


def write_draft_vocab(path: Path, counts: Tensor, about: dict[str, str]) -> None:
    """Write the ranking of `counts` (V): `ids` and the `counts` in that order, both int64; `about`
    says whose tokens were counted on what."""
    ids = rank_tokens(counts)
    tensors = {"ids": ids, "counts": counts.to(torch.int64)[ids]}
    save_file(tensors, path, metadata={"format": "pt", **about})
    path.chmod(0o644)  # the writer makes it private
