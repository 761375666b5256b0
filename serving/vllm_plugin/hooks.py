"""What is hooked in vLLM: every name that is replaced and every table that is added to, with the
versions it was tried on and the reason."""

import functools
from collections.abc import Callable
from typing import Any

from flashmap.serving import hooking
from flashmap.serving.drafter import ARCHITECTURE, KIND
from flashmap.serving.hooking import Entry, Hook, Undo

from .start import as_dflash, filling, handing_over, making_room
from .view import FlashMapReleaseConfig, fill_speculators

# Version of vLLM to how it was tried.
VERSIONS = {
    "0.31": "run on a CPU",
    "0.32": "run on a CPU",
    "0.33": "compared by its signatures",
}


def choosing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `init_speculator`: FlashMap's for a FlashMap draft."""

    @functools.wraps(original)
    def wrapped(vllm_config: Any, device: Any, *args: Any, **kwargs: Any) -> Any:
        speculative = vllm_config.speculative_config
        draft = getattr(speculative, "draft_model_config", None)
        if draft is None or ARCHITECTURE not in (draft.architectures or ()):
            return original(vllm_config, device, *args, **kwargs)
        from .speculator import FlashMapSpeculator

        return FlashMapSpeculator(vllm_config, device)

    return wrapped


HOOKS = (
    Hook(
        "vllm.config.speculative",
        "SpeculativeConfig.__post_init__",
        ("self",),
        filling,
        "method and number of drafts follow from the release; what cannot be served is refused",
    ),
    Hook(
        "vllm.engine.arg_utils",
        "EngineArgs.create_speculative_config",
        ("self",),
        handing_over,
        "sampled drafts are judged by their own probabilities, which vLLM's default leaves out",
    ),
    Hook(
        "vllm.engine.arg_utils",
        "EngineArgs._set_default_max_num_seqs_and_batched_tokens_args",
        ("self",),
        making_room,
        "vLLM's own default may hold fewer tokens than blocks have slots",
    ),
    Hook(
        "vllm.transformers_utils.configs.speculators.base",
        "SpeculatorsConfig.build_vllm_speculative_config",
        ("config_dict",),
        as_dflash,
        "a speculators checkpoint that names its target is served by its own name",
    ),
    Hook(
        "vllm.v1.worker.gpu.spec_decode",
        "init_speculator",
        ("vllm_config", "device"),
        choosing,
        "there is no registry of speculators",
        bound=("vllm.v1.worker.gpu.model_runner",),
    ),
)
ENTRIES = (
    Entry(
        "vllm.transformers_utils.config",
        "_CONFIG_REGISTRY",
        KIND,
        FlashMapReleaseConfig,
        "a config.json of model_type flashmap is read by us, and runs no code of the release",
    ),
    Entry(
        "vllm.transformers_utils.config",
        "_SPECULATIVE_DECODING_CONFIGS",
        KIND,
        None,
        "such a config.json is of a draft",
    ),
    Entry(
        "vllm.transformers_utils.configs.speculators.algos",
        "SUPPORTED_SPECULATORS_TYPES",
        KIND,
        fill_speculators,
        "configurations of the speculators library",
    ),
)
MODEL = "flashmap.serving.vllm_plugin.model:VllmDraftModel"


def install() -> list[Undo]:
    """Install every hook and entry, or none; returns what takes them out again.

    Raises:
        Unfit: this vLLM is not the one that the hooks were made for.
    """
    undo = hooking.install(HOOKS, ENTRIES)
    from vllm import ModelRegistry

    ModelRegistry.register_model(ARCHITECTURE, MODEL)
    undo.append(lambda: ModelRegistry.models.pop(ARCHITECTURE, None))
    return undo
