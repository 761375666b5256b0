"""The draft's keys and values in sglang's pool, and attention to them.

Legend: B requests, G blocks (M candidates a request: G = B M), K slots, T context rows, L layers, A
heads, d head width, P rows of the pool.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flashmap.kernels.paged import sglang_layout
from flashmap.kernels.paged_attention import paged_attention, triton_paged_attention
from flashmap.modeling.step_flashmap import FusedStep
from flashmap.serving.paged import PageLayout

logger = logging.getLogger(__name__)
_TOLERANCE = 3e-2  # of a trial, relative to the largest number: a few units of bfloat16
Attention = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class PoolContext:
    """The draft's pool, for one step at a time.

    `runner` is sglang's runner of the draft: it has `token_to_kv_pool` and `req_to_token_pool` once
    they are there. `begin` takes the rows of the requests in the latter and the positions of their
    anchors, both (B). `dtype` is the drafter's.

    Raises:
        ValueError: the pool keeps numbers of a dtype that FlashMap does not write.
    """

    def __init__(self, step: FusedStep, runner: Any, dtype: torch.dtype) -> None:
        self._step, self._runner, self._dtype = step, runner, dtype
        self._layers = range(step.config.num_hidden_layers)
        self.layout = PageLayout(self._caches, self._layout_of)
        self._attend: Attention | None = None

    def begin(self, requests: Tensor, positions: Tensor) -> None:
        """Attend from now on to the entries up to the anchors at `positions`."""
        self._requests, self._lengths = requests, positions

    def write(self, kv: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Store projected rows (T, L, 2, A, d) at `slots`."""
        self._step.store(kv, positions, slots, self.layout())

    def attend(self, layer: int, query: Tensor) -> Tensor:
        """Attend from `query` (G, K, A, d) to the committed entries and the anchor's."""
        layout, table = self.layout(), self._runner.req_to_token_pool.req_to_token
        key, value = layout.keys[layer].squeeze(1), layout.values[layer].squeeze(1)
        if self._attend is None:
            self._attend = select_attention(query, key)
        return self._attend(query, key, value, table, self._requests, self._lengths)

    def _caches(self) -> list[Tensor]:
        pool = self._runner.token_to_kv_pool
        keys = [pool.get_key_buffer(layer) for layer in self._layers]
        return keys + [pool.get_value_buffer(layer) for layer in self._layers]

    def _layout_of(self, caches: Sequence[Tensor]) -> Any:
        dtype, own = caches[0].dtype, self._dtype
        if dtype not in (own, torch.float8_e4m3fn):
            raise ValueError(
                f"sglang keeps the draft's keys and values as {dtype}, and this drafter computes in"
                f" {own}: give --speculative-draft-kv-cache-dtype bfloat16 or fp8_e4m3, and"
                " --dtype bfloat16."
            )
        return sglang_layout(caches[: len(self._layers)], caches[len(self._layers) :])


def select_attention(query: Tensor, key: Tensor) -> Attention:
    """How to attend from blocks like `query` to a pool like `key` on this machine: FlashAttention 3
    where sglang's kernels bring it and pass a trial, else Triton; on a CPU plain PyTorch."""
    if query.is_cpu:
        return paged_attention
    reason: str | None = "the pool is in eight bits, which Triton reads without rounding queries"
    if query.dtype == key.dtype:
        try:
            reason = _trial(flash_attention, query, key)
        except Exception as error:  # noqa: BLE001 - kernels that do not fit raise what they like
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    if reason is None:
        return flash_attention
    logger.info("FlashMap's draft attends with Triton, not FlashAttention 3: %s", reason)
    return triton_paged_attention


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, table: Tensor, requests: Tensor, lengths: Tensor
) -> Tensor:
    """Sglang's FlashAttention 3 over pages of one entry; see `paged_attention`."""
    from sglang.kernels.ops.attention.flash_attention_v3 import flash_attn_with_kvcache

    rows = query.unflatten(0, (len(requests), -1)).flatten(1, 2)
    out: Tensor = flash_attn_with_kvcache(
        rows,
        key.unsqueeze(1),
        value.unsqueeze(1),
        cache_seqlens=(lengths + 1).int(),
        page_table=table[requests],
        softmax_scale=query.shape[-1] ** -0.5,
        causal=False,
    )
    return out.reshape(query.shape)


def _trial(attend: Attention, query: Tensor, key: Tensor) -> str | None:
    """What is wrong with an attention on a small example, None if nothing is."""
    generator = torch.Generator().manual_seed(0)
    shapes = [query[:1].shape, *[(40, *key.shape[1:])] * 2]
    inputs = [torch.randn(shape, generator=generator).to(query) for shape in shapes]
    inputs.append(torch.randperm(40, generator=generator).int().unsqueeze(0).to(query.device))
    inputs += torch.tensor([[0], [29]], device=query.device)  # the table's row, the last entry
    found, right = (version(*inputs) for version in (attend, paged_attention))
    error = float((found - right).abs().max() / right.abs().max())
    return None if error < _TOLERANCE else f"its trial is off by {error:.2g}"
