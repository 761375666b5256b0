"""Lets sglang serve with DSPARK on a machine without a GPU; call `prepare` before importing sglang,
in every process.

What stands in the way there: torchvision's operators, which are compiled for CUDA; a rotary
embedding that sglang takes from vLLM where there is no CUDA; streams, which a CPU has none of; and
two places that ask for CUDA although Triton's interpreter runs what follows. A plugin of sglang's
own changes the last two.
"""

import functools
import importlib.metadata
import importlib.util
import os
import sys
import types
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
HAS_SGLANG = importlib.util.find_spec("sglang") is not None
PLUGINS = "sglang.srt.plugins"
SETTINGS = {
    "TRITON_INTERPRET": "1",
    "HF_HUB_OFFLINE": "1",
    "SGLANG_IS_FLASHINFER_AVAILABLE": "false",
    "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
}
ANYWHERE = ("HF_HUB_OFFLINE",)


def prepare() -> None:
    """Make this process ready for `import sglang`, once; with a GPU there is little to do."""
    import torch

    if hasattr(prepare, "done"):
        return
    prepare.done = True  # type: ignore[attr-defined]
    if torch.cuda.is_available():
        os.environ.update({name: SETTINGS[name] for name in ANYWHERE})
        _announce({"flashmap": "flashmap.serving.sglang_plugin.register:register"})
        return
    os.environ.update(SETTINGS)
    # torchvision wants to say what these give, and nothing calls them.
    prepare.operators = torch.library.Library("torchvision", "DEF")  # type: ignore[attr-defined]
    for name in ("nms", "qnms"):
        prepare.operators.define(  # type: ignore[attr-defined]
            f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        )
    vllm, operations = types.ModuleType("vllm"), types.ModuleType("vllm._custom_ops")
    operations.rotary_embedding = _rotary_embedding  # type: ignore[attr-defined]
    vllm._custom_ops = operations  # type: ignore[attr-defined]
    sys.modules |= {"vllm": vllm, "vllm._custom_ops": operations}
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign]
    _announce(
        {
            "flashmap": "flashmap.serving.sglang_plugin.register:register",
            "cpu": "support.sglang_cpu:pretend",
        }
    )


def boot(folder: Path) -> str:
    """A PYTHONPATH under which every new process prepares itself, by a module in `folder`."""
    text = "from support import sglang_cpu\nsglang_cpu.prepare()\n"
    (folder / "sitecustomize.py").write_text(text)
    return os.pathsep.join([str(folder), str(TESTS), *filter(None, sys.path)])


def _announce(plugins: dict[str, str]) -> None:
    """Entry points for sglang, where the package is not installed but on the path."""
    look_up = importlib.metadata.entry_points

    @functools.wraps(look_up)
    def entry_points(**wanted: Any) -> Any:
        found = look_up(**wanted)
        if wanted.get("group") != PLUGINS:
            return found
        known = {point.name for point in found}
        return list(found) + [
            importlib.metadata.EntryPoint(name, value, PLUGINS)
            for name, value in plugins.items()
            if name not in known
        ]

    importlib.metadata.entry_points = entry_points  # type: ignore[assignment]


def _rotary_embedding(
    positions: Any, query: Any, key: Any, head_size: int, cache: Any, is_neox_style: bool
) -> None:
    """What sglang calls of vLLM's kernels, in place."""
    import torch

    assert is_neox_style
    cos, sin = (part.unsqueeze(1) for part in cache[positions.flatten()].float().chunk(2, -1))
    for rows in (query, key):
        heads = rows.view(positions.numel(), -1, head_size)
        low, high = heads.float().chunk(2, -1)
        heads.copy_(torch.cat((low * cos - high * sin, high * cos + low * sin), -1))


class _OnCuda:
    """sglang's settings, with another device."""

    device = "cuda"

    def __init__(self, settings: Any) -> None:
        self._settings = settings

    def __getattr__(self, name: str) -> Any:
        return getattr(self._settings, name)


def pretend() -> None:
    """The plugin: DSPARK's settings are those of a CUDA device, and slots are assigned by
    Triton."""
    from sglang.kernels.ops.speculative import cache_locs
    from sglang.srt.arg_groups import speculative_hook

    cache_locs._is_cuda = True
    view = speculative_hook.resolving_view
    speculative_hook.resolving_view = lambda server_args: _OnCuda(view(server_args))
