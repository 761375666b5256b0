"""The draft model that sglang builds: FlashMap's weights, folded into a fused step once the target
is there, over sglang's pool.

Nothing of sglang is imported at the top, so that the module loads anywhere.

Legend: B requests, K slots of a block, N drafts that are verified (at most K), R = B N rows, T
context rows, V vocabulary, S draft vocabulary, H target hidden width, D drafter width, n H
features.
"""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from flashmap.kernels.paged import gated_slots
from flashmap.kernels.sampling import likeliest
from flashmap.kernels.tree import Trees, build_trees
from flashmap.modeling.configuration_flashmap import FlashMapConfig
from flashmap.modeling.modeling_flashmap import FlashMapDraftModel
from flashmap.modeling.step_flashmap import ContextRows, FusedStep
from flashmap.serving.drafter import KIND, likeliest_tokens
from flashmap.serving.options import DraftOptions, read_options
from flashmap.serving.weights import fold, fold_options, load_tensors, spread_logits

from .context import PoolContext
from .start import check_scale

_CONTEXT_ROWS = 2048  # of a prompt that are projected at once


class SglangDraftModel(nn.Module):
    """A FlashMap drafter as sglang's DSPARK worker calls it.

    `drafter` holds the weights until `attach_shared_modules`, which makes the step of them and lets
    them go; `bind` comes before. The attributes below are what the worker asks a draft for.
    """

    sample_from_anchor = True
    uses_own_vocab_modules = False
    supports_pre_gather_target_hidden_projection = False
    confidence_head = None
    masks_verification = False  # of the process: a draft in it makes trees

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__()
        own = FlashMapConfig(**getattr(config, KIND))
        self.config = config
        self.drafter = FlashMapDraftModel(own).requires_grad_(False)
        self.markov_head = _markov_head(own.vocab_size)
        self.gamma = self.block_size = own.block_size
        self.num_stages = own.num_hidden_layers
        self.logits_mup_width_multiplier: float | None = None
        self._vocab_size = own.vocab_size

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take the drafter's tensors by name.

        Raises:
            ValueError: one is missing, unknown or of another shape.
        """
        load_tensors(self.drafter, weights)

    def bind(self, runner: Any, target: Any) -> None:
        """Know sglang's runner of the draft, and its configuration of the target."""
        self._runner = runner
        self._logits_width: int = target.vocab_size  # which may be padded
        # The last verify windows reach beyond the longest text.
        self._max_length: int = target.context_len + 4 * (self.block_size + 1)

    def attach_shared_modules(self, *, embed_tokens: Any, lm_head: Any) -> None:
        """Fold the target's embedding and head in; sglang sizes its pools after this.

        Raises:
            ValueError: the target's modules cannot be folded, see `FusedStep`.
        """
        check_scale(self.logits_mup_width_multiplier)
        for weight in self.markov_head.parameters():
            weight.data.zero_()
        options, config = read_options(), self.drafter.config
        chosen = fold_options(config, options, self._token_ids(options))
        self.step: FusedStep = fold(self.drafter, embed_tokens, lm_head, self._max_length, **chosen)
        self.context = PoolContext(self.step, self._runner, self.drafter.dtype)
        self.options = options
        SglangDraftModel.masks_verification = options.tree_candidates > 0
        self._trees: Trees | None = None
        self._graph_trees: Trees | None = None
        # What the worker sizes its buffers by.
        logits = torch.empty(0, dtype=lm_head.weight.dtype, device=lm_head.weight.device)
        self.lm_head = SimpleNamespace(weight=logits, bias=None, org_vocab_size=self._logits_width)
        del self.drafter

    def _token_ids(self, options: DraftOptions) -> Tensor | None:
        """The tokens that may be drafted, rising; None: all."""
        size = options.draft_vocab_size or self.config.draft_vocab_size
        if size == self._vocab_size:
            return None
        source = self._runner.model_config
        return likeliest_tokens(size, source.model_path, source.revision)

    # What sglang's runtime calls, in the order of a round

    def write_target_hidden_kv(
        self,
        *,
        target_hidden: Tensor,
        pool: Any,
        positions: Tensor,
        cache_loc: Tensor,
        cache_loc_2d: Tensor | None = None,
        commit_lens: Tensor | None = None,
        target_hidden_is_projected: bool = False,
    ) -> None:
        """Write context entries of the target's features (T, n H) at `positions` (T) to the slots
        `cache_loc` (T); of verify windows `cache_loc_2d` (B, N + 1) only the first `commit_lens`
        (B) columns."""
        slots = cache_loc
        if cache_loc_2d is not None and commit_lens is not None:
            slots = gated_slots(cache_loc_2d, commit_lens)
        parts = (part.split(_CONTEXT_ROWS) for part in (target_hidden, positions, slots))
        for rows in zip(*parts, strict=True):
            self.step.write(self.context, ContextRows(*rows))

    def forward(
        self, input_ids: Tensor, positions: Tensor, forward_batch: Any, *_: Any, **__: Any
    ) -> Any:
        """Hidden states (R, D) of the blocks whose first rows are the anchors, in sglang's
        output."""
        from sglang.srt.layers.logits_processor import LogitsProcessorOutput

        number = forward_batch.batch_size
        width = len(positions) // number
        draws = tree_draws(self.options, number)
        hidden = self.draft(
            input_ids[::width],
            positions[::width],
            forward_batch.out_cache_loc[::width],
            forward_batch.req_pool_indices,
            draws,
        )
        if self.options.tree_candidates:
            self._keep_trees(hidden.unflatten(0, (number, draws)))
        rows = hidden[::draws, :width].flatten(0, 1)
        return LogitsProcessorOutput(next_token_logits=None, hidden_states=rows)

    def draft(
        self, anchors: Tensor, positions: Tensor, slots: Tensor, requests: Tensor, draws: int = 1
    ) -> Tensor:
        """Hidden states (B draws, K, D) of the blocks after `anchors` (B) at `positions` (B), whose
        entries go to `slots` (B); `requests` (B) are rows of sglang's table."""
        self.context.begin(requests, positions)
        entries = ContextRows(self.step.embedding[anchors], positions, slots)
        self.step.write(self.context, anchors=entries)
        # One seed for all: a request's noise follows from its positions, in every batch alike.
        seeds = torch.zeros_like(positions)
        return self.step.hidden(self.context, positions, seeds=seeds, num_draws=draws)

    def reserve_trees(self, number: int) -> None:
        """Keep room for the trees of so many requests, which captured graphs write to."""
        width, device = self.block_size + 1, self.step.embedding.device
        empty = torch.zeros((number, 1, width), dtype=torch.int64, device=device)
        trees = build_trees(empty[..., 1:], width)
        self._graph_trees = Trees(*(rows.clone() for rows in trees))

    def _keep_trees(self, hidden: Tensor) -> None:
        """Build the trees of candidates' hidden states (B, draws, K, D)."""
        number, draws, slots = hidden.shape[:3]
        logits = self.step.logits(hidden).flatten(0, 2)
        tokens = likeliest(logits, self.step.token_ids).view(number, draws, slots)
        trees, kept = build_trees(tokens, slots + 1), self._graph_trees
        if kept is None or len(kept.tokens) < number:
            self._trees = trees
            return
        for rows, new in zip(kept, trees, strict=True):
            rows[:number].copy_(new)

    def trees(self, number: int) -> Trees:
        """The trees of the last pass, of so many requests."""
        kept = self._graph_trees
        trees = self._trees if kept is None or len(kept.tokens) < number else kept
        assert trees is not None
        return Trees(*(rows[:number] for rows in trees))

    def compute_base_logits(self, hidden: Tensor) -> tuple[Tensor, None]:
        """Draft logits of all the target's tokens for hidden states (rows, D), minus infinity for
        those that are not drafted; and nothing for a confidence head."""
        logits = self.step.logits(hidden)
        return spread_logits(logits, self.step.token_ids, self._logits_width), None

    def forward_embed(self, input_ids: Tensor) -> Tensor:
        """Embeddings of tokens. That there is such a method tells sglang to stage none."""
        return self.step.embedding[input_ids]

    def prune_to_ctx_kv_injection(self) -> None:
        """Keep what writes the context: all of it is shared with drafting."""


def tree_draws(options: DraftOptions, number: int) -> int:
    """Candidates that are drafted for each of so many requests."""
    if not options.tree_candidates:
        return 1
    return max(1, min(options.tree_candidates, options.tree_budget // number))


def _markov_head(vocab_size: int) -> Any:
    """Sglang's smallest Markov head, which adds nothing once its weights are zero: slots are
    independent."""
    from sglang.srt.models.dspark import VanillaMarkov

    return VanillaMarkov(vocab_size=vocab_size, markov_rank=1)
