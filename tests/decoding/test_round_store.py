"""Rounds of fixed shape are kept for later calls, grow with a text, and what they cannot serve goes
on in the plain loop with one reason."""

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support import toys
from support.rounds import IDS, MASK, both, family
from support.toys import greedy, prompt, text_of
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from flashmap.modeling import graphs_flashmap, obstacles_flashmap
from flashmap.modeling.graphs_flashmap import GraphLoop
from flashmap.modeling.round_flashmap import Round

pytestmark = pytest.mark.usefixtures("everywhere")

# Growing, and what is kept


def test_a_text_moves_into_larger_rounds(monkeypatch: pytest.MonkeyPatch, made: list[Any]) -> None:
    monkeypatch.setattr(graphs_flashmap, "ROOMS", (24, 32, 48, 80))
    monkeypatch.setattr(graphs_flashmap, "FIRST_CAPACITY", 1)
    for temperature in (0.0, 0.8):
        both(toys.drafter(), family("llama"), temperature=temperature, max_new_tokens=50)
        assert [one.capacity for one in made] == [24, 32, 48, 80]
        made.clear()


def test_a_text_outgrows_the_largest(
    monkeypatch: pytest.MonkeyPatch, made: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(graphs_flashmap, "ROOMS", (24, 32))
    drafter, target = toys.drafter(), family("llama")
    settings = {"attention_mask": MASK, "max_new_tokens": 40, "seed": 3, "temperature": 0.8}
    plain = drafter.spec_generate(target, IDS, graphs=False, **settings)
    for _ in range(2):
        found = drafter.spec_generate(target, IDS, **settings)
        assert found.sequences.equal(plain.sequences)
    assert [one.capacity for one in made] == [32] and not made[0].is_taken
    (message,) = [record.message for record in caplog.records]
    assert "entries, the largest graph 32" in message
    with pytest.raises(ValueError, match="graphs=True cannot be served: a text takes"):
        drafter.spec_generate(target, IDS, graphs=True, **settings)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.cuda.OutOfMemoryError("CUDA out of memory"), "no memory left for"),
        (RuntimeError("operation not permitted when stream is capturing"), "not permitted"),
    ],
)
def test_a_round_that_cannot_be_captured(
    error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def fail(self: Any, *args: Any) -> None:
        raise error

    monkeypatch.setattr(Round, "prepare", fail)
    drafter, target, ids = toys.drafter(), family("llama"), prompt(7)
    for _ in range(2):
        out = drafter.spec_generate(target, ids, max_new_tokens=20)
        assert text_of(out, ids) == greedy(target, ids, 20)
    (message,) = [record.message for record in caplog.records]
    assert message.startswith("Decoding without CUDA graphs: ") and reason in message
    with pytest.raises(ValueError, match=reason):
        drafter.spec_generate(target, ids, max_new_tokens=20, graphs=True)


def test_rounds_are_kept(made: list[Any]) -> None:
    drafter, target = toys.drafter(), toys.llama()
    run = functools.partial(drafter.spec_generate, target, max_new_tokens=9, seed=1)
    run(prompt(5))
    run(prompt(8), temperature=0.0)
    assert len(made) == 1
    run(IDS, attention_mask=MASK)
    run(prompt(5), temperature=0.7)
    run(prompt(5), temperature=0.7, top_k=4)
    run(prompt(5), temperature=0.7, top_k=5)
    assert len(made) == 5
    run(IDS, attention_mask=MASK)
    assert len(made) == 5
    with torch.no_grad():
        target.lm_head.weight.mul_(0.5)
    ids = prompt(5)
    assert text_of(run(ids), ids) == greedy(target, ids, 9)
    drafter.to(torch.float64).to(torch.float32)
    run(ids)
    run(ids, num_steps=2)
    assert len(made) == 8


def test_two_texts_at_once_have_two_rounds(made: list[Any]) -> None:
    drafter, target = toys.drafter(), family("llama")
    texts: list[list[int]] = [[], []]
    streams: list[Iterator[Any]] = [
        drafter.stream_generate(target, prompt(6, seed=seed), max_new_tokens=20) for seed in (0, 1)
    ]
    for rounds in zip(*streams, strict=False):
        for text, found in zip(texts, rounds, strict=True):
            text += found.tokens
    for seed, text in enumerate(texts):
        assert text == greedy(target, prompt(6, seed=seed), 20)[: len(text)] and len(text) > 8
    assert len(made) == 2
    for stream in streams:
        stream.close()  # type: ignore[attr-defined]
    assert not any(one.is_taken for one in made)


def test_rounds_do_not_keep_a_target(made: list[Any]) -> None:
    drafter, target = toys.drafter(), toys.llama()
    drafter.spec_generate(target, prompt(5), max_new_tokens=9)
    assert drafter.round_store._memo._values
    made[0]._runner = None  # as after a capture
    made.clear()
    del target
    assert not drafter.round_store._memo._values


# What is not served


CASES: list[tuple[dict[str, Any], str]] = [
    ({"num_draws": 2, "temperature": 1.0}, "several noise draws"),
    ({"num_candidates": 2}, "trees"),
    ({"adaptive": (0.2, 0.1)}, "adaptive"),
    ({"logits_processor": LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.3)])}, "process"),
]


@pytest.mark.parametrize(("settings", "reason"), CASES)
def test_settings_with_a_reason(
    settings: dict[str, Any], reason: str, made: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    drafter, target = toys.drafter(), family("llama")
    for _ in range(2):
        drafter.spec_generate(target, prompt(4), max_new_tokens=6, **settings)
    assert not made
    (message,) = [record.message for record in caplog.records]
    assert reason in message
    with pytest.raises(ValueError, match=f"graphs=True cannot be served: .*{reason}"):
        drafter.spec_generate(target, prompt(4), max_new_tokens=6, graphs=True, **settings)


def test_a_past_is_not_served() -> None:
    drafter = toys.drafter()
    with pytest.raises(ValueError, match="past"):
        drafter.spec_generate(family("llama"), prompt(4), past=drafter.new_past(), graphs=True)


@pytest.mark.parametrize("make", [toys.gemma3, toys.gemma2])
def test_targets_with_a_reason(make: Any, made: list[Any]) -> None:
    target, ids = make(), prompt(6)
    with pytest.raises(ValueError, match="do not see all tokens"):
        toys.drafter().spec_generate(target, ids, max_new_tokens=20, graphs=True)
    out = toys.drafter().spec_generate(target, ids, max_new_tokens=20)
    assert text_of(out, ids) == greedy(target, ids, 20) and not made


def test_a_target_with_a_scale_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    target, ids = toys.llama(), prompt(6)
    for layer in target.model.layers:
        layer.self_attn.scaling = 0.1
    out = toys.drafter().spec_generate(target, ids, max_new_tokens=20)
    assert text_of(out, ids) == greedy(target, ids, 20)
    assert "a scale or a value width of its own" in caplog.text
    assert target.config._attn_implementation == "sdpa"


def test_on_a_cpu_nothing_is_captured(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(obstacles_flashmap, "DEVICES", ("cuda",))

    def fail(*args: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(GraphLoop, "__init__", fail)
    toys.drafter().spec_generate(family("llama"), prompt(4), max_new_tokens=6)
    assert not caplog.records
    with pytest.raises(ValueError, match="the drafter is on cpu, and graphs need a CUDA device"):
        toys.drafter().spec_generate(family("llama"), prompt(4), graphs=True)


@pytest.mark.parametrize("value", ["yes", None, 1, 2.0])
def test_what_is_no_choice(value: Any) -> None:
    with pytest.raises(ValueError, match="True or False"):
        toys.drafter().spec_generate(family("llama"), prompt(4), graphs=value)


def test_numbers_that_are_none() -> None:
    drafter, target = toys.drafter(), toys.llama()
    stream = drafter.stream_generate(target, prompt(5), max_new_tokens=30)
    next(stream)
    with torch.no_grad():
        target.lm_head.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match="NaN"):
        list(stream)


def test_generate_in_rounds_of_fixed_shape(made: list[Any]) -> None:
    drafter, target = toys.drafter(), family("llama")
    settings = {"max_new_tokens": 20, "return_dict_in_generate": True, "output_scores": True}
    settings |= {"output_logits": True, "attention_mask": MASK, "do_sample": True, "top_k": 9}
    found = []
    for graphs in (False, True):
        decoding = functools.partial(
            drafter.flashmap_decoding, draft_model=drafter, graphs=graphs, seed=4
        )
        found.append(target.generate(IDS, custom_generate=decoding, **settings))
    assert made and found[0].sequences.equal(found[1].sequences)
    for name in ("scores", "logits"):
        for plain, static in zip(found[0][name], found[1][name], strict=True):
            assert torch.allclose(plain, static, atol=1e-4)
