"""The target's cache in one place for good: what a pass that is captured in a CUDA graph reads and
writes.

transformers' own static cache writes every sequence of a batch at the same place. Here each is
written where it ends, so that sequences that accept different numbers stay side by side without
holes. A rejected token's entry lies where the next pass writes, and is seen by nothing before.

Legend: B sequences, m tokens of a pass, T room for entries, d head width.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import AttentionInterface, Cache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from .select_flashmap import select_ops

_ATTENTION = "flashmap_static"
# What some attentions are handed besides, and this one does not compute.
_UNKNOWN = ("softcap", "s_aux", "sliding_window", "position_bias")


class StaticLayer(DynamicLayer):
    """Keys and values (B, heads, T, d) of one layer, written in place.

    Args:
        keys, values: the tensors.
        places: where the next pass writes, int64 (B, m); change it in place.
    """

    def __init__(self, keys: Tensor, values: Tensor, places: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keys, self.values, self.places = keys, values, places
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the pass's keys and values (B, heads, m, d) and return all there is room for."""
        assert self.keys is not None and self.values is not None
        for whole, new in ((self.keys, key_states), (self.values, value_states)):
            whole.scatter_(2, self.places[:, None, :, None].expand_as(new), new)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """0: positions and what is seen are passed to the target, which need not know."""
        return 0


def static_cache(entries: Sequence[tuple[Tensor, Tensor]], places: Tensor) -> Cache:
    """A cache of transformers over keys and values (B, heads, T, d), a pair a layer."""
    return Cache(layers=[StaticLayer(keys, values, places) for keys, values in entries])


@contextmanager
def static_attention(target: PreTrainedModel) -> Iterator[None]:
    """Lets the target's layers attend to a `static_cache`; its mask is then how many entries each
    sequence holds before the pass, int64 (B, 1, 1, 1), which transformers hands on as it is."""
    AttentionInterface.register(_ATTENTION, attend_static)
    configs: dict[int, Any] = {}
    for module in target.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PretrainedConfig):
            configs[id(config)] = config
    kinds = [(config, config._attn_implementation) for config in configs.values()]
    try:
        for config, _ in kinds:
            config._attn_implementation = _ATTENTION
        yield
    finally:  # a configuration hands its kind down to those inside, which come later
        for config, kind in kinds:
            config._attn_implementation = kind


def attend_static(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of a pass's queries (B, heads, m, d) onto static keys and values (B, fewer heads,
    T, d), each onto the entries up to its own: (B, m, heads, d), in transformers' form.

    Raises:
        ValueError: the layer asks for something else than plain causal attention.
    """
    unknown = [name for name in _UNKNOWN if others.get(name) is not None]
    plain = scaling is None or abs(scaling * query.shape[3] ** 0.5 - 1.0) < 1e-6
    if unknown or not plain or value.shape != key.shape:
        what = ", ".join(unknown) or "a scale or a value width of its own"
        raise ValueError(f"its attention has {what}")
    attend = select_ops(query.device, query.dtype).context_attention
    return attend(query.transpose(1, 2), key, value, attention_mask.flatten(), True), None


def new_entries(
    like: Sequence[tuple[Tensor, Tensor]], num_entries: int
) -> list[tuple[Tensor, Tensor]]:
    """Room for so many entries, of the layers' shapes otherwise."""
    return [
        (
            key.new_zeros((*key.shape[:2], num_entries, key.shape[3])),
            value.new_zeros((*value.shape[:2], num_entries, value.shape[3])),
        )
        for key, value in like
    ]


def copy_entries(
    source: Sequence[tuple[Tensor, Tensor]], target: Sequence[tuple[Tensor, Tensor]]
) -> None:
    """Copy entries from the first place on, as many as the smaller holds, and clear the rest: what
    is not seen must still be numbers."""
    for old, new in zip(source, target, strict=True):
        for one, other in zip(old, new, strict=True):
            size = min(one.shape[2], other.shape[2])
            other[:, :, :size] = one[:, :, :size]
            other[:, :, size:] = 0


def room_for(num_entries: int, rooms: Sequence[int]) -> int | None:
    """The smallest of `rooms` with room for so many entries; None: there is none."""
    return next((room for room in rooms if room >= num_entries), None)
