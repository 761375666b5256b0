"""Pearson's chi-square test of counts against exact probabilities, without scipy."""

from collections.abc import Sequence

import torch
from torch import Tensor

SMALLEST_EXPECTED = 5.0


def p_value(counts: Tensor, probabilities: Tensor) -> float:
    """Chance of counts at least this far from `probabilities` (same shape) if those are true.

    Outcomes expected fewer than 5 times share one bin. A count where the probability is 0 gives 0.
    """
    counts, probabilities = counts.double().flatten(), probabilities.double().flatten()
    assert abs(float(probabilities.sum()) - 1.0) < 1e-6
    if counts[probabilities == 0].any():
        return 0.0
    expected = probabilities * counts.sum()
    common = expected >= SMALLEST_EXPECTED
    observed_bins, expected_bins = counts[common], expected[common]
    rare = expected[~common].sum()
    if rare >= SMALLEST_EXPECTED:
        observed_bins = torch.cat((observed_bins, counts[~common].sum().reshape(1)))
        expected_bins = torch.cat((expected_bins, rare.reshape(1)))
    elif len(expected_bins) > 0:  # too few even together: they join the smallest bin
        smallest = int(expected_bins.argmin())
        observed_bins[smallest] += counts[~common].sum()
        expected_bins[smallest] += rare
    statistic = ((observed_bins - expected_bins).square() / expected_bins).sum()
    freedom = torch.tensor((len(expected_bins) - 1) / 2, dtype=torch.float64)
    assert freedom > 0, "one bin tests nothing"
    return float(torch.special.gammaincc(freedom, statistic / 2))


def joint_counts(samples: Sequence[Sequence[int]], vocab_size: int) -> Tensor:
    """Counts of each sequence among `samples` of n tokens, shape (vocab_size, ) * n."""
    table = torch.tensor(samples)
    num_tokens = table.shape[1]
    index = torch.zeros(len(samples), dtype=torch.long)
    for column in range(num_tokens):
        index = index * vocab_size + table[:, column]
    counts = torch.bincount(index, minlength=vocab_size**num_tokens)
    return counts.reshape((vocab_size,) * num_tokens)
