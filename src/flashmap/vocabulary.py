"""Which tokens a drafter should be able to say: the target's tokens ranked by how often they come.

`draft_vocab.safetensors` holds the whole ranking, so that whoever serves a drafter chooses how much
of the vocabulary it drafts from. It should be counted on text of the target.
"""

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from .files import write_whole

FILE = "draft_vocab.safetensors"
# Engines that keep a table instead of the ids: d2t[j] is what to add to j, not the token itself.
CONVENTION = {"d2t": "offset: d2t[j] = S[j] - j for S = sorted(ids[:draft_vocab_size])"}


def read_draft_vocab(path: Path | str) -> Tensor:
    """Token ids of a file that `write_draft_vocab` wrote, from the most frequent on, int64 (V)."""
    return load_file(path)["ids"].long()


def rank_tokens(counts: Tensor) -> Tensor:
    """Token ids from the most to the least frequent, int64 (V); ties by id, for `counts` (V)."""
    return torch.argsort(counts, descending=True, stable=True)


def write_draft_vocab(
    path: Path, counts: Tensor, about: dict[str, str], required: Iterable[int] = ()
) -> None:
    """Write the ranking of `counts` (V): `ids` and the `counts` in that order, both int64.

    The `required` ids rank with the most frequent token whatever their own count, which then stands
    in the metadata. `about` says whose tokens were counted on what. The same arguments give the
    same bytes, and the file is there whole or not at all. Raises ValueError if it cannot be
    written.
    """
    counts, raised = raise_counts(counts, required)
    ids = rank_tokens(counts)
    tensors = {"ids": ids, "counts": counts[ids]}
    metadata = {"format": "pt", **CONVENTION, **about}
    if raised:
        metadata["raised"] = json.dumps(raised)
    write_whole(path, _with_sorted_header(save(tensors, metadata=metadata)))


def raise_counts(counts: Tensor, required: Iterable[int]) -> tuple[Tensor, dict[int, int]]:
    """`counts` as int64 with those of `required` ids at the largest, and what these were before."""
    counts = counts.to(torch.int64, copy=True)
    raised = {index: int(counts[index]) for index in sorted(required)}
    counts[list(raised)] = counts.max()
    return counts, raised


def _with_sorted_header(content: bytes) -> bytes:
    """The same safetensors file with its metadata in order; the writer's own order is random."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    text = json.dumps(header, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(-(-len(text) // 8) * 8)  # tensors start at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text + content[8 + length :]
