"""Rounds of fixed shape give the plain loop's tokens, whoever else is in the batch; they are kept
for later calls, and what they cannot serve goes on in the plain loop with one reason.

On a CPU a round runs as it is written; on a GPU it is captured, which `test_graphs_gpu` is about.
"""

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support import toys
from support.oracle import Oracle, Seer, num_right, oracle, padded, seen_texts
from support.toys import greedy, prompt, text_of
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from flashmap.modeling import graphs_flashmap, obstacles_flashmap, target_flashmap
from flashmap.modeling.acceptance_flashmap import STREAMS, coin_table
from flashmap.modeling.fused_flashmap import coin
from flashmap.modeling.fusion_flashmap import FusedAttention, fused_modules
from flashmap.modeling.graphs_flashmap import GraphLoop
from flashmap.modeling.round_flashmap import Round
from flashmap.modeling.step_flashmap import FusedStep

FAMILIES: dict[str, Any] = {
    "llama": toys.llama,
    "qwen3": toys.qwen3,
    "gpt2": lambda: toys.gpt2(positions=160),
}
LENGTHS = (9, 1, 17, 4)
IDS, MASK = padded([prompt(length, seed=length) for length in LENGTHS], "left")
SEEDS = [3, 10, 8, 6]


@functools.cache
def family(name: str) -> Any:
    return FAMILIES[name]()


@pytest.fixture(autouse=True)
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a CPU take part, and forgets which reasons were given."""
    monkeypatch.setattr(obstacles_flashmap, "DEVICES", ("cpu", "cuda"))
    monkeypatch.setattr(target_flashmap, "_warned", set())


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The rounds that are made from now on."""
    rounds: list[Any] = []
    honest = Round.__init__

    def init(self: Any, *args: Any) -> None:
        honest(self, *args)
        rounds.append(self)

    monkeypatch.setattr(Round, "__init__", init)
    return rounds


def both(drafter: Any, target: Any, ids: Any = IDS, mask: Any = MASK, **settings: Any) -> Any:
    """The output in rounds of fixed shape, after comparing it with the plain loop's."""
    settings = {"max_new_tokens": 32, "seed": SEEDS[: len(ids)], **settings}
    plain = drafter.spec_generate(target, ids, attention_mask=mask, graphs=False, **settings)
    found = drafter.spec_generate(target, ids, attention_mask=mask, graphs=True, **settings)
    assert found.sequences.equal(plain.sequences)
    assert found.acceptance_lengths == plain.acceptance_lengths
    assert (found.num_new_tokens, found.seeds) == (plain.num_new_tokens, plain.seeds)
    return found


def knowing(monkeypatch: pytest.MonkeyPatch, drafter: Oracle) -> Oracle:
    """Lets the fused step draft what the oracle's `draft` does."""
    hidden, logits, asked = FusedStep.hidden, FusedStep.logits, {}
    init, loops = GraphLoop.__init__, []

    def begun(self: Any, *args: Any) -> None:
        init(self, *args)
        loops.append(self)

    def noted(self: Any, context: Any, positions: Any, **others: Any) -> Any:
        asked[self] = list(zip(others["seeds"].tolist(), positions.tolist(), strict=True))
        return hidden(self, context, positions, **others)

    def loud(self: Any, states: Any) -> Any:
        out = logits(self, states).float().clone()
        # A round is first tried out with seed 0, and goes on with sequences that have ended.
        running = [one.seed for one in loops[-1]._samplers]
        for row, (seed, position) in enumerate(asked[self]):
            right = num_right(seed, position, out.shape[1]) if seed in running else 0
            for slot, token in enumerate(drafter.likely(seed, position, right) if right else ()):
                out[row, slot, token] += drafter.loud
        return out

    monkeypatch.setattr(GraphLoop, "__init__", begun)
    monkeypatch.setattr(FusedStep, "hidden", noted)
    monkeypatch.setattr(FusedStep, "logits", loud)
    return drafter


# Tokens


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("num_steps", [1, 2])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_batch_is_the_plain_loops(
    name: str, num_steps: int, temperature: float, made: list[Any]
) -> None:
    for seed in (1, -(2**60)):
        both(toys.drafter(), family(name), num_steps=num_steps, temperature=temperature, seed=seed)
    assert made


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_are_the_targets_own(
    name: str, made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, drafter = family(name), knowing(monkeypatch, oracle(5))
    rows = [prompt(length, seed=length) for length in LENGTHS]
    own = [greedy(target, ids, 60) for ids in rows]
    for seed, ids, text in zip(SEEDS, rows, own, strict=True):
        drafter.texts[seed] = ids[0].tolist() + text
    out = both(drafter, target)
    assert made and out.sequences[:, IDS.shape[1] :].tolist() == [text[:32] for text in own]
    assert len({tuple(row) for row in out.acceptance_lengths}) == 4
    assert {1, 6} <= {length for row in out.acceptance_lengths for length in row}


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_sampled_tokens_with_high_and_uneven_acceptance(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, drafter = family(name), knowing(monkeypatch, oracle(4, cls=Seer))
    with seen_texts(drafter, target):
        out = both(drafter, target, temperature=0.15, max_new_tokens=24)
    accepted = [length for row in out.acceptance_lengths for length in row]
    assert sum(accepted) / len(accepted) > 1.3
    assert len(set(accepted)) >= 4, accepted


@pytest.mark.parametrize("settings", [{"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.2, "top_k": 9}])
def test_truncations(settings: dict[str, Any], made: list[Any]) -> None:
    both(toys.drafter(), family("llama"), temperature=1.3, **settings)
    assert made


@pytest.mark.parametrize("num_tokens", range(1, 8))
def test_any_number_of_tokens(num_tokens: int) -> None:
    for temperature in (0.0, 0.8):
        both(toys.drafter(), family("qwen3"), temperature=temperature, max_new_tokens=num_tokens)


def test_a_stop_anywhere_in_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    target, ids = family("llama"), prompt(5, seed=2)
    own, drafter = greedy(target, ids, 40), knowing(monkeypatch, oracle(4))
    drafter.texts[SEEDS[0]] = ids[0].tolist() + own
    for place in range(1, 14):
        out = both(drafter, target, ids, None, stop_token_ids=[own[place]])
        assert text_of(out, ids) == own[: own.index(own[place]) + 1]


def test_rows_that_end_at_different_times(made: list[Any]) -> None:
    for temperature in (0.0, 1.0):
        for stop in range(0, 60, 20):
            out = both(
                toys.drafter(), family("llama"), temperature=temperature, stop_token_ids=[stop]
            )
    assert made and isinstance(out.num_new_tokens, list)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_last_positions_of_a_target(temperature: float, made: list[Any]) -> None:
    target, ids = toys.gpt2(positions=40), prompt(5)
    out = both(toys.drafter(), target, ids, None, max_new_tokens=35, temperature=temperature)
    assert made and out.sequences.shape[1] == 40
    both(toys.drafter(), toys.scaled_rope("dynamic", 40), ids, None, max_new_tokens=35)


def test_nothing_beyond_a_text_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Round.load

    def poisoned(self: Any, *args: Any) -> None:
        honest(self, *args)
        for row, length in enumerate(self._lengths.tolist()):
            for key, value in self.entries:
                key[row, :, length:], value[row, :, length:] = 1e4, 1e4
            self._context.kv[:, :, row, :, length:] = 1e4

    monkeypatch.setattr(Round, "load", poisoned)
    for temperature in (0.0, 0.8):
        both(toys.drafter(), family("llama"), temperature=temperature)


def test_coins_are_the_samplers() -> None:
    seeds = [7, -(2**60)]
    table = coin_table(torch.tensor(seeds), 9)
    assert table.dtype == torch.float64
    for place, stream in enumerate(STREAMS):
        for row, seed in enumerate(seeds):
            expected = [coin(seed, position, stream) for position in range(9)]
            assert table[place, row].tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "qwen3", "biased"])
def test_modules_are_fused_where_their_numbers_are_the_same(name: str, dtype: torch.dtype) -> None:
    target = toys.llama(attention_bias=True) if name == "biased" else FAMILIES[name]()
    target = target.to(dtype)
    fused = dict(fused_modules(target))
    attentions = [module for module in fused if isinstance(fused[module], FusedAttention)]
    num_layers, num_norms = len(target.model.layers), 4 if name == "qwen3" else 2
    assert len(attentions) == num_layers
    assert len(fused) == num_layers * (num_norms + 3) + 1
    assert set(target.model.layers) <= set(fused)
    assert not any("forward" in vars(module) for module in target.modules())


def test_a_module_of_another_formula_keeps_it() -> None:
    target = toys.qwen3()
    norm, attention = target.model.layers[1].input_layernorm, target.model.layers[0].self_attn
    mlp, adapted = target.model.layers[2].mlp, target.model.layers[2].self_attn
    mlp.act_fn = torch.nn.GELU()
    adapted.v_proj.register_forward_hook(lambda *_: None)
    for module, by in ((norm, 1.0), (attention, 0.1)):
        own = type(module).forward

        def shifted(self: Any, *args: Any, own: Any = own, by: float = by, **kwargs: Any) -> Any:
            out = own(self, *args, **kwargs)
            return (out[0] + by, out[1]) if isinstance(out, tuple) else out + by

        module.__class__ = type("Shifted", (type(module),), {"forward": shifted})
    fused = dict(fused_modules(target))
    layers = target.model.layers
    assert not {norm, attention, mlp, adapted, *layers} & set(fused)
    assert {layers[1].self_attn, layers[1].mlp} <= set(fused)
    layers[1].mlp.register_forward_hook(lambda module, args, out: out * 2)
    assert fused_modules(toys.qwen3()) and layers[1] not in dict(fused_modules(target))


class NoNumbers(TorchDispatchMode):
    """Fails where a number is read from a tensor, or a tensor made from a number: both take the
    host, which a graph does without."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split("::")[1].split(".")[0]
        assert name not in ("_local_scalar_dense", "is_nonzero", "nonzero", "equal", "lift_fresh")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.9, "top_k": 7}])
@pytest.mark.parametrize("num_steps", [1, 2])
def test_a_round_reads_no_number(
    num_steps: int, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, played = Round._play, []

    def watched(self: Any) -> None:
        played.append(self)
        with NoNumbers():
            honest(self)

    monkeypatch.setattr(Round, "_play", watched)
    toys.drafter().spec_generate(
        family("qwen3"), IDS, attention_mask=MASK, max_new_tokens=8, graphs=True,
        num_steps=num_steps, **settings,
    )  # fmt: skip
    assert played
    with pytest.raises(AssertionError), NoNumbers():
        torch.zeros(1).item()


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
