"""What is hooked in sglang: every name that is replaced and every table that is added to, with the
versions it was tried on and the reason."""

import functools
import sys
from collections.abc import Callable
from typing import Any

from flashmap.serving import hooking
from flashmap.serving.drafter import ARCHITECTURE, KIND
from flashmap.serving.hooking import Entry, Hook, Undo

from . import trees
from .start import TREE_VERSIONS, checking
from .view import FlashMapReleaseConfig

# Version of sglang to how it was tried.
VERSIONS = {
    "0.5.20": "run on a CPU",
    "0.5.21": "run on a CPU",
    "0.5.22": "compared by its signatures",
    "0.5.23": "compared by its signatures",
}
_SCHEDULER = "sglang.srt.managers.scheduler"  # loaded where a scheduler runs, and its workers
_WORKER = "sglang.srt.speculative.dspark_components.dspark_worker_v2"


def announcing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `get_model_architecture`: make the draft's class known when it is asked for."""

    @functools.wraps(original)
    def wrapped(model_config: Any, *args: Any, **kwargs: Any) -> Any:
        if ARCHITECTURE in (getattr(model_config.hf_config, "architectures", None) or ()):
            from sglang.srt.models.registry import ModelRegistry

            from .model import SglangDraftModel

            ModelRegistry.models.setdefault(ARCHITECTURE, SglangDraftModel)
        return original(model_config, *args, **kwargs)

    return wrapped


def binding(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `build_draft_tp_worker`: tell the draft model of its target and its runner, whose pools
    it writes to."""

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        bundle = original(*args, **kwargs)
        if _is_ours(bundle.draft_model):
            bundle.draft_model.bind(bundle.draft_model_runner, kwargs["target_model_config"])
        return bundle

    return wrapped


def resting(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `DSparkWorkerV2.init_cuda_graphs`: the draft attends by itself, so nothing is prepared
    for its attention backend, which would cost every round some launches. What verification of
    trees needs is checked, and room made for them."""

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if trees.drafts_trees(self.draft_model):
            trees.check_worker(self)
            if self._decode_graph_allowed:
                from sglang.srt.runtime_context import get_exec

                self.draft_model.reserve_trees(max(get_exec().graph.cuda_graph_config.decode.bs))
        backend = self.draft_model_runner.attn_backend
        if _is_ours(self.draft_model) and backend is not self.model_runner.attn_backend:
            for name in METADATA:
                setattr(backend, name, _nothing)
        return original(self, *args, **kwargs)

    return wrapped


def sampling(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `DSparkWorkerV2._maybe_build_draft_sampler`: whole blocks in one pass."""

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if trees.drafts_trees(self.draft_model):
            return None  # their tokens are taken where the trees are built
        sampler = original(self, *args, **kwargs)
        if sampler is None or not _is_ours(self.draft_model):
            return sampler
        from .sampler import BlockSampler

        return BlockSampler(sampler, self.draft_model)

    return wrapped


METADATA = (
    "init_forward_metadata",
    "init_forward_metadata_out_graph",
    "init_forward_metadata_in_graph",
)
HOOKS = (
    Hook(
        "sglang.srt.arg_groups.speculative_hook",
        "_handle_dspark",
        ("server_args",),
        checking,
        "what cannot be served is refused before anything is loaded",
    ),
    Hook(
        "sglang.srt.model_loader.utils",
        "get_model_architecture",
        ("model_config",),
        announcing,
        "the draft's class joins the registry without loading the registry's other models",
        bound=(
            "sglang.srt.model_loader",
            "sglang.srt.model_loader.loader",
            "sglang.srt.model_executor.model_runner_components.startup_weight_load",
        ),
    ),
)
WORKER_HOOKS = (
    Hook(
        "sglang.srt.speculative.draft_worker_common",
        "build_draft_tp_worker",
        ("target_model_config",),
        binding,
        "a model is built without its runner, and ours writes to the runner's pools",
        bound=(_WORKER,),
    ),
    Hook(
        _WORKER,
        "DSparkWorkerV2.init_cuda_graphs",
        ("self",),
        resting,
        "the draft's attention backend has nothing to prepare",
    ),
    Hook(
        _WORKER,
        "DSparkWorkerV2._maybe_build_draft_sampler",
        ("self",),
        sampling,
        "slots are independent, so one pass samples a block",
        versions=("0.5.20", "0.5.21"),  # later ones draw by a counter of their own
    ),
    Hook(
        _WORKER,
        "DSparkWorkerV2._forward_decode",
        ("self", "batch", "on_publish"),
        trees.rounds,
        "a round of trees",
        versions=TREE_VERSIONS,
    ),
    Hook(
        "sglang.srt.speculative.dflash_utils",
        "resolve_dflash_verify_mask_policy",
        ("attn_backend",),
        trees.masking,
        "verification of trees is captured with a mask",
        versions=TREE_VERSIONS,
    ),
    Hook(
        _SCHEDULER,
        "Scheduler._add_request_to_queue",
        ("self", "req", "is_retracted"),
        trees.refusing,
        "a request that trees cannot serve ends on arrival, with the reason",
        versions=TREE_VERSIONS,
    ),
)
ENTRIES = (
    Entry(
        "sglang.srt.utils.hf_transformers.common",
        "_CONFIG_REGISTRY",
        KIND,
        FlashMapReleaseConfig,
        "a config.json of model_type flashmap is read in DSPARK's words",
    ),
)


def install() -> list[Undo]:
    """Install every hook and entry that this process and this version need, or none; returns what
    takes them out again.

    Raises:
        Unfit: this sglang is not the one that the hooks were made for.
    """
    import sglang

    hooks = HOOKS + (WORKER_HOOKS if _SCHEDULER in sys.modules else ())
    version = ".".join(sglang.__version__.split(".")[:3])
    hooks = tuple(hook for hook in hooks if not hook.versions or version in hook.versions)
    return hooking.install(hooks, ENTRIES)


def _is_ours(model: Any) -> bool:
    from .model import SglangDraftModel

    return isinstance(model, SglangDraftModel)


def _nothing(*_: Any, **__: Any) -> None:
    """Prepare nothing."""
