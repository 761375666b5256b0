"""Tensors that speculators-format checkpoints carry beside the drafter's own: the target's, and the
tables of the tokens that may be drafted."""

import torch
from torch import Tensor

from flashmap.vocabulary import FILE

from .errors import ReleaseError

# The target's own tensors, and tables that become draft_vocab.safetensors.
TARGETS = ("embed_tokens.weight", "lm_head.weight")
TABLES = ("t2d", "d2t")


def table_size(tables: dict[str, Tensor]) -> int:
    """How many tokens the tables name."""
    return len(tables["d2t"]) if "d2t" in tables else int(tables["t2d"].sum())


def chosen_tokens(tables: dict[str, Tensor], vocab_size: int) -> Tensor:
    """Ids, int64 and rising, that the tables t2d (V, whether) and d2t (n, what to add to the index)
    name.

    Raises:
        ReleaseError: the tables contradict each other or the vocabulary.
    """
    wanted = tables["t2d"].nonzero()[:, 0] if "t2d" in tables else None
    if "d2t" not in tables:
        assert wanted is not None
        return wanted
    d2t = tables["d2t"].long()
    chosen = d2t + torch.arange(len(d2t))
    if wanted is not None and len(d2t) == len(wanted) and d2t.equal(wanted):
        return wanted  # the ids themselves, as some write them
    if wanted is not None and not chosen.equal(wanted):
        raise bad_tables("t2d and d2t that name different tokens")
    if not d2t.any():
        raise bad_tables("d2t all zero, which means the first ids whatever they are")
    if int(chosen.min()) < 0 or int(chosen.max()) >= vocab_size or not (chosen.diff() > 0).all():
        raise bad_tables("d2t whose tokens do not rise within the vocabulary")
    return chosen


def bad_tables(found: str) -> ReleaseError:
    """The error of tables in which this was found."""
    return ReleaseError(
        "draft-vocab",
        found,
        "t2d[v] whether v can be drafted, d2t[j] the offset of the j-th such id from j",
        f"take the tables of the training run, or remove them and put a {FILE} there",
    )
