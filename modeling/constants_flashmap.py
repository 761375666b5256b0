"""Values that are computed once: the target's constants, and a memo that knows when they have
become wrong.

At time 0 the network's input depends on the state only through x0 E (x0 noise over the vocabulary,
E the target's embedding), which is Gaussian with covariance G = E^T E. So one-jump drafts draw
noise in the target's hidden width and multiply it by a factor of G, and no tensor of vocabulary
size is ever made.

Legend: V vocabulary, H target hidden width.
"""

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

Value = TypeVar("Value")
_GRAM_ROWS = 16384


class TensorMemo:
    """Values computed from weights, kept while those are the same objects with the same contents.

    Values carry no gradients. In-place edits are seen through PyTorch's version counters, and the
    steps of fused optimizers, which bypass them, through a count of steps; edits through `.data`
    are not seen. Sources are held by weak reference, and a copy or a pickle is empty.
    """

    def __init__(self) -> None:
        self._sources: list[tuple[weakref.ref[Tensor | nn.Module], tuple[int, ...]]] = []
        self._values: dict[Hashable, Any] = {}

    def get(
        self, key: Hashable, sources: Sequence[Tensor | nn.Module], compute: Callable[[], Value]
    ) -> Value:
        """The value for `key`, computed now if it is not there or if any source changed since."""
        if not self._is_current(sources):
            self._values = {}
            self._sources = [(weakref.ref(source), _stamp(source)) for source in sources]
        values = self._values  # another thread may start anew
        if key not in values:
            with torch.inference_mode(False), torch.no_grad():
                values[key] = compute()
        value: Value = values[key]
        return value

    def clear(self) -> None:
        """Forget every value."""
        self._sources, self._values = [], {}

    def __reduce__(self) -> tuple[type["TensorMemo"], tuple[()]]:
        return (TensorMemo, ())

    def _is_current(self, sources: Sequence[Tensor | nn.Module]) -> bool:
        return len(sources) == len(self._sources) and all(
            known() is source and stamp == _stamp(source)
            for source, (known, stamp) in zip(sources, self._sources, strict=True)
        )


class _OptimizerSteps:
    """Counts the steps of all optimizers of this process."""

    count = 0

    @classmethod
    def add(cls, *_: object) -> None:
        cls.count += 1


register_optimizer_step_post_hook(_OptimizerSteps.add)


def _stamp(source: Tensor | nn.Module) -> tuple[int, ...]:
    """Changes when the source's contents do; tensors made in inference mode count no edits."""
    if isinstance(source, nn.Module):
        return ()
    edits = 0 if source.is_inference() else source._version
    return source.data_ptr(), edits, _OptimizerSteps.count


def owner(tensor: Tensor) -> Tensor:
    """The tensor that a view was taken of, or the tensor itself: views share its edit count."""
    return tensor if tensor._base is None else tensor._base


def uniform_embedding(embedding: Tensor) -> Tensor:
    """Mean of the embedding's rows, (1, H): the posterior mean of a slot at time 0, for `embedding`
    (V, H).

    The weight 1 / V is rounded to the embedding's dtype before the product, as the published
    weights expect.
    """
    weights = torch.full((1, embedding.shape[0]), 1.0 / embedding.shape[0], device=embedding.device)
    return weights.to(embedding.dtype) @ embedding


def gram_matrix(embedding: Tensor) -> Tensor:
    """G = E^T E, float64 (H, H) on the CPU, for `embedding` E (V, H): float32 products of row
    chunks, summed in float64.

    Raises:
        ValueError: the embedding holds NaN or infinite values.
    """
    size = embedding.shape[1]
    gram = torch.zeros(size, size, dtype=torch.float64)
    for rows in embedding.split(_GRAM_ROWS):
        rows = rows.float()
        gram += (rows.T @ rows).cpu().double()
    if not torch.isfinite(gram).all():
        raise ValueError(
            "The target's embedding holds NaN or infinite values, so no noise can be drawn for it:"
            " check the target's weights (a truncated download, or a model whose weights were never"
            " loaded)."
        )
    return gram


def noise_factor(embedding: Tensor) -> Tensor:
    """A factor F, float64 (H, H) on the CPU, with F F^T = G for `embedding` E (V, H).

    F is the lower Cholesky factor; where G is singular (rows or columns of zeros, dependent
    columns) it is Q diag(sqrt(lambda)) from the eigendecomposition, lambda clamped at 0.
    """
    gram = gram_matrix(embedding)
    factor, failed = torch.linalg.cholesky_ex(gram)
    if failed or not torch.isfinite(factor).all():
        eigenvalues, vectors = torch.linalg.eigh(gram)
        factor = vectors * eigenvalues.clamp(min=0.0).sqrt()
    result: Tensor = factor
    return result
