"""Is a draft vocabulary's file a ranking of the target's tokens? A wrong one maps drafts to other
tokens, which costs all acceptance and no error.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashmap.checkpoint import CONFIG

from .errors import ReleaseError
from .weights import read_tensors

if TYPE_CHECKING:
    from torch import Tensor


def drafted_tokens(config: Mapping[str, Any], vocab_size: int) -> int:
    """How many tokens the drafter may say, as ``config`` states. Raises ReleaseError."""
    stated = config.get("draft_vocab_size")
    if stated is not None and (type(stated) is not int or not 0 <= stated <= vocab_size):
        raise ReleaseError(
            "draft-vocab",
            f"draft_vocab_size {stated!r}",
            f"a whole number up to {vocab_size}, or none for all tokens",
            "mend config.json of the source, and build again",
            [CONFIG],
        )
    return stated or vocab_size


def require_valid_ranking(path: Path, vocab_size: int) -> None:
    """Raise ReleaseError unless ``path`` holds ``ids``, every token id once in order of falling
    ``counts``, ties by id."""
    tensors = read_tensors(path)
    problems = list(_problems(tensors, vocab_size))
    if problems:
        raise ReleaseError(
            "draft-vocab",
            f"{path}: {'; '.join(problems[:3])}",
            f"ids: each of the {vocab_size} token ids once, by falling counts, ties by id",
            "make it with `flashmap release vocab`",
            [path.name],
        )


def _problems(tensors: "dict[str, Tensor]", vocab_size: int) -> Iterator[str]:
    import torch

    missing = [name for name in ("ids", "counts") if name not in tensors]
    if missing:
        yield f"no {' and no '.join(missing)}"
        return
    ids, counts = tensors["ids"], tensors["counts"]
    for name, tensor in (("ids", ids), ("counts", counts)):
        if tensor.dim() != 1 or tensor.is_floating_point() or tensor.dtype == torch.bool:
            yield f"{name} is {tensor.dtype} {tuple(tensor.shape)}"
            return
    if len(ids) != vocab_size or len(counts) != vocab_size:
        yield f"{len(ids)} ids and {len(counts)} counts"
        return
    ids, counts = ids.long(), counts.long()
    if not ids.sort().values.equal(torch.arange(vocab_size)):
        outside = int(((ids < 0) | (ids >= vocab_size)).sum())
        yield f"{outside} ids out of range, {vocab_size - len(ids.unique())} twice"
    if (counts < 0).any() or (counts.diff() > 0).any():
        yield "counts that are negative or rise"
    elif ((counts.diff() == 0) & (ids.diff() < 0)).any():
        yield "ids of one count that are not in order"
