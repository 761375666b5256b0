"""The drafter that an engine is to serve, before anything of it is loaded: its configuration, and
whether this target and these options fit it."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import PretrainedConfig
from transformers.utils.hub import cached_file

from flashmap.modeling.configuration_flashmap import FlashMapConfig
from flashmap.release.foreign import own_fields, translate
from flashmap.vocabulary import FILE, read_draft_vocab

from .options import DraftOptions

ARCHITECTURE = "FlashMapDraftModel"
KIND = "flashmap"  # model_type of a release, speculators_model_type of a speculators checkpoint
_TABLES = "speculators_model_type"  # such checkpoints keep the table among the weights
_POSITIONS = 131072  # where a release does not say: the drafter has no limit of its own


def is_flashmap(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json is a FlashMap drafter's, in either vocabulary."""
    return KIND in (raw.get("model_type"), raw.get("speculators_model_type"))


def read_config(model: str, revision: str | None) -> dict[str, Any]:
    """The config.json of a folder or a Hub id; OSError if there is none."""
    raw: dict[str, Any] = PretrainedConfig.get_config_dict(model, revision=revision)[0]
    return raw


def draft_config(raw: Mapping[str, Any]) -> FlashMapConfig:
    """The drafter's own configuration.

    Raises:
        ValueError: the release is of a flow whose jumps were not trained, or a field is not valid.
    """
    fields, _ = translate(raw)
    if fields.get("flow_map") is False:
        raise ValueError(
            "flow_map is false in config.json: this checkpoint is of training's first stage, whose"
            " jumps are not trained. Serve the checkpoint of the last stage."
        )
    config: FlashMapConfig = FlashMapConfig.from_dict(fields)
    return config


def common_fields(config: FlashMapConfig) -> dict[str, Any]:
    """What the engines' configurations of a draft hold; `flashmap` in it is the drafter's own."""
    same = (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "vocab_size",
        "rms_norm_eps",
        "target_hidden_size",
        "block_size",
    )
    return {name: getattr(config, name) for name in same} | {
        "architectures": [ARCHITECTURE],
        "num_key_value_heads": config.num_attention_heads,
        "head_dim": config.head_size,
        "hidden_act": "gelu",
        "tie_word_embeddings": False,
        "max_position_embeddings": getattr(config, "max_position_embeddings", None) or _POSITIONS,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "draft_vocab_size": getattr(config, "draft_vocab_size", None) or config.vocab_size,
        KIND: {name: getattr(config, name) for name in own_fields()},
    }


def check_target(config: FlashMapConfig, text: Any, model: str) -> None:
    """Raise ValueError unless the target `model`, configured as `text`, has the vocabulary, the
    width and the layers that the drafter was trained on."""
    layers = text.num_hidden_layers
    if text.vocab_size < config.vocab_size:
        found = f"drafts from {config.vocab_size} tokens and the target has {text.vocab_size}"
    elif text.hidden_size != config.target_hidden_size:
        found = f"reads states of {config.target_hidden_size} numbers, not {text.hidden_size}"
    elif config.target_layer_ids[-1] >= layers:
        found = f"reads layer {config.target_layer_ids[-1]} and the target's last is {layers - 1}"
    else:
        return
    raise ValueError(
        f"This FlashMap drafter {found}: it was trained for {config.target_model}, and {model} is"
        " another model."
    )


def check_one_gpu(name: str, size: int, flag: str) -> None:
    """Raise ValueError unless the setting `name`, that `flag` sets, keeps the target on one GPU."""
    if size != 1:
        raise ValueError(
            f"{name} is {size}: a FlashMap drafter reads the target's whole embedding and"
            f" vocabulary head, so it serves a target on one GPU. Give {flag} 1."
        )


def check_vocabulary(
    config: FlashMapConfig,
    options: DraftOptions,
    raw: Mapping[str, Any],
    model: str,
    revision: str | None,
) -> None:
    """Raise ValueError if fewer tokens are to be drafted than there are and nothing says which."""
    stated = getattr(config, "draft_vocab_size", None)
    size = options.draft_vocab_size or stated or config.vocab_size
    if size > config.vocab_size:
        raise ValueError(
            f"draft_vocab_size is {size}, and the drafter knows {config.vocab_size} tokens."
        )
    tables = _TABLES in raw and size == stated
    if size < config.vocab_size and not tables and ranking_file(model, revision) is None:
        raise ValueError(
            f"{size} of {config.vocab_size} tokens are to be drafted and {model} holds no {FILE},"
            " which says which: make it with `flashmap release vocab`, or fetch the release again."
        )


def ranking_file(model: str, revision: str | None) -> str | None:
    """Path of a release's ranking of tokens, None if it has none."""
    path: str | None = cached_file(
        model, FILE, revision=revision, _raise_exceptions_for_missing_entries=False
    )
    return path


def likeliest_tokens(size: int, model: str, revision: str | None) -> Tensor:
    """The first `size` tokens of a release's ranking, rising; `check_vocabulary` has found it."""
    path = ranking_file(model, revision)
    assert path is not None
    return read_draft_vocab(path)[:size].sort().values
