"""The model equals the published package's numbers, in bfloat16 bit for bit."""

import json
from itertools import pairwise

import pytest
import torch
from support import golden
from support.golden import Golden, assert_matches

from flashmap import FlashMapConfig
from flashmap.modeling import modeling_flashmap


@pytest.fixture(scope="module", params=golden.CASES)
def case(request: pytest.FixtureRequest) -> Golden:
    return golden.load(request.param)


@torch.no_grad()
def draft(case: Golden, num_steps: int) -> torch.Tensor:
    return case.model.draft(
        case.value("in.anchor_ids"), case.filled_cache(), case.embed_tokens, case.lm_head,
        num_steps=num_steps, noise=case.value("in.noise"),
    )  # fmt: skip


@pytest.mark.parametrize("num_steps", [1, 2, 3, 4])
def test_draft_logits(case: Golden, num_steps: int) -> None:
    assert_matches(draft(case, num_steps), case.value(f"out.draft_logits.{num_steps}"))


def test_jumps_change_the_draft(case: Golden) -> None:
    one, two = case.value("out.draft_logits.1"), case.value("out.draft_logits.2")
    assert (one - two).abs().max() > 0.01 * one.abs().max()


@torch.no_grad()
def test_context_with_the_anchors_entry(case: Golden) -> None:
    cache = case.filled_cache()
    length = cache.length
    case.model.draft(
        case.value("in.anchor_ids"), cache, case.embed_tokens, case.lm_head,
        num_steps=1, noise=case.value("in.noise"),
    )  # fmt: skip
    assert_matches(cache.kv, case.value("out.context_kv"))
    assert cache.length == length == case.value("in.target_hidden").shape[1]


@torch.no_grad()
def test_state_inputs(case: Golden) -> None:
    noise, embedding = case.value("in.noise"), case.embedding
    assert_matches(
        case.model.embed_state(noise, 0.0, 1.0, embedding), case.value("out.embed_state.0")
    )
    s = case.model.config.grid(2)[1]
    slots = torch.arange(noise.shape[1]).expand(noise.shape[:2])
    onehot = torch.nn.functional.one_hot(slots, noise.shape[2])
    state = (1 - s) * noise + s * onehot
    assert_matches(
        case.model.embed_state(state, s, 1.0, embedding), case.value("out.embed_state.mid")
    )


@torch.no_grad()
def test_one_jump_state_from_noise_in_the_hidden_width(case: Golden) -> None:
    uniform, factor = case.model.target_constants(case.embedding)
    noise = case.value("in.z").to(factor.dtype) @ factor.T
    assert_matches(case.model.mix_state(uniform, noise, 0.0, 1.0), case.value("out.mix_state.z"))


def test_constants_of_the_target(case: Golden) -> None:
    uniform, factor = case.model.target_constants(case.embedding)
    assert_matches(uniform, case.value("out.uniform_embedding"))
    assert_matches(factor, case.value("out.noise_factor"))
    gram = case.embedding.double().T @ case.embedding.double()
    tolerance = 1e-2 if factor.dtype == torch.bfloat16 else 1e-6
    assert (factor.double() @ factor.double().T - gram).abs().max() < tolerance * gram.abs().max()


@torch.no_grad()
def test_modulations(case: Golden) -> None:
    per_layer, final = case.model.time_conditioning(0.0, 1.0)
    size = case.model.config.hidden_size
    assert all(tensor.shape == (1, 1, size) for tensor in (*per_layer[0][0], *final))
    for_self = torch.stack([tensor.flatten() for tensor in per_layer[0][0]])
    assert_matches(for_self, case.value("out.modulation.layer0.self"))
    assert_matches(
        torch.stack([tensor.flatten() for tensor in final]), case.value("out.modulation.final")
    )


@torch.no_grad()
def states_of_a_draft(
    case: Golden, grid: list[float], monkeypatch: pytest.MonkeyPatch
) -> list[torch.Tensor]:
    """The states shown to the network if the noise is onehot(0) and prediction i is onehot(i)."""
    model, noise = case.model, torch.zeros_like(case.value("in.noise"))
    noise[..., 0] = 1.0
    predictions = iter(torch.eye(noise.shape[-1])[1:] * 1e4)
    states: list[torch.Tensor] = []

    def embed_state(state: torch.Tensor, *arguments: object) -> torch.Tensor:
        states.append(state)
        return torch.zeros(*state.shape[:2], model.config.target_hidden_size)

    steps = len(grid) - 1
    monkeypatch.setitem(model.config.jump_grids, str(steps), grid)
    monkeypatch.setattr(model, "embed_state", embed_state)
    monkeypatch.setattr(
        modeling_flashmap, "head_logits", lambda *_: next(predictions).expand_as(noise)
    )
    model.draft(
        case.value("in.anchor_ids"), case.filled_cache(), case.embed_tokens, case.lm_head,
        num_steps=steps, noise=noise,
    )  # fmt: skip
    return states


@pytest.mark.parametrize("steps", ["1", "2", "3", "4"])
def test_jump_coefficients_of_the_published_grids(
    steps: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A state is alpha noise + sum of beta_i prediction_i. Noise and predictions that are one-hots
    # let the coefficients be read off the states that the network is shown.
    expected = json.loads((golden.FOLDER / "jump_coefficients.json").read_text())[steps]
    grid = FlashMapConfig(target_layer_ids=[0]).jump_grids[steps]
    states = states_of_a_draft(golden.load("tiny-fp32"), grid, monkeypatch)
    assert len(states) == len(expected) == int(steps)
    for state, (alpha, betas) in zip(states, expected, strict=True):
        exact = torch.zeros(state.shape[-1])
        exact[: 1 + len(betas)] = torch.tensor([alpha, *betas])
        assert torch.allclose(state, exact.expand_as(state), rtol=1e-5, atol=1e-6)


def test_coefficients_of_a_grid_sum_to_its_time() -> None:
    # With x_s = (1 - s) noise + s y, predictions that all equal y give betas that sum to s.
    expected = json.loads((golden.FOLDER / "jump_coefficients.json").read_text())
    for steps, grid in FlashMapConfig(target_layer_ids=[0]).jump_grids.items():
        for (s, _), (alpha, betas) in zip(pairwise(grid), expected[steps], strict=True):
            assert alpha == pytest.approx(1 - s, abs=1e-12)
            assert sum(betas) == pytest.approx(s, abs=1e-12)
