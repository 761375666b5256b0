"""The pairs that the engine's tests serve, and the reason where there is no engine."""

from pathlib import Path

import pytest
import torch
from support import engine_pairs
from support.engines import HAS_VLLM

from flashmap.vocabulary import write_draft_vocab


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "serving/vllm" in item.path.as_posix():
            item.add_marker(pytest.mark.engine)
            if not HAS_VLLM:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed (make test-vllm)"))


@pytest.fixture(scope="session")
def right(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pair of which every draft is right."""
    return engine_pairs.write_right(tmp_path_factory.mktemp("right"))


@pytest.fixture(scope="session")
def random(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair with random weights, and a ranking in which low tokens are frequent."""
    pair = engine_pairs.write_random(tmp_path_factory.mktemp("random"))
    counts = torch.arange(engine_pairs.VOCAB).flip(0)
    write_draft_vocab(pair / "draft" / "draft_vocab.safetensors", counts, {})
    return pair
