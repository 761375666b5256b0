"""What the drafter needs of a target model: its layers' outputs, its embedding, its vocabulary
head.

Targets differ in where they keep their decoder layers and in how their weights are stored and
placed. All of that is found out here, from the model itself, so that the decoding loop reads the
same for every target.

Legend: B sequences, m positions of a forward pass, n tapped layers, H target hidden width, V
vocabulary.
"""

import inspect
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from .configuration_flashmap import FlashMapConfig

logger = logging.getLogger(__name__)
_PLAIN_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_ATTENTION_LAYERS = ("full_attention", "sliding_attention", "chunked_attention", "attention")
_LOOK_UP_ROWS = 8192
_MASKED_ATTENTION = ("sdpa", "eager")
# transformers 5 caches record what is needed to drop their newest entries again.
RECORDS_PAST = hasattr(transformers.DynamicCache, "activate_past_recording")
_warned: set[str] = set()


def warn_once(message: str) -> None:
    """Log a warning the first time it is given in this process."""
    if message not in _warned:
        _warned.add(message)
        logger.warning(message)


# Calling the target's modules where they are


def weight_dtype(module: nn.Module) -> torch.dtype | None:
    """Dtype of the module's weight if that is an ordinary floating-point one, else None (packed and
    quantised weights).
    """
    dtype = getattr(getattr(module, "weight", None), "dtype", None)
    return dtype if dtype in _PLAIN_DTYPES else None


def module_device(module: nn.Module) -> torch.device:
    """Where `module` computes: accelerate's execution device for dispatched or offloaded modules,
    else its weights'.
    """
    execution_device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
    if execution_device is not None:
        return torch.device(execution_device)
    stored = next(
        (tensor for tensors in (module.parameters(), module.buffers()) for tensor in tensors), None
    )
    return stored.device if stored is not None else torch.device("cpu")


def call_module(module: nn.Module, x: Tensor) -> Tensor:
    """Call one of the target's modules on `x`, moved to where the module computes."""
    result: Tensor = module(x.to(module_device(module)))
    return result


def dense_embedding(embed_tokens: nn.Module, width: int) -> Tensor | None:
    """The embedding's weight (rows, `width`) if it lies in memory as plain numbers, else None."""
    weight = getattr(embed_tokens, "weight", None)
    if not isinstance(weight, Tensor) or weight.is_meta or weight_dtype(embed_tokens) is None:
        return None
    return weight if weight.dim() == 2 and weight.shape[1] == width else None


@torch.no_grad()
def look_up_rows(embed_tokens: nn.Module, num_rows: int) -> Tensor:
    """Embeddings (num_rows, H) of the ids 0, 1, ..., for embeddings that are packed, quantised or
    offloaded.

    Raises:
        ValueError: the module cannot be called on token ids, or returns something else than one row
            a token.
    """
    name = type(embed_tokens).__name__
    try:
        chunks = [
            call_module(embed_tokens, ids) for ids in torch.arange(num_rows).split(_LOOK_UP_ROWS)
        ]
        rows = torch.cat(chunks)
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as error:
        raise ValueError(
            f"The target's embedding ({name}) holds no dense weight and cannot be looked up for"
            f" {num_rows} ids ({error}): load the target with its embedding unquantised."
        ) from error
    if rows.dim() != 2 or not rows.is_floating_point():
        raise ValueError(
            f"The target's embedding ({name}) returns {tuple(rows.shape)} {rows.dtype} for"
            f" {num_rows} ids, expected one floating-point row an id: load the target with its"
            " embedding unquantised."
        )
    return rows


def num_embedding_rows(target: PreTrainedModel) -> int:
    """Number of token ids that the target's embedding knows, padding rows included."""
    rows: int = (
        getattr(target.get_input_embeddings(), "num_embeddings", None)
        or text_config(target).vocab_size
    )
    return rows


def head_logits(
    config: FlashMapConfig, lm_head: nn.Module, hidden: Tensor, dtype: torch.dtype
) -> Tensor:
    """Logits (..., V) of the target's vocabulary head, which may be padded beyond V, for a
    drafter's outputs (..., H).

    A packed head says nothing of its inputs' dtype, so they get `dtype`, the activations' one.

    Raises:
        ValueError: the head has fewer rows than the drafter's vocabulary.
    """
    logits = call_module(lm_head, hidden.to(weight_dtype(lm_head) or dtype))
    if logits.shape[-1] < config.vocab_size:
        raise ValueError(
            f"The target's vocabulary head gives {logits.shape[-1]} logits and the drafter needs"
            f" {config.vocab_size}: this drafter was trained for another target"
            f" ({config.target_model})."
        )
    return logits[..., : config.vocab_size]


# Layers and features


def text_config(target: PreTrainedModel) -> Any:
    """Configuration of the target's language model, the inner one where the target has other parts
    too.
    """
    config = target.config
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def decoder_layers(target: PreTrainedModel) -> nn.ModuleList:
    """The target's decoder layers, in order, wherever its class keeps them.

    Raises:
        ValueError: there is no module list of the configured length, or more than one.
    """
    depth = getattr(text_config(target), "num_hidden_layers", None)
    root = target.get_decoder() if hasattr(target, "get_decoder") else target
    stacks: dict[str, nn.ModuleList] = {}
    for name, module in root.named_modules():  # parents come before their children
        nested = any(name.startswith(f"{outer}.") for outer in stacks)
        if isinstance(module, nn.ModuleList) and len(module) == depth and not nested:
            stacks[name] = module
    if len(stacks) != 1:
        raise ValueError(
            f"{type(target).__name__} has {len(stacks)} module lists of {depth} layers, expected"
            " one: its decoder layers cannot be told apart. Pass the language model itself as the"
            " target."
        )
    return stacks.popitem()[1]


def recurrent_layers(target: PreTrainedModel) -> list[str]:
    """Kinds of the target's layers that keep a state instead of entries; empty if it has none."""
    config = text_config(target)
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    found = sorted(set(kinds or []) - set(_ATTENTION_LAYERS))
    return found or ["recurrent"] * bool(getattr(target, "_is_stateful", False))


def layers_with_windows(target: PreTrainedModel) -> list[str]:
    """Kinds of the target's layers that do not see everything before them; empty if all do."""
    config = text_config(target)
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    if kinds is None:  # such configurations have one kind of layer, windowed if a window is set
        return ["sliding_attention"] * bool(getattr(config, "sliding_window", None))
    return sorted(set(kinds) - {"full_attention", "attention"})


def can_go_back(target: PreTrainedModel) -> bool:
    """Whether the target's cache can drop entries at any time, not only after a pass."""
    if RECORDS_PAST:
        return not layers_with_windows(target) and not recurrent_layers(target)
    return not recurrent_layers(target)


def mask_tables(target: PreTrainedModel) -> list[Tensor]:
    """What a target's attention modules keep of who sees whom, by entry of the cache: boolean (1,
    1, n, n), for n entries at most. Eager attention alone of GPT-2 and its kin goes by them."""
    if getattr(target.config, "_attn_implementation", None) != "eager":
        return []
    kept = [table for table in target.buffers() if table.dim() == 4 and table.dtype == torch.bool]
    square = [table for table in kept if table.shape == (1, 1, *[table.shape[-1]] * 2)]
    return [table for table in square if not table.is_meta]


def batch_obstacle(target: PreTrainedModel) -> str | None:
    """Why sequences that accept different numbers cannot share the target's cache; None if they
    can."""
    windows = layers_with_windows(target) or recurrent_layers(target)
    if not windows and not all(bool(table[0, 0, -1, 0]) for table in mask_tables(target)):
        windows = ["sliding_attention"]
    if windows:
        return f"has layers that do not see all tokens before them ({', '.join(windows)})"
    if "position_ids" not in inspect.signature(type(target).forward).parameters:
        return "takes no position_ids, so that it cannot tell a gap from a token"
    return None


def tree_obstacle(target: PreTrainedModel) -> str | None:
    """Why the target cannot verify a tree of drafts; None if nothing is known to speak against."""
    kind = getattr(target.config, "_attn_implementation", None)
    if kind not in _MASKED_ATTENTION:
        return f"runs {kind} attention, which takes no mask for a tree (sdpa and eager do)"
    return batch_obstacle(target)


def select_hidden(hidden_states: Sequence[Tensor], layer_ids: Sequence[int]) -> Tensor:
    """Outputs (B, m, n H) of decoder layers from transformers' tuple of hidden states.

    Entry i + 1 of that tuple is the output of layer i, but for the last layer, whose entry comes
    after the final norm.

    Raises:
        ValueError: the tuple is too short, or the last layer is asked for.
    """
    last = len(hidden_states) - 2
    if layer_ids[-1] >= last:
        raise ValueError(
            f"target_layer_ids {list(layer_ids)} cannot be read from {len(hidden_states)} hidden"
            f" states: entry i + 1 is the output of layer i for layers below {last} only (the last"
            " entry comes after the final norm). Use target_features."
        )
    return torch.cat([hidden_states[index + 1] for index in layer_ids], dim=-1)


@contextmanager
def forwards(replaced: Sequence[tuple[Any, Callable[..., Any]]]) -> Iterator[None]:
    """Lets modules compute by other functions, paired with them, for a while; their hooks stay."""
    try:
        for module, function in replaced:
            module.forward = function
        yield
    finally:
        for module, _ in replaced:
            vars(module).pop("forward", None)


class FeatureTap:
    """Watches the tapped decoder layers of a target; called, it gives the newest forward pass's
    features (B, m, n H).

    A context manager: hooks are registered on entry and removed on exit, exceptions included. Layer
    outputs are taken before any final norm. A pass is one of the thread that asks: others may run
    the target meanwhile.
    """

    def __init__(self, target: PreTrainedModel, layer_ids: Sequence[int]) -> None:
        layers = decoder_layers(target)
        self._layers = [layers[index] for index in layer_ids]
        self._by_thread: dict[int, dict[int, Tensor]] = {}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> "FeatureTap":
        for index, layer in enumerate(self._layers):
            self._handles.append(layer.register_forward_hook(self._hook(index)))
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._by_thread = [], {}

    def __call__(self) -> Tensor:
        """Features of the newest forward pass, in the order of the taps, on the first's device."""
        outputs = self._by_thread.get(threading.get_ident(), {})
        if len(outputs) != len(self._layers):
            raise RuntimeError(
                "No forward pass of the target has been seen: call it inside the context manager"
                " first."
            )
        first = outputs[0]
        if first.dim() != 3:
            raise ValueError(
                f"The target's decoder layers return {tuple(first.shape)}, expected (batch,"
                " positions, width): a drafter cannot be conditioned on such a model."
            )
        device = first.device
        return torch.cat([outputs[index].to(device) for index in range(len(self._layers))], dim=-1)

    def _hook(self, index: int) -> Any:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            outputs = self._by_thread.setdefault(threading.get_ident(), {})
            outputs[index] = output[0] if isinstance(output, tuple | list) else output

        return keep


# Checks


def check_target(config: FlashMapConfig, target: PreTrainedModel) -> None:
    """Raise ValueError if a drafter with `config` cannot draft for `target`; warn once about what
    only costs acceptance.
    """
    model_type = getattr(getattr(target, "config", None), "model_type", None)
    if not isinstance(target, nn.Module) or model_type == config.model_type:
        raise ValueError(
            f"target is a {type(target).__name__}, expected the causal language model that the"
            " drafter was trained for, as AutoModelForCausalLM loads it."
        )
    target_config = text_config(target)
    if getattr(target.config, "is_encoder_decoder", False):
        raise ValueError(
            f"{type(target).__name__} is an encoder-decoder model; the target must be a causal"
            " language model."
        )
    _check_embedding(config, target)
    layers = decoder_layers(target)
    depth = len(layers)
    if config.target_layer_ids[-1] >= depth:
        raise ValueError(
            f"target_layer_ids {config.target_layer_ids} needs at least"
            f" {config.target_layer_ids[-1] + 1} decoder layers, the target has {depth}: this"
            f" drafter was trained for another target ({config.target_model})."
        )
    for name in ("is_causal", "is_decoder"):
        values = {getattr(module, name, None) for module in layers.modules()}
        if False in values and True not in values:
            raise ValueError(
                f"{type(target).__name__} attends to later tokens ({name} is False): the target"
                " must be a causal language model; an encoder's decoder mode needs is_decoder=True."
            )
    recurrent = recurrent_layers(target)
    if recurrent and not RECORDS_PAST:
        raise ValueError(
            f"{type(target).__name__} has layers whose state transformers"
            f" {transformers.__version__} cannot roll back ({', '.join(recurrent)}): use"
            " transformers 5 or later, or a target with attention layers only."
        )
    expected = config.target_model.rstrip("/").rsplit("/", 1)[-1]
    found = str(getattr(target.config, "_name_or_path", "") or "").rstrip("/").rsplit("/", 1)[-1]
    if found and found.lower() != expected.lower():
        warn_once(
            f"The drafter was trained for {config.target_model!r} and the target calls itself"
            f" {found!r}: if they are not the same model, decoding stays exact but few drafts will"
            " be accepted."
        )
    softcap = getattr(target_config, "final_logit_softcapping", None) or getattr(
        target_config, "logit_scale", None
    )
    if softcap:
        warn_once(
            f"The target caps or scales its logits ({softcap}); drafts are made without, which"
            " costs only acceptance."
        )


def _check_embedding(config: FlashMapConfig, target: PreTrainedModel) -> None:
    embed_tokens, lm_head = target.get_input_embeddings(), target.get_output_embeddings()
    if embed_tokens is None or lm_head is None:
        raise ValueError(
            f"{type(target).__name__} has no token embedding or no vocabulary head; the target must"
            " be a causal language model, such as AutoModelForCausalLM loads."
        )
    rows = num_embedding_rows(target)
    width = getattr(embed_tokens, "embedding_dim", None) or text_config(target).hidden_size
    if width != config.target_hidden_size:
        raise ValueError(
            f"The target's embedding is {width} wide and the drafter expects"
            f" target_hidden_size={config.target_hidden_size}: this drafter was trained for another"
            f" target ({config.target_model})."
        )
    if rows < config.vocab_size:
        raise ValueError(
            f"The target's embedding has {rows} rows and the drafter's vocabulary"
            f" {config.vocab_size} tokens: this drafter was trained for another target"
            f" ({config.target_model}) or for a tokenizer with more tokens."
        )
