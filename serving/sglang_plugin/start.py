"""What cannot be served is refused while sglang reads its arguments, before any weight is
loaded."""

import functools
from collections.abc import Callable
from typing import Any

from flashmap.serving.drafter import (
    check_one_gpu,
    check_target,
    check_vocabulary,
    draft_config,
    is_flashmap,
    read_config,
)
from flashmap.serving.options import read_options

TREE_VERSIONS = ("0.5.20",)
KV_DTYPES = ("auto", "bf16", "bfloat16", "fp8_e4m3")


def checking(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `_handle_dspark`, which completes the arguments of a DSPARK server, so that it refuses
    what a FlashMap draft cannot do."""

    @functools.wraps(original)
    def wrapped(server_args: Any, *args: Any, **kwargs: Any) -> Any:
        import sglang
        from sglang.srt.arg_groups.model_override_base import model_config_of, resolving_view

        settings = resolving_view(server_args)
        raw = _flashmap_draft(settings)
        if raw is not None:
            check(settings, model_config_of(server_args), raw, sglang.__version__)
        return original(server_args, *args, **kwargs)

    return wrapped


def _flashmap_draft(settings: Any) -> dict[str, Any] | None:
    """The draft's config.json if it is a FlashMap drafter's."""
    model = settings.speculative_draft_model_path
    if model is None:
        return None
    try:
        raw = read_config(model, settings.speculative_draft_model_revision)
    except (OSError, ValueError):  # there is none to be read; sglang says what it thinks of that
        return None
    return raw if is_flashmap(raw) else None


def check(settings: Any, target: Any, raw: dict[str, Any], version: str) -> None:
    """Compare sglang's arguments and its configuration of the target with a drafter's config.json;
    `version` is sglang's.

    Raises:
        ValueError: what is asked for cannot be served.
    """
    options, config = read_options(), draft_config(raw)
    grid = config.grid(options.num_steps)
    if options.tree_candidates:
        _check_trees(len(grid) - 1, version)
    size = settings.speculative_dspark_block_size
    if size is not None and size > config.block_size:
        raise ValueError(
            f"speculative_dspark_block_size is {size}, and this drafter's blocks have"
            f" {config.block_size} tokens: ask for {config.block_size} at most, or leave it out."
        )
    check_one_gpu("tp_size", settings.tp_size, "--tensor-parallel-size")
    check_one_gpu("pp_size", settings.pp_size, "--pipeline-parallel-size")
    _check_pool(settings)
    check_target(config, target.hf_text_config, settings.model_path)
    check_scale(getattr(target.hf_text_config, "logits_mup_width_multiplier", None))
    check_vocabulary(
        config,
        options,
        raw,
        settings.speculative_draft_model_path,
        settings.speculative_draft_model_revision,
    )


def _check_trees(num_steps: int, version: str) -> None:
    if num_steps > 1:
        raise ValueError(
            f"tree_candidates drafts in one jump, and num_steps is {num_steps}: ask for one of"
            " them."
        )
    if not version.startswith(TREE_VERSIONS):
        raise ValueError(
            f"tree_candidates is for sglang {', '.join(TREE_VERSIONS)}, and this is {version}:"
            " leave it out, or install that version."
        )


def _check_pool(settings: Any) -> None:
    asked = settings.speculative_draft_kv_cache_dtype or settings.kv_cache_dtype
    if asked not in KV_DTYPES:
        raise ValueError(
            f"The draft's keys and values are to be kept as {asked}, and FlashMap keeps them as"
            " bfloat16 or fp8_e4m3: give --speculative-draft-kv-cache-dtype bfloat16."
        )


def check_scale(multiplier: float | None) -> None:
    """Raise ValueError for a target whose logits are scaled after its vocabulary head (muP)."""
    if multiplier is not None:
        raise ValueError(
            f"The target divides its logits by logits_mup_width_multiplier={multiplier} after its"
            " vocabulary head, into which FlashMap folds its own: this target is not supported."
        )
