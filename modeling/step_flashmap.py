"""One drafting step with the weights folded and the operations fused: what every fast path runs,
here and inside the serving engines.

Nothing in it waits for the device, shapes depend on the number of sequences and of context rows
alone, and lengths are device tensors: a call can be captured in a CUDA graph. Where keys and values
lie is the context's business: `DenseContext` keeps them in one tensor, an engine in its pages.

Legend: B sequences, M noise draws, G = B M blocks, K slots, V vocabulary, S draft vocabulary, H
target hidden width, D drafter width, L layers, A heads, d head width, T context rows, n H features.
"""

from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .folds_flashmap import (
    JumpFold,
    LayerFold,
    context_fold,
    draft_tokens,
    head_fold,
    jump_folds,
    layer_fold,
    noise_fold,
)
from .fused_flashmap import rope_table
from .linear_flashmap import Fp8Linear, Linear
from .reference_flashmap import KvLayout, kv_layout
from .select_flashmap import select_ops
from .states_flashmap import TOP, BankState, State, WholeState, check_bank


class ContextRows(NamedTuple):
    """What becomes context entries: target features (T, n H) of committed tokens, or embeddings
    (T, H) of anchors; their positions (T), and their slots (T), below 0 for rows to skip.
    `combined`: features went through `FusedStep.combine` already."""

    inputs: Tensor
    positions: Tensor
    slots: Tensor
    combined: bool = False


class Context(Protocol):
    """Where the keys and values of the committed tokens are."""

    def write(self, kv: Tensor, positions: Tensor, slots: Tensor) -> None: ...

    def attend(self, layer: int, query: Tensor) -> Tensor: ...

    def layout(self) -> KvLayout: ...


class FusedStep:
    """A drafter and its target's vocabulary, ready to draft; a snapshot of their weights.

    Args:
        model: the `FlashMapDraftModel`.
        embedding: the target's embedding (V, H), on the drafter's device.
        lm_head: the target's vocabulary head.
        max_length: positions that anchors may have: 0 .. max_length - 1.
        num_steps: jumps a draft; None takes the configuration's.
        token_ids: sorted tokens (S) that may be drafted; None: all V.
        kernels: see `select_ops`.
        fp8_weights: keep the large weights in eight bits.
        fold_noise: draw a one-jump draft's noise through the eigenvectors of E^T E, in one product
            less. Same distribution, other numbers than the model's own.
        jump_bank_size: draws of noise that are kept for drafts in several jumps, see
            `states_flashmap`; 0: exact jumps, over the whole vocabulary.
        jump_topk: tokens of each jump's prediction that go on with a bank.

    Raises:
        ValueError: there is no grid for num_steps, the target's head cannot be folded, the noise
            fold is asked for with several jumps, drafter and target are on different devices, or
            tokens, kernels, eight bits or the bank cannot be served.
    """

    @torch.no_grad()
    def __init__(
        self,
        model: Any,
        embedding: Tensor,
        lm_head: nn.Module,
        max_length: int,
        *,
        num_steps: int | None = None,
        token_ids: Tensor | None = None,
        kernels: str = "auto",
        fp8_weights: bool = False,
        fold_noise: bool = False,
        jump_bank_size: int = 0,
        jump_topk: int = TOP,
    ) -> None:
        self.config = config = model.config
        grid = config.grid(num_steps)
        if fold_noise and len(grid) > 2:
            raise ValueError(
                f"fold_noise serves one jump, num_steps asks for {len(grid) - 1}: turn it off."
            )
        device: torch.device = model.device
        if embedding.device != device:
            raise ValueError(
                f"The target's embedding is on {embedding.device} and the drafter on {device}: the"
                " fused step needs both on one device."
            )
        self._dtype: torch.dtype = model.dtype
        self.ops = ops = select_ops(device, self._dtype, kernels)

        def linear(weight: Tensor, bias: Tensor | None) -> Linear:
            if fp8_weights:
                return Fp8Linear(weight, bias, ops.quantize_rows)
            return few_rows(weight, bias)

        few_rows = partial(Linear, multiply=ops.linears)
        self.jumps: list[JumpFold] = jump_folds(model, grid)
        self.layers: list[LayerFold] = [layer_fold(layer, linear) for layer in model.layers]
        positions = torch.arange(max_length + config.block_size + 1, device=device)
        self.rope = rope_table(positions, config.head_size, config.rope_theta)
        self._block = positions[1 : config.block_size + 1]
        self._features, self._hidden_norm = linear(model.fc.weight, None), model.hidden_norm.weight
        self._anchor = few_rows(model.anchor_proj.weight, model.anchor_proj.bias)
        self._anchor_norm = model.anchor_norm.weight
        weight, self._key_norm = context_fold(model.layers)
        self._key_value = linear(weight, None)

        self.embedding = embedding
        uniform, self._factor = model.target_constants(embedding)
        self._base = model.state_norm(uniform.to(device, self._dtype))
        self._state_norm, self._noise_norm = model.state_norm.weight, model.noise_norm.weight
        self._x_embed = few_rows(model.x_embed.weight, model.x_embed.bias)
        self._noise = noise_fold(model, embedding, self._base, few_rows) if fold_noise else None
        check_bank(jump_bank_size, jump_topk)
        has_bank = jump_bank_size > 0 and len(self.jumps) > 1
        self._bank = model.noise_bank(embedding, num_steps, jump_bank_size) if has_bank else None
        self._top = jump_topk

        self.token_ids = draft_tokens(token_ids, config, device)
        head = head_fold(model.head, lm_head, self.token_ids)
        self._head, self._head_dtype = linear(*head), head[0].dtype
        self._full_head = self._head
        if token_ids is not None and len(self.jumps) > 1 and not has_bank:
            everything = draft_tokens(None, config, device)
            self._full_head = linear(*head_fold(model.head, lm_head, everything))

    # The context

    @torch.no_grad()
    def combine(self, features: Tensor) -> Tensor:
        """Rows (T, D) for target features (T, n H): what an engine keeps of them until it writes
        the context."""
        rows = self._features(features.to(self._dtype))
        combined: Tensor = self.ops.rms_norm(rows, self._hidden_norm, self._eps)
        return combined

    @torch.no_grad()
    def write(
        self, context: Context, new: ContextRows | None = None, anchors: ContextRows | None = None
    ) -> None:
        """Write keys and values of committed tokens' features, of anchors' embeddings, or of both
        in one product. An anchor's entry holds until its features overwrite it."""
        hidden, rows = [], [part for part in (new, anchors) if part is not None]
        if new is not None:
            hidden.append(new.inputs if new.combined else self.combine(new.inputs))
        if anchors is not None:
            embeds = self._anchor(anchors.inputs.to(self._dtype))
            hidden.append(self.ops.rms_norm(embeds, self._anchor_norm, self._eps))
        kv = self._key_value(torch.cat(hidden))
        shape = (len(self.layers), 2, self.config.num_attention_heads, self.config.head_size)
        context.write(
            kv.view(-1, *shape),
            torch.cat([part.positions for part in rows]),
            torch.cat([part.slots for part in rows]),
        )

    def store(self, kv: Tensor, positions: Tensor, slots: Tensor, layout: KvLayout) -> None:
        """Norm and rotate the keys of `kv` (T, L, 2, A, d) and store it: what a context's `write`
        calls with its layout."""
        eps = self.config.qk_norm_eps
        self.ops.write_context(kv, positions, slots, self._key_norm, eps, self.rope, layout)

    # The draft

    @torch.no_grad()
    def hidden(
        self,
        context: Context,
        positions: Tensor,
        *,
        seeds: Tensor | None = None,
        noise: Tensor | None = None,
        num_draws: int = 1,
    ) -> Tensor:
        """Hidden states (G, K, D) of the blocks after anchors at `positions` (B), whose entries are
        in the context; `logits` takes them.

        Args:
            context: keys and values of the positions up to each anchor's.
            positions: of the anchors.
            seeds: int64 (B), from which the noise follows as in the model's `draft`.
            noise: starting states (G, K, V), float32, instead of seeds.
            num_draws: M draws a sequence, side by side.
        """
        slots = positions.unsqueeze(1) + self._block
        rows = slots.repeat_interleave(num_draws, dim=0).flatten()
        state = self._state(seeds, slots, noise, num_draws)
        for jump in self.jumps:
            if state is None:
                x = self._first(seeds, slots, num_draws, jump)
            else:
                posterior, embeds = state.projections(self._dtype)
                base = self._base
                if posterior is not None:
                    base = self.ops.rms_norm(posterior, self._state_norm, self._eps)
                x = self._x_embed(self._gated(embeds, jump, base))
            hidden = self._transform(x, jump, rows, context)
            if state is not None and jump.end < 1.0:
                logits = self._full_head(hidden.to(self._head_dtype)).flatten(0, 1)
                state.advance(logits, jump.start, jump.end)
        return hidden

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Draft logits (..., S) of `token_ids`, in the head's dtype, for hidden states (..., D)."""
        return self._head(hidden.to(self._head_dtype))

    @property
    def _eps(self) -> float:
        eps: float = self.config.rms_norm_eps
        return eps

    def _state(
        self, seeds: Tensor | None, slots: Tensor, noise: Tensor | None, num_draws: int
    ) -> State | None:
        """The state that a draft begins with; None where one jump needs none."""
        width = self.config.vocab_size
        if noise is None and len(self.jumps) > 1:
            if self._bank is not None:
                assert seeds is not None
                return BankState(
                    self._bank, self.embedding, self.ops, seeds, slots, num_draws, self.token_ids,
                    self._top,
                )  # fmt: skip
            noise = self.ops.block_noise(seeds, slots, width, num_draws, torch.float32)
        if noise is None:
            return None
        return WholeState(self.ops, self.embedding, noise.flatten(0, 1))

    def _first(self, seeds: Tensor | None, slots: Tensor, num_draws: int, jump: JumpFold) -> Tensor:
        """The first hidden state (G K, D) of a one-jump draft, its noise drawn in the target's
        hidden width."""
        dtype, width = self._dtype, self.config.target_hidden_size
        if self._noise is None:
            z = self.ops.block_noise(seeds, slots, width, num_draws, dtype).flatten(0, 1)
            return self._x_embed(self._gated(z @ self._factor.T, jump, self._base))
        z = self.ops.block_noise(seeds, slots, width, num_draws, torch.float32).flatten(0, 1)
        inverse_rms = torch.rsqrt((z.square() @ self._noise.spread) + self._eps)
        scale = jump.noise_gate.float() * inverse_rms.unsqueeze(1)
        product = self._noise.matrix(z.to(dtype)).float()
        return (self._noise.base.float() + scale * product).to(dtype)

    def _gated(self, embeds: Tensor, jump: JumpFold, base: Tensor) -> Tensor:
        gate, eps = jump.noise_gate, self._eps
        inputs: Tensor = self.ops.gated_norm(embeds, self._noise_norm, eps, gate, base)
        return inputs

    def _transform(self, x: Tensor, jump: JumpFold, positions: Tensor, context: Context) -> Tensor:
        """The DiT on rows (G K, D) at `positions` (G K): (G, K, D), after the last norm."""
        ops, config = self.ops, self.config
        eps, qk_eps = config.layer_norm_eps, config.qk_norm_eps
        heads = (config.num_attention_heads, config.head_size)
        blocks = (-1, config.block_size)
        norms, gates = iter(jump.norms), iter(jump.gates)
        h: Tensor = ops.adaln(x, *next(norms), eps)
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv(h).view(*blocks, 3, *heads)
            out = ops.block_attention(
                qkv, layer.q_norm, layer.k_norm, qk_eps, self.rope, positions
            ).reshape(x.shape)
            x, h = ops.gated_adaln(x, layer.self_o(out), next(gates), *next(norms), eps)
            query = layer.cross_q(h).view(-1, *heads)
            query = ops.norm_rope(query, layer.cross_q_norm, qk_eps, self.rope, positions)
            out = context.attend(index, query.view(*blocks, *heads)).reshape(x.shape)
            x, h = ops.gated_adaln(x, layer.cross_o(out), next(gates), *next(norms), eps)
            out = layer.fc2(F.gelu(layer.fc1(h)))
            x, h = ops.gated_adaln(x, out, next(gates), *next(norms), eps)
        return h.view(*blocks, h.shape[-1])


class DenseContext:
    """A context in one tensor `kv` (L, 2, B, A, T, d), that of a `FlashMapCache`.

    `lengths` (B), int64 on the device, is how many entries of each sequence are committed; the
    entry after them is the anchor's. Change it in place.
    """

    def __init__(self, step: FusedStep, kv: Tensor, lengths: Tensor) -> None:
        self.kv, self.lengths = kv, lengths
        self._step = step
        keys, values = kv.transpose(3, 4).unbind(dim=1)
        self._layout = kv_layout(list(keys), list(values))

    def slots(self, positions: Tensor) -> Tensor:
        """Slots of `positions` (B, m) of each sequence; -1 beyond the capacity."""
        capacity = self.kv.shape[4]
        first = torch.arange(len(positions), device=positions.device).unsqueeze(1) * capacity
        return (first + positions).masked_fill(positions >= capacity, -1)

    def write(self, kv: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Store projected rows (T, L, 2, A, d) at `slots`."""
        self._step.store(kv, positions, slots, self._layout)

    def attend(self, layer: int, query: Tensor) -> Tensor:
        """Attend from `query` (G, K, A, d) to the committed entries and the anchor's."""
        key, value = self.kv[layer]
        out: Tensor = self._step.ops.context_attention(query, key, value, self.lengths)
        return out

    def layout(self) -> KvLayout:
        """Where the entries are."""
        return self._layout
