"""One computing thread a worker, and a stated reason for every test that cannot run here."""

import os

import pytest

# Workers share the machine's cores; with torch's default each of them would claim all of them and
# all would crawl. Set before anything imports torch, and inherited by the processes that tests
# start.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("MKL_NUM_THREADS", "1")


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


# Triton reads it when it decorates a kernel: without a GPU its kernels run on the CPU, slowly.
if not _has_cuda():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--screenshots", help="folder for what the browser tests see")
    parser.addoption("--run-slow", action="store_true", help="run the tests that take minutes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    needs_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if needs_gpu and not _has_cuda():
        _skip(needs_gpu, "needs a CUDA device, and torch sees none")
    if not config.getoption("--run-slow"):
        slow = [item for item in items if item.get_closest_marker("slow")]
        _skip(slow, "takes minutes; give --run-slow (make test-slow)")


def _skip(items: list[pytest.Item], reason: str) -> None:
    for item in items:
        item.add_marker(pytest.mark.skip(reason=reason))
