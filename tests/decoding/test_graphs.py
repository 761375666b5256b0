"""Rounds of fixed shape give the plain loop's tokens, whoever else is in the batch.

On a CPU a round runs as it is written; on a GPU it is captured, which `test_graphs_gpu` is about.
"""

from typing import Any

import pytest
import torch
from support import toys
from support.oracle import Oracle, Seer, num_right, oracle, seen_texts
from support.rounds import FAMILIES, IDS, LENGTHS, MASK, SEEDS, both, family
from support.toys import greedy, prompt, text_of
from torch.utils._python_dispatch import TorchDispatchMode

from flashmap.modeling.acceptance_flashmap import STREAMS, coin_table
from flashmap.modeling.fused_flashmap import coin
from flashmap.modeling.fusion_flashmap import FusedAttention, fused_modules
from flashmap.modeling.graphs_flashmap import GraphLoop
from flashmap.modeling.round_flashmap import Round
from flashmap.modeling.step_flashmap import FusedStep

pytestmark = pytest.mark.usefixtures("everywhere")


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


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_jumps_from_a_bank(temperature: float, made: list[Any]) -> None:
    drafter, target = toys.drafter(), family("qwen3")
    settings = {"num_steps": 2, "temperature": temperature, "max_new_tokens": 12}
    both(drafter, target, jump_bank_size=50, **settings)
    both(drafter, target, **settings)
    both(drafter, target, **(settings | {"num_steps": 1}))
    both(drafter, target, jump_bank_size=50, **(settings | {"num_steps": 1}))
    assert len(made) == 3  # a bank of one jump is none


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
@pytest.mark.parametrize(("num_steps", "bank_size"), [(1, 0), (2, 0), (2, 9)])
def test_a_round_reads_no_number(
    num_steps: int, bank_size: int, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, played = Round._play, []

    def watched(self: Any) -> None:
        played.append(self)
        with NoNumbers():
            honest(self)

    monkeypatch.setattr(Round, "_play", watched)
    toys.drafter().spec_generate(
        family("qwen3"), IDS, attention_mask=MASK, max_new_tokens=8, graphs=True,
        num_steps=num_steps, jump_bank_size=bank_size, **settings,
    )  # fmt: skip
    assert played
    with pytest.raises(AssertionError), NoNumbers():
        torch.zeros(1).item()
