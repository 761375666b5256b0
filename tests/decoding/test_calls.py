"""One drafter serves call after call: a call, finished or failed, leaves nothing behind."""

import copy
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support import toys
from support.toys import greedy, hook_count, prompt, text_of

from flashmap.modeling import modeling_flashmap


class Recorder:
    """A streamer that remembers what it was given, and may fail at the n-th value."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.values: list[torch.Tensor] = []
        self.ends = 0
        self.fail_at = fail_at

    def put(self, value: torch.Tensor) -> None:
        if len(self.values) == self.fail_at:
            raise ConnectionError("the reader went away")
        self.values.append(value)

    def end(self) -> None:
        self.ends += 1


def failing_after(target: Any, num_passes: int) -> Any:
    """A hook on the last layer that raises in the pass after this many."""
    passes = iter(range(num_passes))

    def fail(*args: Any) -> None:
        if next(passes, None) is None:
            raise RuntimeError("out of memory")

    return target.model.layers[-1].register_forward_hook(fail)


def test_a_second_shorter_prompt_on_the_same_objects() -> None:
    target, drafter = toys.llama(), toys.drafter()
    for length, num_tokens in ((20, 30), (4, 12), (4, 12)):
        ids = prompt(length, seed=length)
        out = drafter.spec_generate(target, ids, max_new_tokens=num_tokens)
        assert text_of(out, ids) == greedy(target, ids, num_tokens)
    assert hook_count(target) == 0


def test_two_targets_in_turn_on_one_drafter() -> None:
    targets, drafter = [toys.llama(0), toys.llama(1)], toys.drafter()
    alone = [
        toys.drafter().spec_generate(target, prompt(5), max_new_tokens=12, seed=7)
        for target in targets
    ]
    for _ in range(2):
        for target, expected in zip(targets, alone, strict=True):
            out = drafter.spec_generate(target, prompt(5), max_new_tokens=12, seed=7)
            assert out.sequences.equal(expected.sequences)
            assert out.acceptance_lengths == expected.acceptance_lengths


@pytest.mark.parametrize("num_passes", [0, 1, 3])
def test_after_an_exception_in_the_target(num_passes: int) -> None:
    target, drafter, streamer = toys.llama(), toys.drafter(), Recorder()
    handle = failing_after(target, num_passes)
    with pytest.raises(RuntimeError, match="out of memory"):
        drafter.spec_generate(target, prompt(20), max_new_tokens=30, streamer=streamer)
    handle.remove()
    assert hook_count(target) == 0
    assert streamer.ends == 1
    ids = prompt(4)
    out = drafter.spec_generate(target, ids, max_new_tokens=12)
    assert text_of(out, ids) == greedy(target, ids, 12)


@pytest.mark.parametrize("fail_at", [0, 1, 3])
def test_after_an_exception_in_the_streamer(fail_at: int) -> None:
    target, drafter, streamer = toys.llama(), toys.drafter(), Recorder(fail_at)
    with pytest.raises(ConnectionError):
        drafter.spec_generate(target, prompt(20), max_new_tokens=30, streamer=streamer)
    assert hook_count(target) == 0
    assert streamer.ends == 1
    ids = prompt(4)
    out = drafter.spec_generate(target, ids, max_new_tokens=12)
    assert text_of(out, ids) == greedy(target, ids, 12)


def test_other_hooks_of_the_target_stay() -> None:
    target = toys.llama()
    seen: list[int] = []
    target.model.layers[0].register_forward_hook(lambda *args: seen.append(1))
    toys.drafter().spec_generate(target, prompt(4), max_new_tokens=5)
    assert hook_count(target) == 1
    assert seen


def test_decoding_leaves_models_as_they_were() -> None:
    target, drafter = toys.llama(), toys.drafter()
    before = [copy.deepcopy(model.state_dict()) for model in (target, drafter)]
    drafter.spec_generate(target, prompt(4), max_new_tokens=8, temperature=1.0)
    for model, weights in zip((target, drafter), before, strict=True):
        assert model.state_dict().keys() == weights.keys()
        assert all(model.state_dict()[name].equal(weights[name]) for name in weights)
        assert all(weight.grad is None for weight in model.parameters())


def test_decoding_in_inference_mode() -> None:
    target, drafter, ids = toys.llama(), toys.drafter(), prompt(5)
    expected = drafter.spec_generate(target, ids, max_new_tokens=12, seed=1)
    with torch.inference_mode():
        for model in (drafter, toys.drafter()):
            out = model.spec_generate(target, ids, max_new_tokens=12, seed=1)
            assert out.sequences.equal(expected.sequences)
            assert out.acceptance_lengths == expected.acceptance_lengths


def test_a_draft_with_gradients_after_decoding_in_inference_mode() -> None:
    target, drafter = toys.llama(), toys.drafter()
    with torch.inference_mode():
        drafter.spec_generate(target, prompt(5), max_new_tokens=4)
    cache = drafter.new_cache(1, 8)
    drafter.extend_context(cache, torch.randn(1, 3, 2 * toys.WIDTH))
    modules = target.get_input_embeddings(), target.get_output_embeddings()
    drafter.draft(torch.tensor([3]), cache, *modules, seed=0).sum().backward()
    assert drafter.head.weight.grad is not None


def test_models_created_in_inference_mode() -> None:
    with torch.inference_mode():
        target, drafter = toys.llama(), toys.drafter()
        ids = prompt(5)
        out = drafter.spec_generate(target, ids, max_new_tokens=12)
    assert text_of(out, ids) == greedy(toys.llama(), ids, 12)


def test_constants_of_the_target_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    honest, calls = modeling_flashmap.noise_factor, []

    def counted(embedding: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return honest(embedding)

    monkeypatch.setattr(modeling_flashmap, "noise_factor", counted)
    target, drafter = toys.llama(), toys.drafter()
    for _ in range(2):
        drafter.spec_generate(target, prompt(5), max_new_tokens=12)
    assert len(calls) == 1


def test_the_published_keyword_form() -> None:
    target, drafter, ids = toys.llama(), toys.drafter(), prompt(5)
    out = drafter.spec_generate(
        input_ids=ids, target=target, temperature=0.0, num_steps=1, max_new_tokens=6,
        stop_token_ids=None, generator=None,
    )  # fmt: skip
    positional = drafter.spec_generate(target, ids, 6, 0.0, 1, None, None)
    assert text_of(out, ids) == text_of(positional, ids) == greedy(target, ids, 6)


def test_num_steps_zero_means_the_configurations() -> None:
    target, drafter, ids = toys.llama(), toys.drafter(num_steps=2), prompt(5)
    runs = [
        drafter.spec_generate(target, ids, max_new_tokens=20, seed=1, temperature=1.0, num_steps=n)
        for n in (None, 0, 2, 1)
    ]
    assert runs[0].sequences.equal(runs[1].sequences)
    assert runs[0].sequences.equal(runs[2].sequences)
    assert runs[0].acceptance_lengths == runs[2].acceptance_lengths
    assert not runs[0].sequences.equal(runs[3].sequences)


def test_threads_share_a_pair() -> None:
    target, drafter = toys.llama(), toys.drafter()
    prompts = {seed: prompt(4 + seed, seed) for seed in range(4)}
    alone = {n: drafter.spec_generate(target, ids, 12, seed=n) for n, ids in prompts.items()}
    # Whoever is between two tapped layers lets the others run.
    target.model.layers[1].register_forward_pre_hook(lambda *args: time.sleep(0.002))
    with ThreadPoolExecutor(len(prompts)) as pool:
        runs = {
            seed: pool.submit(drafter.spec_generate, target, ids, 12, seed=seed)
            for seed, ids in prompts.items()
        }
    for seed, run in runs.items():
        assert run.result().sequences.equal(alone[seed].sequences)
        assert run.result().acceptance_lengths == alone[seed].acceptance_lengths
