"""Whole blocks of draft tokens in one pass, at the end of the draft's captured graph.

Legend: B requests, N drafts that are verified, R = B N rows, S draft vocabulary, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

from flashmap.kernels.sampling import (
    likeliest,
    sample_tokens,
    triton_sample_tokens,
)

from .model import SglangDraftModel


class BlockSampler:
    """Stands in for `engine`, sglang's sampler of a DSPARK draft, whose buffers it fills.

    sglang draws a token at a time, because its drafts' slots depend on each other; here one pass
    draws all of them. It reads what sglang reads between rounds: the drafted tokens, the logits
    that sampling verification compares, and each request's temperature.
    """

    confidence_out = None

    def __init__(self, engine: Any, model: SglangDraftModel) -> None:
        self._engine, self._model = engine, model
        self._fused = model.options.fused_sampler
        self.out: Tensor = engine.out
        self.folded_sampling: bool = engine.folded_sampling
        self.temperatures: Tensor | None = engine.temperatures
        self.greedy_mask: Tensor | None = engine.greedy_mask
        self.corrected_out: Tensor | None = engine.corrected_out
        engine.exp_noise = None  # one row a request; a block takes one a slot
        if self.corrected_out is not None:
            self.corrected_out.fill_(float("-inf"))  # tokens that are never drafted stay so

    def stage_sampling_params(self, *, bs: int, sampling_info: Any) -> None:
        """Refresh the temperatures before a replay."""
        self._engine.stage_sampling_params(bs=bs, sampling_info=sampling_info)

    def __call__(self, hidden_states: Tensor, input_ids: Tensor) -> None:
        """Draft from hidden states (R, D)."""
        logits, rows = self._model.step.logits(hidden_states), len(hidden_states)
        token_ids = self._model.step.token_ids
        if not self.folded_sampling:
            self.out[:rows].copy_(likeliest(logits, token_ids))
            return
        assert self.temperatures is not None
        assert self.greedy_mask is not None
        assert self.corrected_out is not None
        seen = self.corrected_out[:rows]
        if seen.shape == logits.shape:
            seen.copy_(logits)
        else:
            seen.index_copy_(1, token_ids, logits.to(seen.dtype))
        drafts = rows // self._engine.gamma
        temperatures, greedy = (
            per_request[:drafts].repeat_interleave(self._engine.gamma)
            for per_request in (self.temperatures, self.greedy_mask)
        )
        draw = _draw_fused if self._fused else _draw
        self.out[:rows].copy_(draw(logits, temperatures, greedy, token_ids))


def _draw(logits: Tensor, temperatures: Tensor, greedy: Tensor, token_ids: Tensor) -> Tensor:
    """Sglang's own draw: the largest probability over exponential noise."""
    from sglang.kernels.ops.speculative.dspark.dspark_draft_model import SampleStepTokens

    noise = torch.empty(logits.shape, dtype=torch.float32, device=logits.device).exponential_()
    columns: Tensor = SampleStepTokens.execute(
        step_logits=logits, temperatures=temperatures, greedy_mask=greedy, exp_noise=noise
    )
    return token_ids[columns.view(-1)]


def _draw_fused(logits: Tensor, temperatures: Tensor, greedy: Tensor, token_ids: Tensor) -> Tensor:
    """One kernel that makes its noise as it reads. Every row has a seed of its own in every round:
    requests that shared one would draw alike."""
    seeds = torch.empty(len(logits), dtype=torch.int64, device=logits.device).random_()
    draw = triton_sample_tokens if logits.is_cuda else sample_tokens
    temperatures = temperatures.masked_fill(greedy, 0.0)
    return draw(logits, temperatures, seeds, torch.zeros_like(seeds), token_ids)
