"""Where kernels are tested: in Triton's interpreter on the CPU, or compiled on a GPU."""

from collections.abc import Iterator

import pytest
import torch
from support.interpreter import mend
from support.one_thread import one_thread  # noqa: F401  # a fixture that every test here uses

from flashmap.kernels.triton_flashmap import HAS_TRITON, INTERPRETED


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A device for Triton kernels, on which memory that is not initialised holds NaN."""
    if not HAS_TRITON:
        pytest.skip("triton is not installed (the extra `kernels`)")
    if request.param == "cpu":
        if not INTERPRETED:
            pytest.skip("Triton compiles for the GPU in this process; without one it interprets")
        mend(monkeypatch)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield request.param
    torch.use_deterministic_algorithms(False)
