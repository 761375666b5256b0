"""How much of a text the most frequent tokens make up: the curve from which the size of a draft
vocabulary is chosen.

A slot whose token the drafter cannot say is always rejected, so what a size leaves uncovered is
added to the rejections of every slot; a larger one costs memory and time in every draft.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from flashmap.files import write_figure

SMALLEST, STEP = 1024, 1024  # sizes recommended are multiples: kernels work in such tiles


@dataclass(frozen=True)
class Size:
    """A size of a draft vocabulary, and the share of the counted tokens that it covers."""

    size: int
    coverage: float


def coverage_curve(ranked_counts: Tensor) -> list[Size]:
    """Coverage at 1024, 2048, 4096, ... tokens and at all, for counts (V) in the order of their
    ranking."""
    vocab_size, covered = len(ranked_counts), _covered(ranked_counts)
    doubled = (SMALLEST << i for i in range(vocab_size.bit_length()))
    sizes = [size for size in doubled if size < vocab_size]
    return [Size(size, float(covered[size - 1])) for size in (*sizes, vocab_size)]


def recommend_size(ranked_counts: Tensor, wanted: float) -> Size:
    """The smallest multiple of 1024 tokens, or the whole vocabulary, that covers `wanted`."""
    vocab_size, covered = len(ranked_counts), _covered(ranked_counts)
    needed = int(torch.searchsorted(covered, wanted)) + 1
    size = min(-(-needed // STEP) * STEP, vocab_size)
    return Size(size, float(covered[size - 1]))


def unseen_share(counts: Tensor) -> float:
    """Estimate of how often text holds tokens that the corpus does not: the share of those that
    came once (Good and Turing)."""
    return float((counts == 1).sum() / counts.sum())


def draw_coverage(ranked_counts: Tensor, recommended: Size, path: Path) -> bool:
    """Draw the curve into a PNG file; False where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    covered = _covered(ranked_counts)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(covered) + 1), covered.tolist())
    axes.plot(recommended.size, recommended.coverage, "o", color="tab:red")
    axes.annotate(
        f"{recommended.size:,} tokens: {recommended.coverage:.2%}",
        (recommended.size, recommended.coverage),
        textcoords="offset points",
        xytext=(-8, -16),
        ha="right",
    )
    axes.set_xscale("log")
    axes.set_xlabel("size of the draft vocabulary")
    axes.set_ylabel("share of tokens covered")
    axes.grid(alpha=0.3)
    write_figure(path, figure, dpi=120)
    return True


def _covered(ranked_counts: Tensor) -> Tensor:
    counts = ranked_counts.double()
    return counts.cumsum(0) / counts.sum()
