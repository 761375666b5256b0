"""Muon for many matrices at once: steps along the orthogonalised momentum of each.

A matrix's momentum U S V^T is replaced by about U V^T, by five steps of a quintic Newton-Schulz
iteration (Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024), so that
all directions move alike. A step is as long as AdamW's at the same rate (Liu et al., "Muon is
scalable for LLM training", 2025). PyTorch's own Muon takes matrices one by one, a thousand kernels
a step for a small drafter; here equal shapes go together.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of x, x^3 and x^5: steep at 0, within 0.3 of 1 above
STEPS, SMALLEST = 5, 1e-7
MOMENTUM = 0.95
LIKE_ADAMW = 0.2  # root mean square of an AdamW step in units of its rate


def orthogonalise(matrices: Tensor) -> Tensor:
    """Nearly orthogonal bfloat16 matrices with the singular vectors of these (n, rows, columns)."""
    x = matrices.bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=SMALLEST)
    linear, cubic, quintic = COEFFICIENTS
    for _ in range(STEPS):
        square = x @ x.mT
        x = linear * x + (cubic * square + quintic * square @ square) @ x
    result: Tensor = x.mT if tall else x
    return result


class Muon:
    """Steps the matrices of one flat tensor.

    Args:
        flat: the matrices end to end, float32; changed in place.
        shapes: their shapes, in order.
        weight_decay: decoupled, as AdamW's.
    """

    def __init__(self, flat: Tensor, shapes: Sequence[torch.Size], weight_decay: float) -> None:
        self.flat, self.weight_decay = flat, weight_decay
        self.momentum = torch.zeros_like(flat)
        self.sizes = [shape.numel() for shape in shapes]
        self.groups: dict[torch.Size, list[int]] = {}
        for index, shape in enumerate(shapes):
            self.groups.setdefault(shape, []).append(index)

    @torch.no_grad()
    def step(self, gradients: Tensor, rate: float) -> None:
        """One step along `gradients`, end to end as the matrices are."""
        self.momentum.lerp_(gradients, 1.0 - MOMENTUM)
        ahead = gradients.lerp(self.momentum, MOMENTUM).split(self.sizes)
        weights = self.flat.split(self.sizes)
        self.flat.mul_(1.0 - rate * self.weight_decay)
        for shape, indices in self.groups.items():
            moves = orthogonalise(torch.stack([ahead[index].view(shape) for index in indices]))
            length = rate * LIKE_ADAMW * max(shape) ** 0.5
            chosen = [weights[index].view(shape) for index in indices]
            torch._foreach_add_(chosen, list(moves.float().unbind()), alpha=-length)
