"""Compiled code rounds where the specification does: no operation of half precision is fused with
the next. Triton compiles for a GPU that is not there, in a process without its interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashmap.kernels.triton_flashmap import HAS_TRITON

COMPILE = """
import re
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from flashmap.kernels import triton_flashmap as ops


def fused(kernel, dtype, options, **constants):
    kinds = {"columns": "i32", "base_stride": "i32", "eps": "fp32"}
    signature = {
        name: "constexpr" if name in constants else kinds.get(name, f"*{dtype}")
        for name in kernel.arg_names
    }
    source = ASTSource(kernel, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return len(re.findall(rf"\\bfma\\.\\S*{dtype.replace('fp', 'f')}", compiled.asm["ptx"]))


for dtype in ("bf16", "fp16"):
    for kernel, constants in ((ops._rms_norm_kernel, {"LATE": False}), (ops._adaln_kernel, {})):
        for options in (ops.ROUNDED, {}):
            print(fused(kernel, dtype, options, GATED=True, BLOCK=32, **constants))
"""


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed (the extra `kernels`)")
@pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux")
def test_no_rounding_is_skipped(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    counts = list(map(int, done.stdout.split()))
    rounded, fused = counts[::2], counts[1::2]
    assert rounded == [0] * 4
    assert all(fused)  # what the option forbids would happen without it
