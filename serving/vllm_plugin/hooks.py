"""What is hooked in vLLM: every name that is replaced and every table that is added to, with the
versions it was tried on and the reason.

Hooks hand on what they are given; the engines of other drafts take their own way unchanged.
"""

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .start import as_dflash, filling, handing_over, making_room
from .view import ARCHITECTURE, KIND, FlashMapReleaseConfig, fill_speculators

# Version of vLLM to how it was tried.
VERSIONS = {
    "0.31": "run on a CPU",
    "0.32": "run on a CPU",
    "0.33": "compared by its signatures",
}
Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]
Undo = Callable[[], None]


@dataclass(frozen=True)
class Hook:
    """One function of vLLM that is wrapped.

    Attributes:
        module: where it is defined.
        name: its name there, dotted for a method.
        parameters: of those that it has to have, the names.
        wrapper: from the function to its replacement.
        why: what the replacement is for.
        bound: modules that may have imported it by name.
    """

    module: str
    name: str
    parameters: tuple[str, ...]
    wrapper: Wrapper
    why: str
    bound: tuple[str, ...] = ()


@dataclass(frozen=True)
class Entry:
    """One entry of a table or a set of vLLM that is added."""

    module: str
    name: str
    value: Any
    why: str


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
        FlashMapReleaseConfig,
        "a config.json of model_type flashmap is read by us, and runs no code of the release",
    ),
    Entry(
        "vllm.transformers_utils.config",
        "_SPECULATIVE_DECODING_CONFIGS",
        None,
        "such a config.json is of a draft",
    ),
    Entry(
        "vllm.transformers_utils.configs.speculators.algos",
        "SUPPORTED_SPECULATORS_TYPES",
        fill_speculators,
        "configurations of the speculators library",
    ),
)
MODEL = "flashmap.serving.vllm_plugin.model:VllmDraftModel"


class Unfit(Exception):  # noqa: N818 - it is a finding, handled where it is raised
    """This vLLM lacks what a hook needs."""


def install() -> list[Undo]:
    """Install every hook and entry, or none; returns what takes them out again.

    Raises:
        Unfit: this vLLM is not the one that the hooks were made for.
    """
    hooks = [(hook, *_find(hook.module, hook.name)) for hook in HOOKS]
    tables = [(entry, _find(entry.module, entry.name)[2]) for entry in ENTRIES]
    for hook, _, _, function in hooks:
        missing = set(hook.parameters) - inspect.signature(function).parameters.keys()
        if missing:
            raise Unfit(f"{hook.module}.{hook.name} has no {', '.join(sorted(missing))}")
    undo: list[Undo] = []
    for hook, holder, attribute, function in hooks:
        undo += _replace(hook, holder, attribute, function)
    for entry, table in tables:
        undo.append(_add(table, entry.value))
    from vllm import ModelRegistry

    ModelRegistry.register_model(ARCHITECTURE, MODEL)
    undo.append(lambda: ModelRegistry.models.pop(ARCHITECTURE, None))
    return undo


def _find(module: str, name: str) -> tuple[Any, str, Any]:
    """What holds `name`, its last part, and the value."""
    try:
        holder: Any = importlib.import_module(module)
        *path, attribute = name.split(".")
        for part in path:
            holder = getattr(holder, part)
        return holder, attribute, getattr(holder, attribute)
    except (ImportError, AttributeError) as error:
        raise Unfit(f"{module}.{name} is not there ({error})") from error


def _replace(hook: Hook, holder: Any, attribute: str, function: Any) -> list[Undo]:
    static = inspect.getattr_static(holder, attribute)
    inner = static.__func__ if isinstance(static, classmethod) else function
    wrapped: Any = hook.wrapper(inner)
    places = [holder]
    places += [sys.modules[name] for name in hook.bound if name in sys.modules]
    undo: list[Undo] = []
    for place in places:
        undo.append(functools.partial(setattr, place, attribute, static))
        setattr(place, attribute, classmethod(wrapped) if inner is not function else wrapped)
    return undo


def _add(table: Any, value: Any) -> Undo:
    if isinstance(table, set):
        table.add(KIND)
        return functools.partial(table.discard, KIND)
    table[KIND] = value
    return functools.partial(table.pop, KIND, None)
