"""What `target.generate(custom_generate="REF", trust_remote_code=True)` runs: a release ships this
file as custom_generate/generate.py.

transformers copies it alone into its cache of modules and calls `generate` with the arguments as
they were given. It loads the release's drafter once and calls the target's `generate` again, with
the drafter's own decoding loop in the place of transformers'.
"""

import copy
import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, GenerationMixin

# Where the drafter is, and the tag that this file belongs to; written by the build.
REPO_ID, TAG = "", ""

_GENERATE = inspect.unwrap(GenerationMixin.generate).__code__
# Arguments of the loader, which transformers passes on.
_LOADING = ("token", "cache_dir", "local_files_only", "force_download", "proxies")
# By where it came from, revision, device and dtype: the age of its folder, and the drafter.
_loaded: dict[tuple[Any, ...], tuple[int | None, Any]] = {}


def generate(
    model: Any,
    *,
    draft_model: Any = None,
    draft_repo: str | None = None,
    draft_revision: str | None = None,
    revision: str | None = None,
    streamer: Any = None,
    tokenizer: Any = None,
    **arguments: Any,
) -> Any:
    """`model.generate(**arguments)`, decoded speculatively.

    Args:
        model: the target.
        draft_model: a drafter that is loaded already.
        draft_repo: the folder or Hub id of another drafter than this release's.
        draft_revision: its branch, tag or commit.
        revision: that of the release, where its file does not state a tag.
        streamer: as in `generate`; ended exactly once, errors included.
        tokenizer: reads `stop_strings`.
        arguments: those of `generate`, and `num_steps`, `num_draws`, `num_candidates`, `adaptive`,
            `graphs`, `seed`, `past`.

    Returns:
        What `generate` returns.

    Raises:
        ValueError: a setting cannot be honoured, or the drafter does not fit the target.
    """
    stream = None if streamer is None else _Stream(streamer)
    try:
        loading = {name: arguments.pop(name) for name in _LOADING if name in arguments}
        if draft_model is None:
            repo, found = _source(draft_repo, draft_revision, revision)
            draft_model = _load(repo, found, model.device, model.dtype, loading)
        if not hasattr(draft_model, "flashmap_decoding"):
            raise ValueError(
                f"draft_model is a {type(draft_model).__name__}, expected a loaded FlashMap"
                " drafter: draft_repo takes the folder or Hub id of one."
            )
        _move_stop_strings(arguments)
        decoding = partial(
            draft_model.flashmap_decoding,
            draft_model=draft_model,
            streamer=stream,
            tokenizer=tokenizer,
        )
        return model.generate(custom_generate=decoding, **arguments)
    finally:
        if stream is not None:
            stream.end()


class _Stream:
    """A streamer that ends once, whoever ends it first."""

    def __init__(self, streamer: Any) -> None:
        self.put: Callable[[torch.Tensor], Any] = streamer.put
        self._end: Callable[[], Any] | None = streamer.end

    def end(self) -> None:
        """End the stream, the first time."""
        end, self._end = self._end, None
        if end is not None:
            end()


def _asked() -> dict[str, Any]:
    """What the `generate` that called this file was called with. It does not pass on what this
    file needs: the folder that it was found in, and whether code of a folder may be run."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not _GENERATE:
        frame = frame.f_back
    return {} if frame is None else dict(frame.f_locals)


def _source(
    draft_repo: str | None, draft_revision: str | None, revision: str | None
) -> tuple[str, str | None]:
    """Folder or Hub id of the drafter, and its revision: the one asked for, the folder this file
    came from, or what the build wrote into it."""
    if draft_repo is not None:
        return draft_repo, draft_revision
    asked = _asked().get("custom_generate")
    if isinstance(asked, str) and Path(asked).is_dir():
        return asked, None
    if REPO_ID:
        return REPO_ID, draft_revision or TAG or revision
    if isinstance(asked, str):
        return asked, draft_revision or revision
    raise ValueError("draft_model is missing: pass a loaded drafter, or draft_repo, its Hub id.")


def _load(
    repo: str, revision: str | None, device: torch.device, dtype: torch.dtype, loading: Any
) -> Any:
    """The drafter, loaded once a device and dtype; again if its folder has changed."""
    newest = None
    if Path(repo).is_dir():
        repo = str(Path(repo).resolve())
        newest = max(path.stat().st_mtime_ns for path in Path(repo).iterdir())
    key = (repo, revision, device, dtype)
    if key not in _loaded or _loaded[key][0] != newest:
        model = AutoModel.from_pretrained(
            repo,
            revision=revision,
            dtype=dtype,
            trust_remote_code=_asked().get("trust_remote_code"),
            **loading,
        )
        _loaded[key] = newest, model.to(device).eval()
    return _loaded[key][1]


def _move_stop_strings(arguments: dict[str, Any]) -> None:
    """Take the stop strings out of a configuration: `generate` would read them before it calls the
    decoding loop, and has no tokenizer by then."""
    config: Any = arguments.get("generation_config")
    if getattr(config, "stop_strings", None) is not None:
        config = copy.deepcopy(config)
        if arguments.get("stop_strings") is None:
            arguments["stop_strings"] = config.stop_strings
        config.stop_strings = None
        arguments["generation_config"] = config
