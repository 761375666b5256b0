"""How a round is drafted: what callers ask, checked, and what "auto" makes of it.

Legend: M noise draws, N candidates, K slots of a block, W nodes of a tree.
"""

from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

from transformers import PreTrainedModel

from .pace_flashmap import Costs, default_costs
from .states_flashmap import check_bank
from .target_flashmap import tree_obstacle, warn_once

MOST_NODES = 64  # drafts of a tree
MANY_DRAWS = 4096  # more are mistakes, for which memory would fail


@dataclass(frozen=True)
class Drafting:
    """How a round is drafted.

    Attributes:
        num_steps: jumps a draft; None takes the drafter's configuration.
        num_draws: noise draws a block, whose mixture is the proposal.
        choice: costs by which each round makes one draw or `MOST_DRAWS`; None: always `num_draws`.
        num_nodes: most drafts of a tree; 0 verifies a single block.
        worth: costs of a round and of one more node, where a tree ends that would not pay for it.
        costs: what adaptive drafting goes by; None: every round verifies whole blocks.
        jump_bank_size: draws of noise that several jumps choose from; 0: exact jumps.
    """

    num_steps: int | None = None
    num_draws: int = 1
    choice: Costs | None = None
    num_nodes: int = 0
    worth: tuple[float, float] | None = None
    costs: Costs | None = None
    jump_bank_size: int = 0


def make_drafting(
    drafter: Any,
    target: PreTrainedModel,
    temperature: float,
    num_steps: int | None,
    num_draws: Any,
    num_candidates: Any,
    adaptive: Any,
    jump_bank_size: Any = 0,
) -> Drafting:
    """How `spec_generate`'s arguments ask for drafts.

    N candidates make a tree of at most N K nodes. They come from N noise draws if the drafter heeds
    its noise; else the draws would be equal, and one is made. "auto" asks for what pays: a tree of
    the nodes that are worth their cost, at temperature 0, on a target that takes one.

    Raises:
        ValueError: an argument is out of its range, or two contradict each other.
    """
    _check_numbers(num_draws, num_candidates, temperature)
    check_bank(jump_bank_size)
    num_jumps = len(drafter.config.grid(num_steps or None)) - 1
    costs = _costs(drafter, target, num_jumps, adaptive)
    auto = "auto" in (num_draws, num_candidates)
    known = default_costs(drafter, target, num_jumps) if auto and costs is None else costs
    heeds = (auto or num_candidates != 1) and drafter.heeds_noise(num_steps)
    bank_size = jump_bank_size if num_jumps > 1 else 0
    first_draws = 1 if num_draws == "auto" else num_draws
    plan = Drafting(num_steps, first_draws, costs=costs, jump_bank_size=bank_size)
    if num_draws == "auto" and heeds:
        plan = replace(plan, choice=known)
    if num_candidates == "auto":
        if temperature > 0.0 or num_draws != 1:
            return plan
        obstacle = tree_obstacle(target)
        if obstacle is not None:
            warn_once(f'num_candidates="auto" verifies blocks: {type(target).__name__} {obstacle}.')
            return plan
        assert known is not None
        return replace(plan, num_nodes=MOST_NODES, worth=(1.0 + known.draft, known.token))
    if num_candidates == 1:
        return plan
    num_nodes = min(num_candidates * drafter.config.block_size, MOST_NODES)
    return replace(plan, num_draws=num_candidates if heeds else 1, num_nodes=num_nodes)


def _check_numbers(num_draws: Any, num_candidates: Any, temperature: float) -> None:
    numbers = {"num_draws": num_draws, "num_candidates": num_candidates}
    for name, value in numbers.items():
        number = isinstance(value, Integral) and not isinstance(value, bool)
        if not (number and 1 <= value <= MANY_DRAWS) and value != "auto":
            raise ValueError(
                f"{name}={value!r} is not valid: ask for at least 1, at most {MANY_DRAWS}, or"
                ' "auto".'
            )
    if num_candidates in (1, "auto"):
        return
    if num_draws != 1:
        raise ValueError(
            f"num_draws={num_draws} and num_candidates={num_candidates} are both given: num_draws"
            " mixes noise draws into one block, num_candidates makes a tree of them. Pass one."
        )
    if temperature > 0.0:
        raise ValueError(
            f"num_candidates={num_candidates} verifies a tree, which takes the likeliest tokens,"
            f" but tokens are sampled: pass num_draws={num_candidates} instead, or decode greedily."
        )


def _costs(drafter: Any, target: PreTrainedModel, num_jumps: int, adaptive: Any) -> Costs | None:
    if isinstance(adaptive, bool):
        return default_costs(drafter, target, num_jumps) if adaptive else None
    try:
        costs = Costs(*map(float, adaptive))
    except (TypeError, ValueError):
        costs = Costs(-1.0, -1.0)
    if not all(0.0 <= cost < float("inf") for cost in costs):
        raise ValueError(
            f"adaptive={adaptive!r} is not valid: pass True, False, or two costs in passes of the"
            " target over one token: of a draft, and of one more token in a pass."
        )
    return costs
