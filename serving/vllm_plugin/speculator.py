"""The speculator: vLLM's DFlash runtime with FlashMap's blocks, whose anchor predicts too and whose
noise follows from the request's seed.

Legend: B requests, K slots of a block, N drafts that are verified (at most K).
"""

from typing import Any

import torch
from torch import Tensor, nn
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator
from vllm.v1.worker.gpu.spec_decode.dflash.utils import load_dflash_model

from flashmap.release.tables import chosen_tokens
from flashmap.serving.drafter import KIND, likeliest_tokens
from flashmap.serving.options import DraftOptions, read_options
from flashmap.serving.weights import fold_options

from .model import VllmDraftModel

BACKENDS = ("FLASH_ATTN", "CPU_ATTN")


class FlashMapSpeculator(DFlashSpeculator):
    """Drafts whole blocks of K tokens and hands the first N to verification."""

    _speculator_name = "FlashMap"
    sample_idx_mapping: Tensor
    max_num_tokens: int

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        # Before vLLM's part: newer versions ask for the rows of a graph there.
        self.num_drafts: int = vllm_config.speculative_config.num_speculative_tokens
        super().__init__(vllm_config, device)
        self.block_size: int = self.draft_model_config.hf_config.block_size
        self.sample_from_anchor = True
        self.num_query_per_req = self.block_size
        rows = self.max_num_reqs * self.block_size
        if rows > self.max_num_tokens:
            raise ValueError(
                f"{self.max_num_reqs} requests draft {rows} slots, and vLLM's buffers hold"
                f" {self.max_num_tokens}: give --max-num-batched-tokens {rows}, or a smaller"
                " --max-num-seqs."
            )
        if vllm_config.lora_config is not None:
            raise ValueError(
                "FlashMap drafts for a target without adapters: leave out --enable-lora."
            )
        if self.draft_watermarker is not None:
            raise ValueError("FlashMap drafts are not watermarked: turn watermarking off.")
        self.sample_indices = torch.zeros(rows, dtype=torch.int64, device=device)
        self.sample_pos = torch.zeros(rows, dtype=torch.int64, device=device)
        dtype = self.sample_idx_mapping.dtype  # versions differ
        self.sample_idx_mapping = torch.full((rows,), -1, dtype=dtype, device=device)

    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: Any) -> nn.Module:
        """The draft model, folded with the target's vocabulary."""
        model: VllmDraftModel = load_dflash_model(target_model, self.vllm_config)
        options = read_options()
        chosen = fold_options(model.drafter.config, options, self._token_ids(model, options))
        model.fold(self.max_model_len, self.seeds, self.sample_idx_mapping, **chosen)
        return model

    def _token_ids(self, model: VllmDraftModel, options: DraftOptions) -> Tensor | None:
        """The tokens that may be drafted, rising; None: all."""
        view = model.config
        size = options.draft_vocab_size or view.draft_vocab_size
        if size == getattr(view, KIND)["vocab_size"]:
            return None
        if model.tables and size == view.draft_vocab_size:
            return chosen_tokens(model.tables, view.vocab_size)
        return likeliest_tokens(
            size, self.speculative_config.model, self.speculative_config.revision
        )

    def load_model(self, target_model: nn.Module) -> None:
        """Load the draft; from then on a block's K rows are prepared, whatever N is."""
        super().load_model(target_model)
        self.num_speculative_steps = self.block_size

    def set_attn(self, *args: Any, **kwargs: Any) -> None:
        """Take vLLM's caches. FlashAttention's schedule is made in the step: vLLM's own is of
        lengths that hold the block, which the drafter does not keep there."""
        super().set_attn(*args, **kwargs)
        if len(self.draft_kv_cache_group_ids) != 1:
            raise ValueError(
                f"vLLM spread the drafter's layers over {len(self.draft_kv_cache_group_ids)} groups"
                " of caches, and FlashMap writes one: this target is not supported."
            )
        for groups in self.attn_groups:
            for group in groups:
                name = group.backend.get_name()
                if name not in BACKENDS:
                    raise ValueError(
                        f"The drafter's attention backend is {name}, and FlashMap runs on"
                        f' {" and ".join(BACKENDS)}: add "attention_backend": "FLASH_ATTN" to'
                        " --speculative-config."
                    )
                builder = group.get_metadata_builder()
                if getattr(builder, "aot_schedule", False):
                    builder.aot_schedule = False

    def _num_graph_context_tokens(self, num_reqs: int) -> int:
        return min(num_reqs * (self.num_drafts + 1), self.max_num_tokens)

    def _precompute_context_kv(self, start: int, end: int, dummy_run: bool = False) -> None:
        if start > 0 or dummy_run:
            super()._precompute_context_kv(start, end, dummy_run)
            return
        self.model.postpone(
            self.hidden_states[:end],
            self.context_positions[:end],
            self._context_slot_mappings[0][:end],
        )

    def propose(self, *args: Any, **kwargs: Any) -> Tensor:
        """Draft; where vLLM wants no drafts, write the context alone."""
        tokens: Tensor = super().propose(*args, **kwargs)
        self.model.flush()
        return tokens

    def capture(self) -> None:
        """Capture the draft's graphs; where the caches are has to be known before."""
        self.model.context.layout()
        super().capture()

    def _generate_draft(
        self, num_reqs: int, num_tokens_padded: int, *args: Any, **kwargs: Any
    ) -> None:
        hidden = self._run_model(num_tokens_padded, *args, **kwargs)

        def first(rows: Tensor) -> Tensor:
            blocks = rows[: num_reqs * self.block_size].unflatten(0, (num_reqs, -1))
            drafts: Tensor = blocks[:, : self.num_drafts].flatten(0, 1)
            return drafts

        tokens = self.sample_draft(
            first(hidden),
            first(self.sample_pos) - 1,
            first(self.sample_idx_mapping),
            self.temperature,
            self.seeds,
            self.sample_col[: num_reqs * self.num_drafts],
            self.draft_logits,
        )
        self.draft_tokens[:num_reqs] = tokens.view(num_reqs, self.num_drafts)
