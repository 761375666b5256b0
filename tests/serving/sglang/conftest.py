"""The pairs that the engine's tests serve, and the reason where there is no engine."""

from pathlib import Path

import pytest
from support import sglang_cpu

if sglang_cpu.HAS_SGLANG:  # before anything imports transformers
    sglang_cpu.prepare()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "serving/sglang" in item.path.as_posix():
            item.add_marker(pytest.mark.engine)
            if not sglang_cpu.HAS_SGLANG:
                reason = "sglang is not installed (make test-sglang)"
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def right(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pair of which every draft is right."""
    from support import engine_pairs

    return engine_pairs.write_right(tmp_path_factory.mktemp("right"))


@pytest.fixture(scope="session")
def random(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair with random weights, and a ranking in which low tokens are frequent."""
    import torch
    from support import engine_pairs

    from flashmap.vocabulary import write_draft_vocab

    pair = engine_pairs.write_random(tmp_path_factory.mktemp("random"))
    counts = torch.arange(engine_pairs.VOCAB).flip(0)
    write_draft_vocab(pair / "draft" / "draft_vocab.safetensors", counts, {})
    return pair


@pytest.fixture(scope="session")
def plain(random: Path) -> list[list[int]]:
    """What the random target says to `PROMPTS` by itself."""
    from support.sglang_engines import LENGTH, PROMPTS, engine, texts

    with engine(random) as llm:
        return texts(llm, PROMPTS, temperature=0, max_new_tokens=LENGTH)
