"""The flow's objectives against a flow that is known exactly: one slot with a known prior.

There the denoiser is softmax(log prior + s x / (1 - s)^2), and the map follows from integrating
dx / ds = (D_s(x) - x) / (1 - s), which in w = -log(1 - s) reads dx / dw = D - x and stays smooth.
"""

import itertools
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import toys
from torch import Tensor

from flashmap import schedule
from flashmap.training import losses
from flashmap.training.blocks import Blocks, Context, Target, slots_of
from flashmap.training.flow import Distillation, Flow, Jump
from flashmap.training.objectives import Step
from flashmap.training.recipe import LossRecipe, RunRecipe

PRIOR = (0.5, 0.3, 0.2)
END = 25.0  # w of the time 1, to 1e-11
STATES = ((0.3, -0.8, 0.5), (-1.1, 0.4, 0.2), (0.05, 0.6, -0.4))
TIMES = ((0.0, 0.5, 1.0), (0.0, 0.3, 0.6), (0.2, 0.5, 0.7), (0.4, 0.45, 0.9), (0.55, 0.8, 1.0))


def denoiser(x: Sequence[float], s: float) -> list[float]:
    """The posterior of the token given the state, by Bayes."""
    logits = [math.log(p) + s * value / (1.0 - s) ** 2 for p, value in zip(PRIOR, x, strict=True)]
    weights = [math.exp(logit - max(logits)) for logit in logits]
    return [weight / sum(weights) for weight in weights]


def exact_map(x: Sequence[float], s: float, t: float, steps: int = 1200) -> list[float]:
    """X_s,t(x) by the classical Runge-Kutta method in w."""
    w, end = -math.log1p(-s), -math.log1p(-t) if t < 1.0 else END
    step, state = (end - w) / steps, list(x)

    def slope(at: float, y: list[float]) -> list[float]:
        return [d - value for d, value in zip(denoiser(y, -math.expm1(-at)), y, strict=True)]

    def shifted(y: list[float], k: list[float], by: float) -> list[float]:
        return [value + by * change for value, change in zip(y, k, strict=True)]

    for i in range(steps):
        at = w + i * step
        k1 = slope(at, state)
        k2 = slope(at + step / 2, shifted(state, k1, step / 2))
        k3 = slope(at + step / 2, shifted(state, k2, step / 2))
        k4 = slope(at + step, shifted(state, k3, step))
        state = [
            value + step / 6 * (a + 2 * b + 2 * c + d)
            for value, a, b, c, d in zip(state, k1, k2, k3, k4, strict=True)
        ]
    return state


def exact_delta(x: Sequence[float], s: float, t: float) -> list[float]:
    """delta_s,t(x), from X = ((1 - t) x + (t - s) delta) / (1 - s)."""
    if s == t:
        return denoiser(x, s)
    pairs = zip(exact_map(x, s, t), x, strict=True)
    return [((1.0 - s) * moved - (1.0 - t) * value) / (t - s) for moved, value in pairs]


def double(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# The rules, on the exact flow


@pytest.mark.parametrize(("s", "u", "t"), TIMES)
def test_the_exact_flow_obeys_the_semigroup_rule(s: float, u: float, t: float) -> None:
    start, middle, end = double(s), double(u), double(t)
    for x in STATES:
        first, whole = double(exact_delta(x, s, u)), double(exact_delta(x, s, t))
        assert whole.min() >= -1e-9
        assert abs(float(whole.sum()) - 1.0) < 1e-9
        between = losses.move(double(x), first, start, middle)
        torch.testing.assert_close(between, double(exact_map(x, s, u)), rtol=0, atol=1e-9)
        second = double(exact_delta(between.tolist(), u, t))
        share = losses.semigroup_share(start, middle, end)
        joined = share * first + (1.0 - share) * second
        torch.testing.assert_close(joined, whole, rtol=0, atol=1e-6)
        arrived = losses.move(between, second, middle, end)
        torch.testing.assert_close(arrived, double(exact_map(x, s, t)), rtol=0, atol=1e-6)


def test_delta_of_a_short_jump_is_the_denoiser() -> None:
    for x in STATES:
        found = double(exact_delta(x, 0.5, 0.5 + 1e-6))
        torch.testing.assert_close(found, double(denoiser(x, 0.5)), rtol=0, atol=1e-4)


# The objectives


def pieces(**changes: Any) -> tuple[Any, Target, Distillation]:
    """A drafter, its target and a distillation with another drafter as teacher."""
    target, model, teacher = toys.llama(), toys.drafter(), toys.drafter(seed=9)
    embedding = target.get_input_embeddings().weight.detach()
    reader = Target(target, list(model.config.target_layer_ids), embedding)
    recipe = LossRecipe(**changes)
    return model, reader, Distillation(recipe, model, reader, RunRecipe(), teacher)


def make_step(model: Any, reader: Target) -> Step:
    ids = torch.cat([toys.prompt(12, seed) for seed in range(2)])
    anchors = torch.tensor([[3, 5, 8, 4], [10, 2, 6, 7]])
    blocks = Blocks(ids, anchors, torch.tensor([12, 12]))
    features, _ = reader.read(model, ids, logits=False)
    slots = slots_of(blocks, model.config.block_size)
    return Step(blocks, slots, features, reader.embed(ids.gather(1, anchors)), None)


@torch.no_grad()
def one_delta(
    model: Any, reader: Target, step: Step, block: int, x: Tensor, times: tuple[float, float]
) -> Tensor:
    """Distributions (K, V) of one block's jump between scalar times, the way inference jumps."""
    num_anchors, size = step.blocks.anchors.shape[1], model.config.block_size
    row, anchor = block // num_anchors, int(step.blocks.anchors.flatten()[block])
    cache = model.new_cache(1, 20)
    model.extend_context(cache, step.features[row : row + 1, :anchor])
    embeds = step.embeds[row, block % num_anchors][None, None]
    cache.write(model.anchor_entries(embeds, torch.tensor([[anchor]])))
    positions = torch.arange(anchor + 1, anchor + 1 + size)[None]
    inputs = model.embed_state(x[None], *times, reader.embedding)
    conditions = model.time_conditioning(*times)
    hidden = model(inputs, conditions, positions, cache.context(anchor + 1))
    return torch.softmax(reader.head(hidden)[0], dim=-1)


def test_noisy_states_are_noise_and_tokens_in_the_shares_of_their_time() -> None:
    model, _, flow = pieces()
    tokens = torch.arange(6).view(2, 3)
    s = torch.tensor([0.25, 0.8])
    torch.manual_seed(3)
    noise = torch.randn(2, 3, toys.VOCAB)
    torch.manual_seed(3)
    state = flow.noisy(tokens, s)
    assert state.dtype == torch.float32
    onehot = torch.nn.functional.one_hot(tokens, toys.VOCAB)
    wanted = (1.0 - s)[:, None, None] * noise + s[:, None, None] * onehot
    torch.testing.assert_close(state, wanted)
    assert model.config.vocab_size == toys.VOCAB


def test_noisy_states_have_the_mean_and_variance_of_the_path() -> None:
    _, _, flow = pieces()
    count = 4000
    state = flow.noisy(torch.full((count, 1), 7), torch.full((count,), 0.6))[:, 0].double()
    wanted = torch.zeros(toys.VOCAB, dtype=torch.float64)
    wanted[7] = 0.6
    assert float((state.mean(dim=0) - wanted).abs().max()) < 4.5 * 0.4 / math.sqrt(count)
    variance = state.var(dim=0) / 0.4**2
    assert float((variance - 1.0).abs().max()) < 4.5 * math.sqrt(2.0 / count)


@pytest.mark.parametrize("gate", ["jump", "constant"])
def test_a_batch_of_jumps_gives_what_single_jumps_between_scalar_times_give(gate: str) -> None:
    model, reader, flow = pieces()
    model.config.noise_gate = gate
    step = make_step(model, reader)
    count = len(step.slots.tokens)
    s = torch.tensor([0.0, 0.0, 0.1, 0.4, 0.5, 0.7, 0.25, 0.9])
    t = torch.tensor([1.0, 0.5, 1.0, 0.4, 0.8, 0.75, 1.0, 0.95])
    state = flow.noisy(step.slots.tokens, s)
    with torch.no_grad():
        hidden = flow.jump(model, state, s, t, step.slots.positions, flow.context(step))
        found = torch.softmax(reader.head(hidden), dim=-1)
    for block in range(count):
        times = (float(s[block]), float(t[block]))
        alone = one_delta(model, reader, step, block, state[block], times)
        torch.testing.assert_close(found[block], alone, rtol=1e-4, atol=1e-5)


def test_accuracies_are_one_in_every_stratum_in_random_order() -> None:
    _, _, flow = pieces()
    torch.manual_seed(0)
    draws = [flow.accuracies(50) for _ in range(200)]
    for found in draws:
        steps = found.sort().values.diff()
        torch.testing.assert_close(steps, torch.full((49,), 0.02), rtol=0, atol=1e-6)
        assert 0.0 <= float(found.min()) < 0.02
        assert float(found.max()) <= 1.0
    assert abs(float(torch.stack(draws)[:, 0].mean()) - 0.5) < 4.0 * math.sqrt(1 / 12 / 200)


def test_times_are_a_mix_of_the_schedules_and_even_ones() -> None:
    _, _, flow = pieces(uniform_times=0.3)
    accuracies = torch.tensor([0.1, 0.5, 0.9])
    exact = schedule.jump_times(accuracies.tolist(), toys.VOCAB)
    wanted = [0.7 * time + 0.3 * float(a) for time, a in zip(exact, accuracies, strict=True)]
    torch.testing.assert_close(flow.time(accuracies), torch.tensor(wanted), rtol=0, atol=1e-4)


def test_jumps_are_diagonal_whole_or_between_in_the_shares_of_the_recipe() -> None:
    _, _, flow = pieces(diagonal_share=0.25, boundary_share=0.5)
    torch.manual_seed(1)
    jump = flow.times_of(torch.Size((6, 8)))
    s, u, t, diagonal = (time.view(6, 8) for time in jump)
    assert diagonal.equal((torch.arange(8) < 2).expand(6, -1))
    assert s[diagonal].equal(t[diagonal])
    assert s[diagonal].std() > 0.05  # all over the schedule
    whole = slice(2, 6)
    assert not s[:, whole].any()
    torch.testing.assert_close(t[:, whole], torch.ones(6, 4))
    half = flow.time(torch.tensor(0.5)).expand(6, 4)
    torch.testing.assert_close(u[:, whole], half)
    between = slice(6, None)
    assert bool((s[:, between] < u[:, between]).all())
    assert bool((u[:, between] < t[:, between]).all())
    assert bool((t <= 1.0 + 1e-6).all())


def test_lengths_between_are_even_and_starts_even_in_what_is_left() -> None:
    _, _, flow = pieces(diagonal_share=0.0, boundary_share=0.0, uniform_times=1.0)
    torch.manual_seed(2)
    s, u, t, _ = flow.times_of(torch.Size((20, 100)))  # with even times, time is accuracy
    torch.testing.assert_close(u, (s + t) / 2)
    lengths = t - s
    places = s / (1.0 - lengths).clamp(min=1e-6)
    for values in (lengths, places):
        assert abs(float(values.mean()) - 0.5) < 4 * math.sqrt(1 / 12 / 2000)
        assert abs(float(values.var()) - 1 / 12) < 0.01
    assert abs(float(torch.corrcoef(torch.stack((lengths, places)))[0, 1])) < 4 / math.sqrt(2000)


def test_the_goal_is_the_teachers_denoiser_or_two_jumps_of_the_drafter() -> None:
    model, reader, flow = pieces()
    step = make_step(model, reader)
    s = torch.tensor([0.4, 0.75, 0.0, 0.0, 0.1, 0.5, 0.3, 0.6])
    u = torch.tensor([0.4, 0.75, 0.7, 0.7, 0.3, 0.55, 0.5, 0.8])
    t = torch.tensor([0.4, 0.75, 1.0, 1.0, 0.6, 0.7, 0.9, 1.0])
    diagonal = s == t
    state = flow.noisy(step.slots.tokens, s)
    goal = flow.goal(state, Jump(s, u, t, diagonal), step, flow.context(step))
    assert not goal.requires_grad
    torch.testing.assert_close(goal.sum(dim=-1), torch.ones(8, 3))
    assert float(goal.min()) >= 0.0
    for block in range(8):
        a, b, c = (float(time[block]) for time in (s, u, t))
        x = state[block]
        if diagonal[block]:
            wanted = one_delta(flow.teacher, reader, step, block, x, (a, a))
        else:
            first = one_delta(model, reader, step, block, x, (a, b))
            middle = ((1 - b) * x + (b - a) * first) / (1 - a)
            second = one_delta(model, reader, step, block, middle, (b, c))
            share = (1 - c) * (b - a) / ((1 - b) * (c - a))
            wanted = share * first + (1 - share) * second
        torch.testing.assert_close(goal[block], wanted, rtol=1e-4, atol=1e-5)


class Exact(Distillation):
    """A distillation whose drafter and teacher are the exact flow of independent slots."""

    def jump(
        self, model: Any, state: Tensor, s: Tensor, t: Tensor, positions: Tensor, context: Context
    ) -> Tensor:
        found = []
        for rows, start, end in zip(state.double().tolist(), s.tolist(), t.tolist(), strict=True):
            found.append([exact_delta(row, start, end) for row in rows])
        return double(found).clamp(min=1e-30).log()


def test_the_goal_of_an_exact_drafter_is_its_own_jump(monkeypatch: pytest.MonkeyPatch) -> None:
    model, reader, _ = pieces()
    flow = Exact(LossRecipe(), model, reader, RunRecipe(), model)
    flow.target = SimpleNamespace(head=lambda hidden: hidden)  # type: ignore[assignment]
    monkeypatch.setattr(flow, "context", lambda step, model=None: None)
    s, u, t = (double(column) for column in zip(*TIMES, (0.5, 0.5, 0.5), strict=True))
    state = double(list(itertools.islice(itertools.cycle(STATES), len(s))))[:, None]
    jump = Jump(s, u, t, s == t)
    step = make_step(model, reader)
    nothing: Any = None
    goal = flow.goal(state, jump, step, nothing)
    whole = flow.jump(model, state, s, t, step.slots.positions, nothing).exp()
    torch.testing.assert_close(goal.double(), whole, rtol=0, atol=1e-5)
    found = losses.soft_cross_entropy(whole.log(), goal)
    entropy = -(whole * whole.log()).sum(dim=-1)
    torch.testing.assert_close(found.double(), entropy, rtol=0, atol=1e-4)  # it cannot be lower


# The losses


def test_the_flows_loss_is_the_cross_entropy_of_every_valid_slot() -> None:
    model, reader, _ = pieces()
    recipe = LossRecipe(slot_weights="uniform")
    flow, step = Flow(recipe, model, reader, RunRecipe()), make_step(model, reader)
    torch.manual_seed(4)
    result = flow(step.blocks, step.features, None)
    torch.manual_seed(4)
    s = flow.time(flow.accuracies(8))
    state = flow.noisy(step.slots.tokens, s)
    values = []
    for block in range(8):
        time = float(s[block])
        q = one_delta(model, reader, step, block, state[block], (time, time))
        for k in range(3):
            if step.slots.valid[block, k]:
                values.append(-math.log(float(q[k, step.slots.tokens[block, k]])))
    assert len(values) < 24  # one block reaches over the end
    wanted = torch.tensor(sum(values) / len(values))
    torch.testing.assert_close(result.loss.detach(), wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(result.stats[0], wanted, rtol=1e-4, atol=1e-4)


def test_distillation_trains_the_drafter_and_never_the_teacher_or_the_goal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, reader, flow = pieces(slot_weights="uniform")
    step = make_step(model, reader)
    seen, goal_of = [], flow.goal

    def kept(*given: Any) -> Tensor:
        seen.append(goal_of(*given))
        return seen[-1]

    monkeypatch.setattr(flow, "goal", kept)
    torch.manual_seed(5)
    result = flow(step.blocks, step.features, None)
    torch.manual_seed(5)
    jump = flow.times_of(step.blocks.anchors.shape)
    state = flow.noisy(step.slots.tokens, jump.s)
    total = 0.0
    for block in range(8):
        times = (float(jump.s[block]), float(jump.t[block]))
        q = one_delta(model, reader, step, block, state[block], times).double()
        loss = -(seen[0][block].double() * q.log()).sum(dim=-1)
        total += float((loss * step.slots.valid[block]).sum())
    wanted = torch.tensor(total / int(step.slots.valid.sum()))
    torch.testing.assert_close(result.loss.detach(), wanted, rtol=1e-4, atol=1e-4)
    result.loss.backward()
    gradients = [weight.grad for weight in model.parameters()]
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)
    assert all(weight.grad is None for weight in flow.teacher.parameters())
