"""The drafter's weights as engines load them, and what the fused step is made of."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from flashmap.modeling.configuration_flashmap import FlashMapConfig
from flashmap.modeling.step_flashmap import FusedStep
from flashmap.release.tables import TABLES, TARGETS

from .options import DraftOptions

_RANKING = ("ids", "counts")  # of draft_vocab.safetensors, which lies beside the weights


def load_tensors(drafter: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Fill the drafter with its tensors by name; returns the tables of draftable tokens that lay
    among them.

    Raises:
        ValueError: a tensor is missing, unknown or of another shape.
    """
    own, tables = drafter.state_dict(), dict[str, Tensor]()
    problems, found = list[str](), set[str]()
    for name, tensor in weights:
        if name in TABLES:
            tables[name] = tensor.cpu()
        elif name not in own:
            problems += [] if name in (*TARGETS, *_RANKING) else [f"unknown: {name}"]
        elif own[name].shape != tensor.shape:
            shapes = f"{tuple(tensor.shape)}, expected {tuple(own[name].shape)}"
            problems.append(f"{name} is {shapes}")
        else:
            own[name].copy_(tensor)
        found.add(name)
    problems += [f"missing: {name}" for name in own if name not in found]
    if problems:
        raise ValueError(
            f"{len(problems)} tensors of the FlashMap drafter do not belong to its config.json"
            f" ({'; '.join(problems[:3])}): fetch or build the release again."
        )
    return tables


def fold_options(
    config: FlashMapConfig, options: DraftOptions, token_ids: Tensor | None
) -> dict[str, Any]:
    """The keyword arguments of `FusedStep` that the options ask for."""
    one_jump = len(config.grid(options.num_steps)) == 2
    return {
        "num_steps": options.num_steps,
        "token_ids": token_ids,
        "kernels": options.kernels,
        "fp8_weights": options.fp8_weights,
        "fold_noise": one_jump if options.fold_noise is None else options.fold_noise,
        "jump_bank_size": options.jump_bank_size,
        "jump_topk": options.jump_topk,
    }


def fold(
    drafter: Any,
    embed_tokens: Any,
    lm_head: Any,
    max_length: int,
    **options: Any,
) -> FusedStep:
    """The fused step of a drafter and its target's modules, of which the first V rows count;
    `options` are those of `FusedStep`.

    Raises:
        ValueError: the target's embedding or head is quantised, and see `FusedStep`.
    """
    embedding: Any = getattr(embed_tokens, "weight", None)
    if not _is_dense(embedding):
        raise ValueError(
            "The target's token embedding is quantised, and FlashMap draws its noise by it:"
            " load the target with its embedding unquantised."
        )
    embedding = embedding[: drafter.config.vocab_size]
    return FusedStep(drafter, embedding, dense_head(lm_head), max_length, **options)


def dense_head(lm_head: Any) -> nn.Module:
    """An engine's vocabulary head as a linear layer over the same weight, or as it is where it
    holds packed numbers, which `FusedStep` refuses."""
    weight: Any = getattr(lm_head, "weight", None)
    if not _is_dense(weight):
        module: nn.Module = lm_head
        return module
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
    bias = getattr(lm_head, "bias", None)
    if isinstance(bias, Tensor):
        linear.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return linear


def _is_dense(weight: Any) -> bool:
    return isinstance(weight, Tensor) and weight.is_floating_point() and weight.itemsize > 1


def spread_logits(logits: Tensor, token_ids: Tensor, vocab_size: int) -> Tensor:
    """Logits (rows, V) of draft logits (rows, S): minus infinity for tokens not drafted."""
    if logits.shape[-1] == vocab_size:
        return logits
    whole = logits.new_full((len(logits), vocab_size), float("-inf"))
    return whole.index_copy_(1, token_ids, logits)
