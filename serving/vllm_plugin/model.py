"""The draft model that vLLM builds: FlashMap's weights, folded into a fused step once the target is
there, over the pages of vLLM's cache.

vLLM inspects this class in a process of its own, so nothing of vLLM is imported at the top.

Legend: B requests, K slots, R = B K rows, T context rows, V vocabulary, S draft vocabulary, H
target hidden width, D drafter width, A heads, d head width, n H features.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from flashmap.kernels.paged import vllm_layout
from flashmap.modeling.configuration_flashmap import FlashMapConfig
from flashmap.modeling.modeling_flashmap import FlashMapDraftModel
from flashmap.modeling.step_flashmap import ContextRows, FusedStep
from flashmap.serving.drafter import KIND
from flashmap.serving.paged import PageLayout, committed, gathered_attention
from flashmap.serving.weights import fold, load_tensors, spread_logits


class VllmContext:
    """The draft's keys and values in vLLM's pages, for one step at a time.

    `layers` are the attention layers that own the caches. `begin` takes vLLM's metadata of the
    step, None while memory is measured, when there are no caches.
    """

    def __init__(self, step: FusedStep, layers: Sequence[Any]) -> None:
        self._step, self._layers = step, layers
        self.layout = PageLayout(
            lambda: [_numbers(layer.kv_cache) for layer in layers], vllm_layout
        )
        self._metadata: Any = None

    def begin(self, metadata: Any, positions: Tensor) -> None:
        """Attend from now on to the entries up to the anchors at `positions` (B)."""
        self._metadata = metadata
        if metadata is None:
            return
        self._entries = committed(positions, metadata.seq_lens[: len(positions)] > 0)
        if not positions.is_cpu:
            self._metadata = replace(
                metadata, seq_lens=self._entries, causal=False, scheduler_metadata=None
            )

    def write(self, kv: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Store projected rows (T, L, 2, A, d) at `slots`."""
        if self._layers[0].kv_cache.numel():
            self._step.store(kv, positions, slots, self.layout())

    def attend(self, layer: int, query: Tensor) -> Tensor:
        """Attend from `query` (B, K, A, d) to the committed entries and the anchor's."""
        metadata, owner = self._metadata, self._layers[layer]
        if metadata is None:
            return torch.zeros_like(query)
        if query.is_cpu:
            layout = self.layout()
            pages = -(-metadata.max_seq_len // layout.keys[0].shape[1])
            table, last = metadata.block_table[:, :pages], self._entries.clamp(min=1) - 1
            return gathered_attention(self._step, layout, layer, query, table, last)
        rows = query.flatten(0, 1)
        out = torch.empty_like(rows)
        if owner.query_quant is not None:
            rows, _ = owner.query_quant(rows.flatten(1), owner._q_scale)
            rows = rows.view(out.shape)
        owner.impl.forward(owner, rows, rows, rows, owner.kv_cache, metadata, out)
        return out.view(query.shape)


def _numbers(cache: Tensor) -> Tensor:
    """An eight-bit cache is bytes to vLLM."""
    return cache.view(torch.float8_e4m3fn) if cache.dtype == torch.uint8 else cache


class VllmDraftModel(nn.Module):
    """A FlashMap drafter as vLLM's DFlash runtime calls it.

    `drafter` holds the weights until `fold`, which makes the step of them and lets them go. `model`
    and `lm_head` are where vLLM puts the target's embedding and head.
    """

    model: Any
    lm_head: Any

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        from vllm.model_executor.layers.attention import Attention

        self.config = vllm_config.speculative_config.draft_model_config.hf_config
        _require_v2_runner(vllm_config)
        own = FlashMapConfig(**getattr(self.config, KIND))
        self.drafter = FlashMapDraftModel(own).requires_grad_(False)
        self.model = nn.Module()
        # Layers are numbered on from the target's.
        first = vllm_config.model_config.get_num_layers(vllm_config.parallel_config)
        self.attention = nn.ModuleList(
            Attention(
                own.num_attention_heads,
                own.head_size,
                own.head_size**-0.5,
                cache_config=vllm_config.cache_config,
                prefix=f"{prefix + '.' if prefix else ''}layers.{first + layer}.attn",
            )
            for layer in range(own.num_hidden_layers)
        )
        self.tables: dict[str, Tensor] = {}
        self._block_size = own.block_size
        self._vocab_size = own.vocab_size
        self._pending: ContextRows | None = None

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Take the drafter's tensors by name; returns the names of the parameters that were set.

        Raises:
            ValueError: one is missing, unknown or of another shape.
        """
        self.tables = load_tensors(self.drafter, weights)
        return {f"drafter.{name}" for name in self.drafter.state_dict()}

    def fold(self, max_length: int, seeds: Tensor, requests: Tensor, **options: Any) -> None:
        """Make the fused step for anchors at 0 .. max_length - 1; `options` are those of
        `FusedStep`.

        `seeds` holds a seed a request, `requests` (R) the request of each row, below 0 for padding;
        vLLM changes both in place.
        """
        embed_tokens = self.model.embed_tokens
        self.step = fold(self.drafter, embed_tokens, self.lm_head, max_length, **options)
        self.context = VllmContext(self.step, list(self.attention))
        self._seeds, self._requests = seeds, requests
        del self.drafter

    # What vLLM's runtime calls, in the order of a step

    def combine_hidden_states(self, hidden_states: Tensor) -> Tensor:
        """Rows (T, D) that vLLM keeps of the target's features (T, n H)."""
        return self.step.combine(hidden_states)

    def precompute_and_store_context_kv(
        self, context_states: Tensor, positions: Tensor, slots: Tensor | None = None
    ) -> None:
        """Write context entries of combined rows (T, D); without slots, none."""
        if slots is not None:
            rows = ContextRows(context_states, positions, slots, combined=True)
            self.step.write(self.context, rows)

    def postpone(self, context_states: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Write these rows with the anchors of the next `forward`, in one product."""
        self._pending = ContextRows(context_states, positions, slots, combined=True)

    def flush(self) -> None:
        """Write what was postponed and met no `forward`."""
        if self._pending is not None:
            self.step.write(self.context, self._pending)
            self._pending = None

    def forward(
        self, input_ids: Tensor, positions: Tensor, inputs_embeds: Tensor | None = None
    ) -> Tensor:
        """Hidden states (R, D) of the blocks whose first rows are the anchors."""
        from vllm.forward_context import get_forward_context

        metadata = get_forward_context().attn_metadata
        own = None if metadata is None else metadata[self.attention[0].layer_name]
        first = slice(None, None, self._block_size)
        places, rows = positions[first], self._requests[: len(positions)][first]
        self.context.begin(own, places)
        new, self._pending = self._pending, None
        if own is not None:
            anchors = self.step.embedding[input_ids[first].long()]
            entries = ContextRows(anchors, places, own.slot_mapping[: len(positions)][first])
            self.step.write(self.context, new, entries)
        seeds = self._seeds[rows.clamp(min=0).long()]
        return self.step.hidden(self.context, places, seeds=seeds).flatten(0, 1)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Draft logits (rows, V) for hidden states (rows, D): minus infinity for tokens that are
        not drafted."""
        logits = self.step.logits(hidden_states)
        return spread_logits(logits, self.step.token_ids, self._vocab_size)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Embeddings of tokens: the target's."""
        embeds: Tensor = self.model.embed_tokens(input_ids)
        return embeds


def _require_v2_runner(vllm_config: Any) -> None:
    if not vllm_config.use_v2_model_runner:
        raise ValueError(
            "FlashMap drafts in vLLM's V2 model runner only, and this engine uses V1: unset"
            " VLLM_USE_V2_MODEL_RUNNER, or leave out what vLLM's log says V2 does not support."
        )
