"""AdamW or Muon on float32 masters of the drafter's weights, with a running average of them.

The drafter computes in its own dtype, exactly as it will when it drafts; only its masters are
float32, since the small steps of training would be rounded away in bfloat16. What is kept of a run
is the average.

Weights, gradients, masters and averages each lie end to end in one tensor: an update is then a
handful of kernels, however many weights there are.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .muon import Muon
from .recipe import RunRecipe

BETA1 = 0.9
AVERAGE_WARM_UP = 10  # early on the average covers about this share of the steps so far
MOMENTS = ("exp_avg", "exp_avg_sq")
STATE = ("master", "average", "momentum", *MOMENTS)
HIDDEN, MATRIX, VECTOR = range(3)  # stepped by Muon, by AdamW with decay, by AdamW without


class Optimizer:
    """Steps the weights of a model along their gradients.

    The model's parameters become views of one tensor, and keep their gradients in another.
    """

    def __init__(self, model: nn.Module, recipe: RunRecipe) -> None:
        self.recipe = recipe
        # The largest first of each kind: behind a lone number, no weight would lie where the fast
        # kernels can take it.
        named = sorted(
            model.named_parameters(),
            key=lambda pair: (_kind(pair[0], pair[1], recipe.optimizer), -pair[1].numel()),
        )
        kinds = [_kind(name, parameter, recipe.optimizer) for name, parameter in named]
        self.names = [name for name, _ in named]
        self.shapes = [parameter.shape for _, parameter in named]
        sizes = [0, 0, 0]
        for kind, shape in zip(kinds, self.shapes, strict=True):
            sizes[kind] += shape.numel()
        self.sizes = sizes
        with torch.no_grad():
            self.weights = torch.cat([parameter.detach().flatten() for _, parameter in named])
        self.slopes = torch.zeros_like(self.weights)
        for (_, parameter), weight, slope in zip(
            named, self._views(self.weights), self._views(self.slopes), strict=True
        ):
            parameter.data, parameter.grad = weight, slope
        self.master = self.weights.float().clone()  # float() alone shares float32 weights' memory
        self.average = self.master.clone()
        hidden, *self.parts = self.master.split(sizes)
        shapes = [shape for kind, shape in zip(kinds, self.shapes, strict=True) if kind == HIDDEN]
        self.muon = Muon(hidden, shapes, recipe.weight_decay)
        groups = zip(self.parts, (recipe.weight_decay, 0.0), strict=True)
        self.adam = torch.optim.AdamW(
            [{"params": [part], "weight_decay": decay} for part, decay in groups],
            lr=recipe.rate,
            betas=(BETA1, recipe.beta2),
            fused=True,
        )

    def _views(self, flat: Tensor) -> list[Tensor]:
        sizes = [shape.numel() for shape in self.shapes]
        parts = flat.split(sizes)
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def rate(self, step: int) -> float:
        """Learning rate of `step`: a linear rise, then a cosine."""
        recipe = self.recipe
        rise = max(1.0, recipe.warm_up * recipe.steps)
        share = 0.5 * (1.0 + math.cos(math.pi * min(1.0, step / recipe.steps)))
        share = recipe.final_rate + (1.0 - recipe.final_rate) * share
        return recipe.rate * min(1.0, (step + 1) / rise) * share

    def take_gradients(self) -> Tensor:
        """All gradients since they were last taken, float32, end to end."""
        taken = self.slopes.float().clone()
        self.slopes.zero_()
        return taken

    def update(self, step: int, gradients: Tensor) -> Tensor:
        """One step along `gradients`, clipped; gives their norm before that."""
        norm = torch.linalg.vector_norm(gradients)
        clipped = gradients * (self.recipe.clip / norm.clamp(min=self.recipe.clip))
        hidden, *rest = clipped.split(self.sizes)
        for part, gradient in zip(self.parts, rest, strict=True):
            part.grad = gradient
        for group in self.adam.param_groups:
            group["lr"] = self.rate(step)
        self.adam.step()
        if len(hidden):
            self.muon.step(hidden, self.rate(step))
        kept = min(self.recipe.average, (1 + step) / (AVERAGE_WARM_UP + step))
        self.average.lerp_(self.master, 1.0 - kept)
        self._hand_over(self.master)
        result: Tensor = norm
        return result

    @torch.no_grad()
    def _hand_over(self, values: Tensor) -> None:
        self.weights.copy_(values)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Let the model have the averaged weights for a while."""
        self._hand_over(self.average)
        try:
            yield
        finally:
            self._hand_over(self.master)

    def averages(self) -> dict[str, Tensor]:
        """The averaged weights by name, float32."""
        return dict(zip(self.names, self._views(self.average), strict=True))

    def state(self) -> dict[str, Tensor]:
        """Everything that a run continues from."""
        moments = [
            torch.cat(
                [self.adam.state[part].get(name, torch.zeros_like(part)) for part in self.parts]
            )
            for name in MOMENTS
        ]
        kept = (self.master, self.average, self.muon.momentum, *moments)
        return dict(zip(STATE, kept, strict=True))

    def load(self, tensors: dict[str, Tensor], step: int) -> None:
        """Continue from `state()` as it was after `step` updates. Raises ValueError for tensors
        that are not this model's."""
        wanted = {name: tensor.shape for name, tensor in self.state().items()}
        if {name: tensor.shape for name, tensor in tensors.items()} != wanted:
            raise ValueError("its tensors are not those of this drafter and optimizer")
        for name, kept in zip(STATE, (self.master, self.average, self.muon.momentum), strict=False):
            kept.copy_(tensors[name])
        found = {name: tensors[name].split(self.sizes[1:]) for name in MOMENTS}
        for index, part in enumerate(self.parts):
            self.adam.state[part] = {
                "step": torch.tensor(float(step), device=part.device),
                **{name: found[name][index].to(part.device).clone() for name in MOMENTS},
            }
        self._hand_over(self.master)


def _kind(name: str, parameter: Tensor, optimizer: str) -> int:
    """How a parameter is stepped. Muon is for matrices that map features to features; those of the
    time conditioning see one or a few inputs in all, and the outer ones are not hidden."""
    if parameter.dim() <= 1:
        return VECTOR
    hidden = name.startswith("layers.") and "adaln" not in name
    return HIDDEN if hidden and optimizer == "muon" else MATRIX
