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
    """How to attend on this machine: FlashAttention 3 where sglang's kernels bring it, else Triton;
    on a CPU plain PyTorch."""
    if query.is_cpu:
        return paged_attention
    if query.dtype == key.dtype:
        try:
            from sgl_kernel.flash_attn import is_fa3_supported

            if is_fa3_supported():
                return flash_attention()
            reason = "this GPU, or this build of sgl_kernel, has none"
        except ImportError as error:
            reason = str(error)
    else:
        reason = "the pool is in eight bits, which Triton reads without quantising queries"
    logger.info("FlashMap's draft attends with Triton, not FlashAttention 3: %s", reason)
    return triton_paged_attention


def flash_attention() -> Attention:
    """FlashAttention 3 of sgl_kernel over pages of one entry; see `paged_attention`."""
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    def attend(
        query: Tensor, key: Tensor, value: Tensor, table: Tensor, requests: Tensor, lengths: Tensor
    ) -> Tensor:
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

    return attend
