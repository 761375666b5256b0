"""Which version of an operation is picked: what cannot run falls back with one logged reason, or
fails if it was asked for."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flashmap.kernels import select_flashmap
from flashmap.kernels.reference_flashmap import EAGER_OPS
from flashmap.kernels.select_flashmap import TRITON_OPS, Ops, select_ops

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    select_flashmap._select.cache_clear()
    yield
    select_flashmap._select.cache_clear()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine that looks as if it had a new GPU on which every trial passes."""
    monkeypatch.setattr(select_flashmap, "HAS_TRITON", True)
    monkeypatch.setattr(select_flashmap, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(select_flashmap, "_failures", lambda device, dtype: {})
    return monkeypatch


def test_every_operation_has_both_versions() -> None:
    assert EAGER_OPS.keys() == TRITON_OPS.keys() == set(Ops._fields) - {"picked"}
    assert all(EAGER_OPS[name] is not TRITON_OPS[name] for name in EAGER_OPS)


def test_a_cpu_runs_plain_operations() -> None:
    ops = select_ops("cpu", torch.bfloat16)
    assert all(getattr(ops, name) is EAGER_OPS[name] for name in EAGER_OPS)
    assert set(ops.picked.values()) == {"eager: the device is a CPU"}


def test_every_kernel_passes_its_trial(device: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        ops = select_ops(device, dtype, "triton")
        assert set(ops.picked.values()) == {"triton"}
        assert all(getattr(ops, name) is TRITON_OPS[name] for name in TRITON_OPS)


def test_a_gpu_runs_triton(gpu: Any) -> None:
    assert set(select_ops(GPU, torch.bfloat16).picked.values()) == {"triton"}
    eager = select_ops(GPU, torch.bfloat16, "eager")
    assert set(eager.picked.values()) == {"eager: asked for"}


def no_triton(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(select_flashmap, "HAS_TRITON", False)


def old_gpu(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))


def no_gpu(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.cuda, "is_available", lambda: False)


def one_wrong(patch: pytest.MonkeyPatch) -> None:
    failures = {"adaln": "its trial is off by 0.5"}
    patch.setattr(select_flashmap, "_failures", lambda device, dtype: failures)


@pytest.mark.parametrize(
    ("spoil", "dtype", "words"),
    [
        (no_triton, torch.bfloat16, "triton is not installed"),
        (old_gpu, torch.bfloat16, "compute capability 7.5 is below 8.0"),
        (no_gpu, torch.bfloat16, "needs a GPU"),
        (lambda patch: None, torch.float64, "kernels for torch.float32"),
        (one_wrong, torch.float16, "adaln: its trial is off by 0.5"),
    ],
)
def test_what_cannot_run(
    spoil: Any, dtype: torch.dtype, words: str, gpu: Any, caplog: pytest.LogCaptureFixture
) -> None:
    spoil(gpu)
    with caplog.at_level(logging.WARNING):
        ops, again = select_ops(GPU, dtype), select_ops(GPU, dtype)
    assert ops is again
    (message,) = [record.getMessage() for record in caplog.records]
    assert words in message
    assert ops.adaln is EAGER_OPS["adaln"] and words.split(": ")[-1] in ops.picked["adaln"]
    kept = TRITON_OPS if spoil is one_wrong else EAGER_OPS
    assert ops.norm_rope is kept["norm_rope"]
    with pytest.raises(ValueError, match="kernels='triton' cannot run") as caught:
        select_ops(GPU, dtype, "triton")
    assert words in str(caught.value)


def test_a_choice_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match="kernels='cuda' is not valid: choose one of auto, eager"):
        select_ops("cpu", torch.float32, "cuda")


def wrong(*arguments: Any) -> Any:
    """Another result than the reference's."""
    return EAGER_OPS["adaln"](*arguments) * 1.1


def raising(*arguments: Any) -> Any:
    """What a compiler might do."""
    raise RuntimeError("out of resource: shared memory\nRequired: 1, limit: 0")


@pytest.mark.parametrize(
    ("version", "words"),
    [(wrong, "its trial is off by"), (raising, "RuntimeError: out of resource: shared memory")],
)
def test_a_trial_finds_a_broken_kernel(
    version: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in TRITON_OPS:
        monkeypatch.setitem(TRITON_OPS, name, EAGER_OPS[name])
    monkeypatch.setitem(TRITON_OPS, "adaln", version)
    found = select_flashmap._failures(torch.device("cpu"), torch.float32)
    assert found.keys() == {"adaln"}
    assert found["adaln"].startswith(words) and "\n" not in found["adaln"]
