"""The pieces of the objectives against the same quantities as plain float64 loops."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from flashmap.training import losses

BLOCKS, DRAWS, SLOTS, VOCAB = 3, 2, 3, 4
Row = Sequence[float]


def normal(*shape: int, seed: int = 0, scale: float = 1.5) -> Tensor:
    """Float64 logits."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64) * scale


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def softmax(row: Row) -> list[float]:
    weights = [math.exp(value) for value in row]
    return [weight / math.fsum(weights) for weight in weights]


def slotwise(function: Callable[..., float], *tables: Any) -> Tensor:
    """`function` of the rows of every block and slot, float64 (G, K)."""
    lists = [table.tolist() for table in tables]
    return torch.tensor(
        [
            [function(*rows) for rows in zip(*block, strict=True)]
            for block in zip(*lists, strict=True)
        ],
        dtype=torch.float64,
    )


def cross_entropy(row: Row, token: int) -> float:
    return -math.log(softmax(row)[token])


def soft_cross_entropy(row: Row, wanted: Row) -> float:
    return -math.fsum(p * math.log(q) for p, q in zip(wanted, softmax(row), strict=True))


def total_variation(row: Row, wanted: Row) -> float:
    pairs = zip(softmax(row), softmax(wanted), strict=True)
    return 0.5 * math.fsum(abs(p - q) for q, p in pairs)


def d_pace(nll: Row, valid: Sequence[bool], confidence: float) -> list[float]:
    """w_j = sum over valid m >= j of the product of c_i over i <= m."""
    end = sum(valid)
    weights = [0.0] * len(nll)
    for j, m in itertools.product(range(end), range(end)):
        if m >= j:
            chances = [confidence * math.exp(-nll[i]) + 1.0 - confidence for i in range(m + 1)]
            weights[j] += math.prod(chances)
    return weights


def mixture(logits: list[list[list[float]]], sequence: Sequence[int]) -> float:
    """Q(y_1, ..., y_j) of one block from logits (M, K, V): the mean over draws of the products."""
    products = [
        math.prod(softmax(draw[k])[token] for k, token in enumerate(sequence)) for draw in logits
    ]
    return math.fsum(products) / len(products)


def differences(function: Callable[[Tensor], Tensor], x: Tensor, step: float = 1e-5) -> Tensor:
    """Gradient of the sum of `function` by central differences in float64."""
    gradient = torch.zeros_like(x)
    for index in itertools.product(*map(range, x.shape)):
        high, low = x.clone(), x.clone()
        high[index] += step
        low[index] -= step
        gradient[index] = (function(high).sum() - function(low).sum()) / (2.0 * step)
    return gradient


def gradient(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (found,) = torch.autograd.grad(function(x).sum(), x)
    return found


def assert_near(found: Tensor, wanted: Tensor, tolerance: float = 2e-6) -> None:
    torch.testing.assert_close(found.double(), wanted.double(), rtol=tolerance, atol=tolerance)


# Every slot by itself


def test_cross_entropy_is_minus_the_logarithm_of_the_tokens_probability() -> None:
    logits, wanted = normal(BLOCKS, SLOTS, VOCAB), tokens(BLOCKS, SLOTS)
    found = losses.cross_entropy(logits, wanted)
    assert found.dtype == torch.float32
    assert_near(found, slotwise(cross_entropy, logits, wanted))
    assert_near(
        gradient(lambda x: losses.cross_entropy(x, wanted), logits),
        differences(lambda x: slotwise(cross_entropy, x, wanted), logits),
        1e-5,
    )


def test_soft_cross_entropy_weighs_every_token_by_its_wanted_probability() -> None:
    logits = normal(BLOCKS, SLOTS, VOCAB)
    wanted = torch.softmax(normal(BLOCKS, SLOTS, VOCAB, seed=2), dim=-1)
    assert_near(
        losses.soft_cross_entropy(logits, wanted), slotwise(soft_cross_entropy, logits, wanted)
    )
    found = gradient(lambda x: losses.soft_cross_entropy(x, wanted), logits)
    assert_near(found, differences(lambda x: slotwise(soft_cross_entropy, x, wanted), logits), 1e-5)
    assert_near(found, torch.softmax(logits, dim=-1) - wanted)


def test_soft_cross_entropy_against_one_token_is_its_cross_entropy() -> None:
    logits, wanted = normal(BLOCKS, SLOTS, VOCAB), tokens(BLOCKS, SLOTS)
    onehot = torch.nn.functional.one_hot(wanted, VOCAB)
    assert_near(losses.soft_cross_entropy(logits, onehot), slotwise(cross_entropy, logits, wanted))


def test_total_variation_is_what_verification_rejects() -> None:
    logits, wanted = normal(BLOCKS, SLOTS, VOCAB), normal(BLOCKS, SLOTS, VOCAB, seed=2)
    found = losses.total_variation(logits, wanted)
    assert_near(found, slotwise(total_variation, logits, wanted))

    def overlap(row: Row, other: Row) -> float:
        return math.fsum(map(min, softmax(row), softmax(other)))

    assert_near(1.0 - found, slotwise(overlap, logits, wanted))
    assert_near(
        gradient(lambda x: losses.total_variation(x, wanted), logits),
        differences(lambda x: slotwise(total_variation, x, wanted), logits),
        1e-5,
    )


def test_total_variation_spans_zero_to_one() -> None:
    logits = normal(BLOCKS, SLOTS, VOCAB)
    assert losses.total_variation(logits, logits).abs().max() < 1e-7
    apart = torch.tensor([[[99.0, 0.0], [0.0, 99.0]]])
    assert_near(losses.total_variation(apart, apart.flip(-1)), torch.ones(1, 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_judged_in_float32(dtype: torch.dtype) -> None:
    logits, other = (normal(BLOCKS, SLOTS, VOCAB, seed=seed).to(dtype) for seed in (0, 2))
    wanted = tokens(BLOCKS, SLOTS)
    assert_near(
        losses.cross_entropy(logits, wanted), slotwise(cross_entropy, logits.double(), wanted)
    )
    assert_near(
        losses.total_variation(logits, other),
        slotwise(total_variation, logits.double(), other.double()),
    )


# Weights


def test_exponential_weights_fall_by_e_every_decay_slots() -> None:
    found = losses.exponential_weights(5, 2.5, torch.device("cpu"))
    assert_near(found, torch.tensor([math.exp(-k / 2.5) for k in range(5)], dtype=torch.float64))


@pytest.mark.parametrize("confidence", [0.0, 0.5, 1.0])
def test_d_pace_weights_are_sums_of_products_and_end_with_the_document(confidence: float) -> None:
    nll = normal(4, 5, seed=3).abs()
    valid = torch.arange(5) < torch.tensor([5, 4, 1, 0])[:, None]
    found = losses.d_pace_weights(nll, valid, confidence)
    rows = zip(nll.tolist(), valid.tolist(), strict=True)
    wanted = [d_pace(row, mask, confidence) for row, mask in rows]
    assert_near(found, torch.tensor(wanted, dtype=torch.float64))
    assert not found[~valid].any()


def test_d_pace_weights_do_not_depend_on_what_follows_the_document() -> None:
    nll, other = normal(2, 4, seed=3).abs(), normal(2, 4, seed=4).abs()
    valid = torch.tensor([[True, True, False, False]]).expand(2, -1)
    mixed = torch.where(valid, nll, other)
    assert losses.d_pace_weights(nll, valid, 0.5).equal(losses.d_pace_weights(mixed, valid, 0.5))


def test_d_pace_weights_carry_no_gradient() -> None:
    nll = normal(2, 4).abs().requires_grad_()
    weights = losses.d_pace_weights(nll, torch.ones(2, 4, dtype=torch.bool), 0.5)
    assert not weights.requires_grad
    (found,) = torch.autograd.grad((weights * nll).sum(), nll)
    assert_near(found, weights)  # not the derivative of the weights too


def test_acceptance_weights_are_the_slope_of_the_expected_accepted_length() -> None:
    chance = torch.sigmoid(normal(4, 5, seed=3)).requires_grad_()
    valid = torch.arange(5) < torch.tensor([5, 4, 1, 0])[:, None]
    found = losses.acceptance_weights(chance, valid)
    (slope,) = torch.autograd.grad(losses.leading(chance.double() * valid).sum(), chance)
    assert not found.requires_grad
    assert_near(found, slope)


def test_acceptance_weights_are_finite_where_nothing_is_accepted() -> None:
    found = losses.acceptance_weights(torch.zeros(1, 3), torch.ones(1, 3, dtype=torch.bool))
    assert_near(found, torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64), 2e-3)


# Mixtures


def log_q(logits: Tensor, sequence: Tensor) -> Tensor:
    """Log q_m,k(y_k), float64 (G, M, K), of logits (G, M, K, V) and tokens (G, K)."""
    picked = sequence[:, None, :, None].expand(-1, logits.shape[1], -1, 1)
    return torch.log_softmax(logits, dim=-1).gather(3, picked)[..., 0]


def test_mixture_nll_sums_to_that_of_the_mean_of_the_draws_products() -> None:
    logits, wanted = normal(BLOCKS, DRAWS, SLOTS, VOCAB), tokens(BLOCKS, SLOTS)
    found = losses.mixture_nll(log_q(logits, wanted)).nll
    pairs = zip(logits.tolist(), wanted.tolist(), strict=True)
    exact = [-math.log(mixture(block, sequence)) for block, sequence in pairs]
    assert_near(found.sum(dim=-1), torch.tensor(exact, dtype=torch.float64))


def test_mixture_nll_of_one_draw_is_the_cross_entropy() -> None:
    logits, wanted = normal(BLOCKS, 1, SLOTS, VOCAB), tokens(BLOCKS, SLOTS)
    found = losses.mixture_nll(log_q(logits, wanted))
    assert_near(found.nll, slotwise(cross_entropy, logits[:, 0], wanted))
    assert_near(found.shares, torch.ones(BLOCKS, 1, SLOTS))


def test_mixture_conditionals_equal_those_of_all_sequences_counted_up() -> None:
    logits = normal(1, DRAWS, SLOTS, VOCAB, seed=5)
    block = logits[0].tolist()
    everything = list(itertools.product(range(VOCAB), repeat=SLOTS))
    joint = {sequence: mixture(block, sequence) for sequence in everything}
    assert math.isclose(math.fsum(joint.values()), 1.0)
    for sequence in everything:
        text = torch.tensor([sequence])
        nll, shares = losses.mixture_nll(log_q(logits, text))
        found = losses.mixture_distribution(logits, shares)
        assert_near(shares.sum(dim=1), torch.ones(1, SLOTS))
        for slot in range(SLOTS):
            seen = [joint[other] for other in everything if other[:slot] == sequence[:slot]]
            exact = [
                math.fsum(
                    joint[other]
                    for other in everything
                    if other[: slot + 1] == (*sequence[:slot], token)
                )
                / math.fsum(seen)
                for token in range(VOCAB)
            ]
            assert_near(found[0, slot], torch.tensor(exact, dtype=torch.float64))
            assert_near(nll[0, slot], torch.tensor(-math.log(exact[sequence[slot]])))


def test_mixture_gradients_agree_with_differences() -> None:
    x = -normal(2, DRAWS, SLOTS, seed=6).abs()
    weights = normal(2, SLOTS, seed=7).abs()

    def by_loops(values: Tensor) -> Tensor:
        total = torch.zeros(2, SLOTS, dtype=torch.float64)
        for g, k in itertools.product(range(2), range(SLOTS)):
            chances = [
                math.fsum(math.exp(math.fsum(draw[:end])) for draw in values[g].tolist())
                for end in (k, k + 1)
            ]
            total[g, k] = -math.log(chances[1] / chances[0])
        return total * weights

    assert_near(losses.mixture_nll(x).nll * weights, by_loops(x))
    found = gradient(lambda values: losses.mixture_nll(values).nll * weights, x)
    assert_near(found, differences(by_loops, x), 1e-7)


def test_mixture_is_finite_where_draws_disagree_wildly() -> None:
    x = torch.tensor([[[0.0, -300.0, 0.0], [-300.0, 0.0, -1.0]]])
    nll, shares = losses.mixture_nll(x)
    assert nll.isfinite().all()
    assert shares.isfinite().all()
    assert_near(nll.sum(), torch.tensor(300.0 - math.log((1 + math.exp(-1)) / 2)), 1e-5)


# Acceptance and the flow


def test_leading_is_the_mean_number_accepted_before_the_first_rejection() -> None:
    chances = torch.rand(4, SLOTS, generator=torch.Generator().manual_seed(0)).double()
    exact = []
    for row in chances.tolist():
        mean = 0.0
        for outcome in itertools.product((True, False), repeat=SLOTS):
            odds = (c if taken else 1.0 - c for c, taken in zip(row, outcome, strict=True))
            mean += math.prod(odds) * (*outcome, False).index(False)
        exact.append(mean)
    assert_near(losses.leading(chances), torch.tensor(exact, dtype=torch.float64))
    flags = torch.tensor([[True, True, False, True], [False, True, True, True], [True] * 4])
    assert losses.leading(flags).tolist() == [2.0, 0.0, 4.0]


@pytest.mark.parametrize("s", [0.0, 0.3, 0.8, 0.95])
def test_sharpness_makes_a_state_its_slots_posterior(s: float) -> None:
    state = normal(VOCAB, scale=0.5).tolist()
    densities = []
    for token in range(VOCAB):
        log_density = -math.fsum(
            (x - s * (v == token)) ** 2 / (2.0 * (1.0 - s) ** 2) for v, x in enumerate(state)
        )
        densities.append(log_density)
    posterior = softmax([value - max(densities) for value in densities])
    share = losses.sharpness(torch.tensor(s, dtype=torch.float64))
    found = torch.softmax(torch.tensor(state, dtype=torch.float64) * share, dim=-1)
    assert_near(found, torch.tensor(posterior, dtype=torch.float64), 1e-9)


def test_a_move_to_the_end_arrives_at_delta_and_one_of_no_length_stays() -> None:
    state, delta = normal(VOCAB), torch.softmax(normal(VOCAB, seed=2), dim=-1)
    s, end = torch.tensor(0.4, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64)
    assert_near(losses.move(state, delta, s, end), delta, 1e-12)
    assert_near(losses.move(state, delta, s, s), state, 1e-12)
    assert losses.move(state, delta, end, end).isfinite().all()


def test_semigroup_share_is_a_share_for_all_ordered_times() -> None:
    times = [0.0, 0.2, 0.5, 0.9, 1.0]
    for s, u, t in itertools.combinations(times, 3):
        found = float(losses.semigroup_share(*map(torch.tensor, (s, u, t))))
        wanted = (1.0 - t) * (u - s) / ((1.0 - u) * (t - s))
        assert 0.0 <= found <= 1.0
        assert math.isclose(found, wanted, rel_tol=1e-5, abs_tol=1e-7)
