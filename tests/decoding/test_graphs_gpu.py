"""On a CUDA device rounds are captured: their tokens are the plain loop's, and the host waits once
a round."""

import gc
import warnings
from typing import Any

import pytest
import torch
from support import toys
from support.oracle import padded
from support.toys import greedy, prompt, text_of

from flashmap.modeling import graphs_flashmap
from flashmap.modeling.graphs_flashmap import GraphLoop
from flashmap.modeling.round_flashmap import Round

pytestmark = pytest.mark.gpu

FAMILIES: dict[str, Any] = {
    "llama": toys.llama,
    "qwen3": toys.qwen3,
    "gpt2": lambda: toys.gpt2(positions=160),
}
IDS, MASK = padded([prompt(length, seed=length) for length in (9, 1, 17, 4)], "left")


def run(drafter: Any, target: Any, **settings: Any) -> Any:
    """Text and acceptance lengths of a batch on the GPU."""
    settings = {"max_new_tokens": 40, "seed": 5, **settings}
    out = drafter.spec_generate(target, IDS.cuda(), attention_mask=MASK.cuda(), **settings)
    return out.sequences.tolist(), out.acceptance_lengths


def rounds_of(drafter: Any) -> list[Round]:
    """The rounds that a drafter keeps."""
    kept: dict[Any, Round] = drafter.round_store._memo._values.get("rounds", {})
    return list(kept.values())


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.8}, {"temperature": 1.2, "top_k": 9, "top_p": 0.9}]
)
@pytest.mark.parametrize("num_steps", [1, 2])
@pytest.mark.parametrize("name", FAMILIES)
def test_captured_rounds_give_the_plain_loops_tokens(
    name: str, num_steps: int, settings: dict[str, Any]
) -> None:
    target, drafter = FAMILIES[name]().cuda(), toys.drafter().cuda()
    settings = {**settings, "num_steps": num_steps}
    plain = run(drafter, target, graphs=False, **settings)
    for _ in range(2):
        assert run(drafter, target, graphs=True, **settings) == plain
    (kept,) = rounds_of(drafter)
    assert kept._graph is not None and kept._runner is None


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_text_moves_into_larger_graphs(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs_flashmap, "ROOMS", (24, 32, 48))
    monkeypatch.setattr(graphs_flashmap, "FIRST_CAPACITY", 1)
    target, drafter = toys.llama().cuda(), toys.drafter().cuda()
    settings = {"temperature": temperature, "max_new_tokens": 50}
    plain = run(drafter, target, graphs=False, **settings)
    assert run(drafter, target, **settings) == plain  # and out of the largest one
    assert [one.capacity for one in rounds_of(drafter)] == [24, 32, 48]


def test_auto_is_graphs_and_the_host_waits_once_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    honest, waits = Round.run, []

    def counted(self: Round) -> Any:
        torch.cuda.synchronize()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                return honest(self)
            finally:
                torch.cuda.set_sync_debug_mode("default")
                waits.append(sum("called a synchronizing" in str(one.message) for one in caught))

    monkeypatch.setattr(Round, "run", counted)
    ids = prompt(7).cuda()
    target, drafter = toys.llama().cuda(), toys.drafter().cuda()
    out = drafter.spec_generate(target, ids, max_new_tokens=30)
    assert text_of(out, ids) == greedy(target, ids, 30)
    assert set(waits) == {1} and len(waits) == len(out.acceptance_lengths)


def test_graphs_do_not_keep_a_target() -> None:
    target, drafter = toys.llama().cuda(), toys.drafter().cuda()
    run(drafter, target)
    assert rounds_of(drafter)
    del target
    gc.collect()
    assert not rounds_of(drafter)


def test_bfloat16_rounds_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: GraphLoop, reason: str) -> None:
        raise AssertionError(reason)

    monkeypatch.setattr(GraphLoop, "_go_plain", fail)
    target, drafter = toys.qwen3().to("cuda", torch.bfloat16), toys.drafter().cuda()
    for temperature in (0.0, 1.0):
        _, lengths = run(drafter.bfloat16(), target, temperature=temperature)
        assert sum(map(sum, lengths)) >= 4 * 39
