"""The FlashMap drafter: a flow map from Gaussian noise to the token distributions of a block.

A block is the K tokens after the anchor, the last committed token. Its state x (K, V) runs along
x_s = (1 - s) noise + s onehot(tokens) for s in [0, 1]. A jump from s to t reads the state through
two projections onto the target's embedding E,

    inputs = state_norm(softmax(e(s) x) E) + g noise_norm(x E),
    e(s) = s / (1 - s)^2,  g = noise_gate (t - s),

predicts delta, a distribution a slot, and moves the state to ((1 - t) x + (t - s) delta) / (1 - s)
(equation 19 of the flow map language model paper). The last jump ends at t = 1, where delta is the
draft. Given the noise, slots are independent, so delta is exactly the proposal that the
verification of speculative decoding needs.

Legend: B sequences, G blocks, K slots, V vocabulary, H target hidden width, D drafter width, L
layers, A heads, d head width, T context entries, n tapped target layers, S context rows.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .acceptance_flashmap import coin_table
from .arguments_flashmap import COLDEST
from .attention_flashmap import context_attention
from .cache_flashmap import FlashMapCache
from .configuration_flashmap import FlashMapConfig
from .constants_flashmap import TensorMemo, noise_factor, owner, uniform_embedding
from .decoding_flashmap import spec_generate, stream_generate
from .drafting_flashmap import MOST_NODES
from .draws_flashmap import DrawChoice
from .flow_flashmap import advance, sharpness
from .folds_flashmap import JumpFold
from .fused_flashmap import draw_seeds, rope_table
from .fusion_flashmap import fused_modules
from .graphs_flashmap import RoundStore
from .hook_flashmap import flashmap_decoding
from .jumps_flashmap import bank_rows
from .layers_flashmap import AdaLN, FlashMapLayer, Modulation, RMSNorm, TimeEmbedding, ZeroLinear
from .linear_flashmap import Linear
from .loop_flashmap import DraftLoop
from .obstacles_flashmap import choose_graphs
from .pace_flashmap import Pace
from .past_flashmap import FlashMapPast
from .positions_flashmap import position_limit
from .reference_flashmap import block_noise
from .refusals_flashmap import NotAnAssistant
from .request_flashmap import Request
from .round_flashmap import Round
from .runner_flashmap import TargetRunner
from .sampling_flashmap import Sampler
from .select_flashmap import TRITON_OPS, select_ops
from .states_flashmap import BankState, NoiseBank, noise_bank
from .static_flashmap import static_cache
from .step_flashmap import FusedStep
from .target_flashmap import (
    FeatureTap,
    call_module,
    check_target,
    dense_embedding,
    head_logits,
    look_up_rows,
    select_hidden,
)
from .tree_flashmap import DraftTree
from .treeloop_flashmap import TreeLoop
from .treerunner_flashmap import TreeRunner
from .triton_flashmap import HAS_TRITON
from .verify_flashmap import rotate_into

Time = float | Tensor
Modulations = tuple[list[tuple[Modulation, Modulation, Modulation]], Modulation]
# transformers 4.57 copies only those files of a local folder that this one names.
__all__ = [
    "COLDEST", "HAS_TRITON", "MOST_NODES", "TRITON_OPS", "DraftLoop", "DraftTree", "DrawChoice",
    "FlashMapCache", "FlashMapDraftModel", "FlashMapPast", "FusedStep", "JumpFold", "Linear",
    "Pace", "Request", "Round", "Sampler", "TargetRunner", "TreeLoop", "TreeRunner", "bank_rows",
    "choose_graphs", "coin_table", "context_attention", "fused_modules", "position_limit",
    "rotate_into", "select_ops", "static_cache",
]  # fmt: skip
_BFLOAT16_STEP = 2.0**-8


class FlashMapDraftModel(PreTrainedModel):
    """The drafter. It has no embedding and no vocabulary head: both are the target's."""

    config: FlashMapConfig
    config_class = FlashMapConfig
    base_model_prefix = "flashmap"
    main_input_name = "inputs_embeds"
    _no_split_modules = ["FlashMapLayer"]  # noqa: RUF012  # the type transformers gives it
    _supports_sdpa = True

    def __init__(self, config: FlashMapConfig) -> None:
        super().__init__(config)
        config.check_fields()
        hidden, target_hidden = config.hidden_size, config.target_hidden_size
        eps = config.rms_norm_eps
        self.fc = nn.Linear(len(config.target_layer_ids) * target_hidden, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, eps)
        self.anchor_proj = nn.Linear(target_hidden, hidden)
        self.anchor_norm = RMSNorm(hidden, eps)
        self.state_norm = RMSNorm(target_hidden, eps)
        self.noise_norm = RMSNorm(target_hidden, eps)
        self.noise_gate = nn.Parameter(torch.ones(1))
        self.x_embed = nn.Linear(target_hidden, hidden)
        self.time_embed = TimeEmbedding(config)
        self.jump_embed = TimeEmbedding(config)
        self.layers = nn.ModuleList(FlashMapLayer(config) for _ in range(config.num_hidden_layers))
        self.final_adaln = AdaLN(config)
        self.head = nn.Linear(hidden, target_hidden)
        self._modulation_memo = TensorMemo()
        self._constant_memo = TensorMemo()
        self._bank_memo = TensorMemo()
        self._embedding_memo = TensorMemo()
        self.round_store = RoundStore()
        self.generation_config = NotAnAssistant()  # type: ignore[no-untyped-call]
        self.post_init()  # type: ignore[no-untyped-call]

    # The network

    def forward(
        self,
        inputs_embeds: Tensor,
        modulations: Modulations,
        position_ids: Tensor,
        context: Sequence[tuple[Tensor, Tensor]],
        context_mask: Tensor | None = None,
    ) -> Tensor:
        """Run the DiT on block states: hidden states (G, K, H) for the target's vocabulary head.

        Args:
            inputs_embeds: state inputs (G, K, H), see `embed_state`.
            modulations: see `time_conditioning`.
            position_ids: absolute positions (G, K) of the slots.
            context: keys and values, each (S, A, T, d), a pair a layer; S divides G, and
                neighbouring blocks share a row.
            context_mask: boolean (S, 1, G / S * K, T), True where a slot may look; None:
                everywhere.
        """
        per_layer, final = modulations
        rope = rope_table(position_ids, self.config.head_size, self.config.rope_theta)
        x = self.x_embed(inputs_embeds)
        for layer, layer_modulations, layer_context in zip(
            self._dit_layers, per_layer, context, strict=True
        ):
            x = layer(x, layer_modulations, rope, layer_context, context_mask)
        hidden: Tensor = self.head(self.final_adaln(x, final))
        return hidden

    def time_conditioning(self, s: Time, t: Time) -> Modulations:
        """Modulations of a jump from `s` to `t`: three (scale, shift, gate) a layer, and the last.

        Floats give (1, 1, D) each and are remembered until the weights change; float32 tensors (G)
        give (G, 1, D), one pair of times a block, and carry gradients.
        """
        learning = torch.is_grad_enabled() and self.training
        if learning or isinstance(s, Tensor) or isinstance(t, Tensor):
            return self._modulations(s, t)
        return self._modulation_memo.get(
            (s, t), self._conditioning_weights(), lambda: self._modulations(s, t)
        )

    def _conditioning_weights(self) -> list[Tensor]:
        """Everything a modulation is computed from."""
        linears: list[nn.Linear] = [self.final_adaln.linear]
        for layer in self._dit_layers:
            linears += [
                layer.self_attn_adaln.linear,
                layer.cross_attn_adaln.linear,
                layer.mlp_adaln.linear,
            ]
        for embed in (self.time_embed, self.jump_embed):
            linears += [embed.linear_1, embed.linear_2]
        return [weight for linear in linears for weight in (linear.weight, linear.bias)]

    @property
    def _dit_layers(self) -> list[FlashMapLayer]:
        return cast(list[FlashMapLayer], list(self.layers))

    def _modulations(self, s: Time, t: Time) -> Modulations:
        condition = self.time_embed(self._times(s)) + self.jump_embed(self._times(t))
        per_layer = [layer.modulations(condition) for layer in self._dit_layers]
        return per_layer, self.final_adaln.modulation(condition)

    def _times(self, time: Time) -> Tensor:
        """Times as float32 (G, 1), or (1, 1) for a float."""
        if isinstance(time, Tensor):
            return time.to(device=self.device, dtype=torch.float32).unsqueeze(-1)
        return torch.full((1, 1), time, device=self.device)

    # The context

    def new_cache(self, batch_size: int, max_length: int) -> FlashMapCache:
        """An empty context cache on the drafter's device, in its dtype."""
        return FlashMapCache(
            self.config, batch_size, max_length, device=self.device, dtype=self.dtype
        )

    def context_entries(
        self, target_hidden: Tensor, position_ids: Tensor
    ) -> list[tuple[Tensor, Tensor]]:
        """Keys and values, each (B, A, m, d), a pair a layer.

        They are computed from target features (B, m, n H) at positions (B, m).
        """
        features = target_hidden.to(device=self.device, dtype=self.dtype)
        return self._entries(self.hidden_norm(self.fc(features)), position_ids)

    def anchor_entries(
        self, anchor_embeds: Tensor, position_ids: Tensor
    ) -> list[tuple[Tensor, Tensor]]:
        """Keys and values, each (B, A, m, d), a pair a layer.

        They are computed from the embeddings (B, m, H) of anchors at positions (B, m).
        """
        embeds = anchor_embeds.to(device=self.device, dtype=self.dtype)
        return self._entries(self.anchor_norm(self.anchor_proj(embeds)), position_ids)

    def extend_context(
        self, cache: FlashMapCache, target_hidden: Tensor, counts: Sequence[int] | None = None
    ) -> None:
        """Append the target's features (B, m, n H) of the next m positions to the context.

        `counts` says how many of them each sequence keeps; None: all.

        Raises:
            ValueError: the features have another width than n H, or the cache is full.
        """
        width = self.fc.in_features
        if target_hidden.dim() != 3 or target_hidden.shape[-1] != width:
            raise ValueError(
                f"target_hidden has shape {tuple(target_hidden.shape)}, expected (batch, positions,"
                f" {width}): the outputs of target layers {self.config.target_layer_ids},"
                " concatenated in that order."
            )
        rows, count = target_hidden.shape[:2]
        cache.require_rows(rows)
        cache.write(self.context_entries(target_hidden, cache.positions(count)))
        cache.advance([count] * rows if counts is None else counts)

    def _entries(self, hidden: Tensor, position_ids: Tensor) -> list[tuple[Tensor, Tensor]]:
        rope = rope_table(position_ids, self.config.head_size, self.config.rope_theta)
        return [layer.cross_attn.key_value(hidden, rope) for layer in self._dit_layers]

    # The state

    def target_constants(self, embedding: Tensor) -> tuple[Tensor, Tensor]:
        """Mean row (1, H) of the target's embedding E (V, H), and the noise factor F (H, H).

        F F^T = E^T E. The mean has the embedding's dtype, F the drafter's. Both are remembered for
        the latest embedding until it or the drafter's dtype or device changes.
        """
        layout = (embedding.shape, embedding.stride(), embedding.data_ptr(), embedding.dtype)

        def compute() -> tuple[Tensor, Tensor]:
            factor = noise_factor(embedding).to(device=self.device, dtype=self.dtype)
            return uniform_embedding(embedding), factor

        return self._constant_memo.get(
            (layout, self.dtype, self.device), [owner(embedding)], compute
        )

    def embed_state(self, state: Tensor, s: float, t: float, embedding: Tensor) -> Tensor:
        """Network inputs (B, K, H) for a float32 `state` (B, K, V) that jumps from `s` to `t`."""
        if s > 0.0:
            posterior = torch.softmax(state * sharpness(s), dim=-1, dtype=torch.float32)
            posterior_embeds = (
                posterior.to(device=embedding.device, dtype=embedding.dtype) @ embedding
            )
        else:
            posterior_embeds = self.target_constants(embedding)[0]
        state_embeds = state.to(device=embedding.device, dtype=embedding.dtype) @ embedding
        return self.mix_state(posterior_embeds, state_embeds, s, t)

    def mix_state(self, posterior_embeds: Tensor, state_embeds: Tensor, s: Time, t: Time) -> Tensor:
        """Norm and add the two projections of a state, unnormed, broadcastable to (B, K, H).

        Times are floats, or tensors that broadcast with the projections.
        """
        posterior_embeds = posterior_embeds.to(device=self.device, dtype=self.dtype)
        state_embeds = state_embeds.to(device=self.device, dtype=self.dtype)
        gate = self.jump_gate(s, t)
        mixed: Tensor = self.state_norm(posterior_embeds) + gate * self.noise_norm(state_embeds)
        return mixed

    def jump_gate(self, s: Time, t: Time) -> Tensor:
        """Factor of the normed noise in the input of a jump from `s` to `t`, (1) for floats."""
        jump = t - s if self.config.noise_gate == "jump" else 1.0
        return (self.noise_gate.float() * jump).to(self.dtype)

    # Drafting

    def draft(
        self,
        anchor_ids: Tensor,
        cache: FlashMapCache,
        embed_tokens: nn.Module,
        lm_head: nn.Module,
        num_steps: int | None = None,
        noise: Tensor | None = None,
        generator: torch.Generator | None = None,
        *,
        seed: int | Sequence[int] | None = None,
        num_draws: int = 1,
        jump_bank_size: int = 0,
    ) -> Tensor:
        """Draft the block after each anchor: logits (B, K, V) in the dtype of the target's head, or
        (B, M, K, V) for M noise draws above 1, which share one read of the context.

        Args:
            anchor_ids: last committed token (B) of each sequence, at position `cache.lengths[b]`.
            cache: context of the positions before each anchor; the anchors' own entries are written
                to its scratch space.
            embed_tokens: the target's token embedding, called for the anchors.
            lm_head: the target's vocabulary head, called on the network's output.
            num_steps: number of jumps; None takes the configuration's.
            noise: starting state (B, K, V); None draws it from the seeds, by position.
            generator: where the seeds come from if neither noise nor seed is given; None: torch's
                default generator.
            seed: one integer, or one a sequence (see `draw_seeds`).
            num_draws: M; draw m of a seed is the same whatever M is.
            jump_bank_size: draws of a bank that several jumps take their noise from, see
                `states_flashmap`; 0: exact jumps. Given noise is followed exactly.

        Raises:
            ValueError: there is no grid for num_steps, the noise or the batch has another shape, or
                the cache is full.
        """
        config = self.config
        grid = config.grid(num_steps or None)
        if anchor_ids.dim() != 1:
            raise ValueError(f"anchor_ids has shape {tuple(anchor_ids.shape)}, expected (batch,).")
        shape = (anchor_ids.shape[0], config.block_size, config.vocab_size)
        if noise is not None and (noise.shape != shape or num_draws > 1):
            raise ValueError(
                f"noise has shape {tuple(noise.shape)} (and num_draws is {num_draws}), expected"
                f" {shape} (and 1): batch, slots, vocabulary."
            )
        cache.require_rows(shape[0])
        positions = cache.positions(config.block_size + 1)
        anchor_embeds = call_module(embed_tokens, anchor_ids.unsqueeze(1))
        cache.write(self.anchor_entries(anchor_embeds, positions[:, :1]))
        slots = positions[:, 1:]
        rows, mask = (
            slots.repeat_interleave(num_draws, dim=0),
            cache.mask(slots[0].numel() * num_draws),
        )
        context = cache.context(cache.length + 1)
        embedding = self.dense_embedding(embed_tokens)
        state: Tensor | BankState | None = None
        if noise is not None:
            state = noise.to(device=self.device, dtype=torch.float32)
        else:
            seeds = torch.tensor(draw_seeds(shape[0], seed, generator), device=self.device)
            if len(grid) > 2 and jump_bank_size:
                bank = self.noise_bank(embedding, num_steps, jump_bank_size)
                ops = select_ops(embedding.device, self.dtype, "eager")
                state = BankState(bank, embedding, ops, seeds, slots, num_draws)
            elif len(grid) > 2:
                state = block_noise(seeds, slots, config.vocab_size, num_draws, torch.float32)
        for s, t in pairwise(grid):
            if state is None:
                inputs = self._first_inputs(seeds, slots, embedding, num_draws)
            else:
                inputs = self._state_inputs(state, s, t, embedding).view(*rows.shape, -1)
            hidden = self(inputs, self.time_conditioning(s, t), rows, context, mask)
            logits = head_logits(config, lm_head, hidden, anchor_embeds.dtype)
            if state is None or t == 1.0:
                continue
            if isinstance(state, Tensor):
                delta = torch.softmax(logits.to(self.device), dim=-1, dtype=torch.float32)
                state = advance(state, delta, s, t)
            else:
                state.advance(logits.flatten(0, 1), s, t)
        return logits if num_draws == 1 else logits.unflatten(0, (-1, num_draws))

    def heeds_noise(self, num_steps: int | None = None) -> bool:
        """Whether drafts can depend on the noise.

        Not so if one jump is made and what the noise adds to its inputs, `noise_gate` times a norm
        of the weight's size, is below one rounding step of bfloat16 beside the rest. Between jumps
        noise also enters by the state's own distribution.
        """
        added = self.noise_gate.float() * self.noise_norm.weight.float().square().mean().sqrt()
        rest = self.state_norm.weight.float().square().mean().sqrt()
        several = len(self.config.grid(num_steps or None)) > 2
        return several or bool(added.abs() > _BFLOAT16_STEP * rest)

    def _state_inputs(
        self, state: Tensor | BankState, s: float, t: float, embedding: Tensor
    ) -> Tensor:
        """Inputs of a jump in a draft of several, one for each slot."""
        if isinstance(state, Tensor):
            return self.embed_state(state, s, t, embedding)
        mean, embeds = state.projections(self.dtype)
        if mean is None:
            mean, _ = self.target_constants(embedding)
        return self.mix_state(mean, embeds, s, t)

    def noise_bank(self, embedding: Tensor, num_steps: int | None, size: int) -> NoiseBank:
        """The bank of `size` draws for the target's `embedding` (V, H) and the jumps of a draft."""
        grid = tuple(self.config.grid(num_steps or None))
        return self._bank_memo.get(
            (grid, size), [owner(embedding)], lambda: noise_bank(embedding, grid, size)
        )

    def _first_inputs(
        self, seeds: Tensor, positions: Tensor, embedding: Tensor, num_draws: int
    ) -> Tensor:
        """Inputs of the single jump from 0 to 1, its noise drawn in the target's hidden width."""
        uniform, factor = self.target_constants(embedding)
        width = self.config.target_hidden_size
        noise = block_noise(seeds, positions, width, num_draws, self.dtype)
        return self.mix_state(uniform, noise @ factor.T, 0.0, 1.0)

    def dense_embedding(self, embed_tokens: nn.Module) -> Tensor:
        """The first V rows of the target's embedding; rows of a packed one are looked up once."""
        rows, width = self.config.vocab_size, self.config.target_hidden_size
        dense = dense_embedding(embed_tokens, width)
        if dense is not None:
            return dense[:rows]
        sources: list[Tensor | nn.Module] = [embed_tokens]
        for tensor in (*embed_tokens.parameters(), *embed_tokens.buffers()):
            if not tensor.is_meta:  # offloaded weights are other tensors after every call
                sources.append(tensor)
        return self._embedding_memo.get(rows, sources, lambda: look_up_rows(embed_tokens, rows))

    # The target

    def check_target(self, target: PreTrainedModel) -> None:
        """Raise ValueError if this drafter cannot draft for `target`; warn of what costs speed."""
        check_target(self.config, target)

    def target_features(self, target: PreTrainedModel) -> AbstractContextManager[FeatureTap]:
        """Context manager that watches the tapped layers of `target`.

        Calling what it yields gives the features (B, m, n H) of the newest forward pass, in the
        order of the taps.
        """
        return FeatureTap(target, self.config.target_layer_ids)

    def select_target_hidden(self, hidden_states: Sequence[Tensor]) -> Tensor:
        """Features (B, m, n H) from transformers' tuple of hidden states.

        Raises:
            ValueError: the tuple is too short, or a tap is on the last layer.
        """
        return select_hidden(hidden_states, self.config.target_layer_ids)

    def new_past(self) -> FlashMapPast:
        """An empty past for `spec_generate`: what a conversation keeps between its turns."""
        return FlashMapPast()

    # The loop, documented where it is written.
    spec_generate = spec_generate
    stream_generate = stream_generate
    flashmap_decoding = staticmethod(flashmap_decoding)

    # transformers

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self._forget()
        return super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]

    def train(self, mode: bool = True) -> Any:
        """Set training mode, and forget what was computed from weights that are about to change."""
        self._forget()
        return super().train(mode)

    def _forget(self) -> None:
        self._modulation_memo.clear()
        self._constant_memo.clear()
        self._bank_memo.clear()
        self._embedding_memo.clear()
        self.round_store.clear()

    def _init_weights(self, module: nn.Module) -> None:
        # Weights found in a checkpoint carry a mark; a module with some of them missing must keep
        # the others.
        for name, weight in module.named_parameters(recurse=False):
            if getattr(weight, "_is_hf_initialized", False):
                continue
            if isinstance(module, ZeroLinear) or name == "bias":
                nn.init.zeros_(weight)
            elif isinstance(module, nn.Linear):
                nn.init.normal_(weight, std=0.02)
            else:
                nn.init.ones_(weight)
