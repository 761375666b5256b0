"""A target's layers in few operations while its pass is captured: transformers writes a norm as
eight and a layer's attention as thirty, and on a GPU each of them costs more than its numbers do.

Which modules can be replaced is found out from their numbers, so that one with another formula
keeps its own.

Legend: B sequences, m tokens of a pass, H hidden width, A heads, d head width.
"""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .select_flashmap import Ops, select_ops
from .static_flashmap import StaticLayer, static_attention, static_cache

Replacement = tuple[Any, Callable[..., Any]]
Fused = dict[Any, Callable[..., Any]]
Inputs = tuple[tuple[Any, ...], dict[str, Any]]
# Largest difference from a norm's own output, relative to the largest number: one rounding step.
_STEPS = {torch.float32: 1e-5, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
_MORE_STEPS = 4  # of a whole branch, which rounds several times
_PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")  # of a decoder layer

# What a module of another make raises when it is tried.
_REFUSALS = (TypeError, ValueError, AttributeError, IndexError, KeyError, RuntimeError)


@torch.no_grad()
def fused_modules(target: PreTrainedModel, num_tokens: int = 3) -> list[Replacement]:
    """Modules of `target` that fused operations compute, each with the function that does; tried on
    a pass of `num_tokens`, so that what a kernel compiles for them serves the passes to come."""
    fused = _alike(_norms(target), _norm_input, 1)
    with static_attention(target):
        for candidates, make_input in (
            (_attentions, _attention_input), (_mlps, _mlp_input), (_layers, _layer_input)
        ):  # fmt: skip
            make = partial(make_input, num_tokens=num_tokens)
            fused += _alike(candidates(target, dict(fused)), make, _MORE_STEPS)
    return fused


def _alike(
    candidates: Iterator[Replacement], make_input: Callable[[Any], Inputs], num_steps: int
) -> list[Replacement]:
    """Those candidates that compute what their module does."""
    found, same = [], []
    for module, function in candidates:
        outputs = []
        try:
            for version in (module, function):
                arguments, named = make_input(module)
                outputs.append(version(*arguments, **named))
            own, ours = (out[0] if isinstance(out, tuple) else out for out in outputs)
            difference = (ours - own).abs().max()
        except _REFUSALS:
            continue
        if type(outputs[0]) is not type(outputs[1]):
            continue
        found.append((module, function))
        same.append(difference <= num_steps * _STEPS[own.dtype] * own.abs().max())
    kept = torch.stack(same).tolist() if same else []
    return [pair for pair, is_same in zip(found, kept, strict=True) if is_same]


def _wave(like: Tensor, *shape: int) -> Tensor:
    """Numbers in -1 .. 1, none of them drawn."""
    size = torch.Size(shape).numel()
    wave = torch.arange(size, device=like.device).sin()
    return wave.view(shape).to(like.dtype)


# Norms


def _norms(target: PreTrainedModel) -> Iterator[Replacement]:
    for module in target.modules():
        weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
        if weight is not None and eps is not None and _is_plain(module):
            norm = select_ops(weight.device, weight.dtype).target_norm
            yield module, partial(norm, weight=weight, eps=eps)


def _norm_input(module: Any) -> Inputs:
    return (_wave(module.weight, 2, len(module.weight)),), {}


# Layers and their branches


def _is_plain(module: Any) -> bool:
    """Whether nobody has changed how a module with a weight computes."""
    return module.weight.dtype in _STEPS and "forward" not in vars(module)


def _is_bare(module: Any, fused: Fused) -> bool:
    """Whether a replaced module has no hook, which would go with the call that is left out."""
    return module in fused and not (module._forward_hooks or module._forward_pre_hooks)


def _are_linear(modules: list[Any]) -> bool:
    """Whether modules are linear layers and nothing more: no adapter, no other number format."""
    return all(
        type(module) is nn.Linear
        and _is_plain(module)
        and not (module._forward_hooks or module._forward_pre_hooks)
        for module in modules
    )


def _attentions(target: PreTrainedModel, fused: Fused) -> Iterator[Replacement]:
    for module in target.modules():
        linears = [getattr(module, f"{name}_proj", None) for name in "qkvo"]
        norms = [getattr(module, name, None) for name in ("q_norm", "k_norm")]
        if "forward" in vars(module) or not _are_linear(linears):
            continue
        if getattr(module, "layer_idx", None) is None or getattr(module, "head_dim", 1) % 2:
            continue
        if norms == [None, None]:
            yield module, FusedAttention(module, linears, None)
        elif all(_is_bare(norm, fused) for norm in norms):
            yield module, FusedAttention(module, linears, norms)


class FusedAttention:
    """An attention layer onto a static cache in four or five operations.

    Args:
        module: the layer of transformers.
        linears: its projections to queries, keys, values and out of the heads.
        norms: its norms of queries and keys; None: it has none.
    """

    def __init__(self, module: Any, linears: list[Any], norms: list[Any] | None) -> None:
        self._index: int = module.layer_idx
        self._weights = [linear.weight for linear in linears]
        self._biases = [linear.bias for linear in linears]
        self._norms = None if norms is None else [norm.weight for norm in norms]
        self._eps = 0.0 if norms is None else norms[0].variance_epsilon
        self._ops: Ops = select_ops(self._weights[0].device, self._weights[0].dtype)

    def __call__(self, hidden_states: Tensor, *args: Any, **named: Any) -> tuple[Tensor, None]:
        """The layer's output (B, m, H), as transformers calls it; the mask is as in
        `static_attention`."""
        out = self._attend(hidden_states, *args, **named)
        return self._ops.linears(out, self._weights[3:], self._biases[3:])[0], None

    def added_to(self, base: Tensor, x: Tensor, **named: Any) -> Tensor:
        """The output of `x` added to `base`, both (B, m, H)."""
        out: Tensor = self._ops.add_linear(
            base, self._attend(x, **named), self._weights[3], self._biases[3]
        )
        return out

    def _attend(
        self,
        x: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor,
        **named: Any,
    ) -> Tensor:
        """What the heads found (B, m, A d)."""
        cache = named["cache"] if "cache" in named else named["past_key_values"]
        layer: StaticLayer = cache.layers[self._index]
        assert layer.keys is not None and layer.values is not None
        qkv = self._ops.linears(x, self._weights[:3], self._biases[:3])
        query = self._ops.rotate_into(
            qkv, self._norms, self._eps, position_embeddings, layer.places, layer.keys, layer.values
        )
        lengths = attention_mask.flatten()
        out: Tensor = self._ops.context_attention(query, layer.keys, layer.values, lengths, True)
        return out.flatten(2)


def _attention_input(module: Any, num_tokens: int) -> Inputs:
    weight, dim = module.q_proj.weight, module.head_dim
    shape = (1, module.k_proj.out_features // dim, 2 * num_tokens, dim)
    places = torch.arange(num_tokens, device=weight.device) + 1  # behind an entry that is all zeros
    entries = [(weight.new_zeros(shape), weight.new_zeros(shape))] * (module.layer_idx + 1)
    cosine, sine = _wave(weight, 2, 1, num_tokens, dim).unbind()
    # transformers 5.24 renamed the argument.
    known = inspect.signature(type(module).forward).parameters
    return (_wave(weight, 1, num_tokens, module.q_proj.in_features),), {
        "position_embeddings": (cosine, sine),
        "attention_mask": places.new_ones(1, 1, 1, 1),
        "cache" if "cache" in known else "past_key_values": static_cache(entries, places[None]),
    }


def _mlps(target: PreTrainedModel, fused: Fused) -> Iterator[Replacement]:
    for module in target.modules():
        linears: list[Any] = [
            getattr(module, f"{name}_proj", None) for name in ("gate", "up", "down")
        ]
        fits = _are_linear(linears) and all(linear.bias is None for linear in linears)
        if fits and "forward" not in vars(module):
            yield module, FusedMLP(*(linear.weight for linear in linears))


class FusedMLP:
    """A feed-forward branch with a silu gate in two operations, of weights (wide, H), (wide, H) and
    (H, wide)."""

    def __init__(self, gate: Tensor, up: Tensor, down: Tensor) -> None:
        self._gate, self._up, self._down = gate, up, down
        self._ops: Ops = select_ops(gate.device, gate.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """The branch's output (B, m, H)."""
        wide = self._ops.gated_linear(x, self._gate, self._up)
        out: Tensor = self._ops.linears(wide, [self._down], [None])[0]
        return out

    def added_to(self, base: Tensor, x: Tensor) -> Tensor:
        """The output of `x` added to `base`, both (B, m, H)."""
        wide = self._ops.gated_linear(x, self._gate, self._up)
        out: Tensor = self._ops.add_linear(base, wide, self._down, None)
        return out


def _mlp_input(module: Any, num_tokens: int) -> Inputs:
    return (_wave(module.gate_proj.weight, 1, num_tokens, module.gate_proj.in_features),), {}


def _layers(target: PreTrainedModel, fused: Fused) -> Iterator[Replacement]:
    for module in target.modules():
        parts = [getattr(module, name, None) for name in _PARTS]
        if "forward" not in vars(module) and all(_is_bare(part, fused) for part in parts):
            replaced: list[Any] = [fused[part] for part in parts]
            yield module, partial(_layer, *replaced)


def _layer(
    first_norm: Callable[..., Tensor],
    attention: FusedAttention,
    second_norm: Callable[..., Tensor],
    mlp: FusedMLP,
    hidden_states: Tensor,
    *,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor,
    **named: Any,
) -> Tensor:
    """A decoder layer whose branches add themselves to the stream (B, m, H)."""
    named |= {"position_embeddings": position_embeddings, "attention_mask": attention_mask}
    middle = attention.added_to(hidden_states, first_norm(hidden_states), **named)
    return mlp.added_to(middle, second_norm(middle))


def _layer_input(module: Any, num_tokens: int) -> Inputs:
    return _attention_input(module.self_attn, num_tokens)
