"""How many positions a target has for a text, and how many entries for its cache."""

from collections.abc import Iterator, Sequence

from torch import Tensor, nn
from transformers import PreTrainedModel

from .runner_flashmap import MOST_HOLES
from .target_flashmap import mask_tables, text_config


def position_limit(target: PreTrainedModel, prompt_length: int) -> int | None:
    """Number of positions that decoding from a prompt may use; None where there is no such end.

    It ends where a learned position table ends, and where a rotary embedding changes its
    frequencies with the length of the sequence: those of a pass follow from its last token, so a
    pass over drafts beyond that point would judge the tokens before it differently.
    """
    config = text_config(target)
    limit: int | None = getattr(config, "max_position_embeddings", None)
    if limit is None:
        return None
    # Some models keep a few rows of offset in the table (OPT has 2).
    if any(0 <= size - limit <= 2 for size in _table_sizes(target)):
        return limit
    scaling = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    scaling = scaling if isinstance(scaling, dict) else {}
    kind = scaling.get("rope_type") or scaling.get("type")
    name = "original_max_position_embeddings"
    original = int(scaling.get(name) or getattr(config, name, None) or limit)
    if kind == "dynamic":
        return original
    return original if kind == "longrope" and prompt_length <= original else None


def common_limit(target: PreTrainedModel, prompt_lengths: Sequence[int]) -> int | None:
    """`position_limit` of a batch.

    Raises:
        ValueError: the prompts lie on both sides of the length at which the target's rotary
            embedding changes.
    """
    limits = {position_limit(target, length) for length in prompt_lengths}
    if len(limits) > 1:
        raise ValueError(
            f"Prompts of {min(prompt_lengths)} to {max(prompt_lengths)} tokens lie on both sides of"
            " the length at which this target's rotary embedding changes: pass them in batches of"
            " their own."
        )
    return limits.pop()


def entry_limit(target: PreTrainedModel) -> int | None:
    """Number of entries that the target's cache may hold; None where there is no such end."""
    return min((table.shape[-1] for table in mask_tables(target)), default=None)


def most_entries(num_tokens: int, block_size: int) -> int:
    """Entries that a batch's cache may come to hold for texts of so many tokens: holes, and a pass
    over a block, come on top."""
    return num_tokens + MOST_HOLES + block_size + 1


def _table_sizes(target: PreTrainedModel) -> Iterator[int]:
    """Rows of the target's embeddings, but for that of its tokens, and of tables of sines."""
    token_table = target.get_input_embeddings()
    for module in target.modules():
        if isinstance(module, nn.Embedding) and module is not token_table:
            yield module.num_embeddings
        table = getattr(module, "embed_positions", None)
        if isinstance(table, Tensor):
            yield table.shape[0]
