"""What `--speculative-config` leaves out is filled in, and what cannot be served is refused, while
vLLM reads its configuration: before any weight is loaded."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flashmap.serving.drafter import (
    ARCHITECTURE,
    check_one_gpu,
    check_target,
    check_vocabulary,
    draft_config,
    is_flashmap,
    read_config,
)
from flashmap.serving.options import read_options


def filling(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `SpeculativeConfig.__post_init__` so that a FlashMap draft needs no method and no number
    of tokens."""

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        raw = _flashmap_draft(self.model, self.revision)
        if raw is not None:
            fill(self, raw)
        return original(self, *args, **kwargs)

    return wrapped


def handing_over(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `EngineArgs.create_speculative_config`: a FlashMap draft's tokens are sampled and its
    probabilities handed to their rejection, unless another `draft_sample_method` is asked for."""

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        asked = {name.replace("-", "_") for name in self.speculative_config or ()}
        speculative = original(self, *args, **kwargs)
        draft = getattr(speculative, "draft_model_config", None)
        ours = draft is not None and ARCHITECTURE in (draft.architectures or ())
        if ours and "draft_sample_method" not in asked:
            speculative.draft_sample_method = "probabilistic"
        return speculative

    return wrapped


def making_room(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap what sets `EngineArgs.max_num_batched_tokens` where the user has not: vLLM's buffers
    have to hold a whole block of every request."""

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        asked = self.max_num_batched_tokens
        result = original(self, *args, **kwargs)
        speculative = self.speculative_config or {}
        raw = _flashmap_draft(speculative.get("model"), speculative.get("revision"))
        if asked is None and raw is not None:
            slots = self.max_num_seqs * draft_config(raw).block_size
            self.max_num_batched_tokens = max(self.max_num_batched_tokens, slots)
        return result

    return wrapped


def as_dflash(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `SpeculatorsConfig.build_vllm_speculative_config`: the method "flashmap" runs on vLLM's
    DFlash runtime."""

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if result.get("method") == "flashmap":
            result["method"] = "dflash"
        return result

    return wrapped


def _flashmap_draft(model: Any, revision: str | None) -> dict[str, Any] | None:
    """The draft's config.json if it is a FlashMap drafter's."""
    if not isinstance(model, str) or not ("/" in model or Path(model).is_dir()):
        return None  # n-grams, proposers by module: neither a folder nor a Hub id
    try:
        raw = read_config(model, revision)
    except (OSError, ValueError):  # there is none to be read; vLLM says what it thinks of that
        return None
    return raw if is_flashmap(raw) else None


def fill(speculative: Any, raw: dict[str, Any]) -> None:
    """Set the method and the number of drafts of a `SpeculativeConfig`.

    Raises:
        ValueError: what is asked for cannot be served.
    """
    if speculative.method not in (None, "dflash"):
        raise ValueError(
            f"method {speculative.method!r} is asked for, and {speculative.model} holds a FlashMap"
            ' drafter: leave "method" out of --speculative-config.'
        )
    options, config = read_options(), draft_config(raw)
    config.grid(options.num_steps)
    if speculative.num_speculative_tokens is None:
        speculative.num_speculative_tokens = config.block_size
    if speculative.num_speculative_tokens > config.block_size:
        raise ValueError(
            f"num_speculative_tokens is {speculative.num_speculative_tokens}, and this drafter's"
            f" blocks have {config.block_size} tokens: ask for {config.block_size} at most, or"
            " leave it out."
        )
    speculative.method = "dflash"
    _check_parallel(speculative.target_parallel_config)
    target = speculative.target_model_config
    check_target(config, target.hf_text_config, target.model)
    check_vocabulary(config, options, raw, speculative.model, speculative.revision)


def _check_parallel(parallel: Any) -> None:
    for name, flag in (
        ("tensor_parallel_size", "--tensor-parallel-size"),
        ("pipeline_parallel_size", "--pipeline-parallel-size"),
        ("decode_context_parallel_size", "--decode-context-parallel-size"),
        ("prefill_context_parallel_size", "--prefill-context-parallel-size"),
    ):
        check_one_gpu(name, getattr(parallel, name, 1), flag)
