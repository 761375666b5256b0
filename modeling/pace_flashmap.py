"""How many drafts are worth verifying: adaptive drafting.

If each draft is accepted with chance a, a pass over n drafts commits (1 - a^(n+1)) / (1 - a)
tokens on average, and n is chosen so that tokens for their cost are most (Leviathan et al., 2023,
theorem 3.8); n = 0 is plain decoding. The chance is a running one, over about the last ten rounds.
Costs are counted in passes of the target over one token, the price of a token by plain decoding.

That choice can be wrong, so it spends from an account. A round that commits fewer tokens than it
cost adds the difference to a debt; every token pays a little of it back. What would take the debt
over its limit is not drafted, so a run never costs more than 1.03 passes a token, plus the limit.
Where plain decoding looks better, a round is drafted all the same whenever there is no debt: the
text may have changed.

Clocks have no say, so that a seed gives the same text on a busy machine.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

_MEMORY = 0.9  # weight of a round beside the next one
_PRIOR = (2.0, 1.0)  # accepted and rejected drafts before the first round
_PAYBACK = 0.03  # passes a token
_LIMIT = 1.5  # passes
# Cost of one more token in a pass over several.
_TOKEN_COSTS = {("cpu", torch.float32): 0.1}
_TOKEN_COST = 0.01


class Costs(NamedTuple):
    """What a round costs, in passes of the target over one token.

    Attributes:
        draft: a draft.
        token: every further token of a pass; together never more than another pass.
    """

    draft: float
    token: float

    def round(self, num_drafts: int) -> float:
        """Cost of a round that verifies so many drafts; 0 of them are not drafted either."""
        return 1.0 + (self.draft + min(num_drafts * self.token, 1.0) if num_drafts else 0.0)


def mean_tokens(chance: float, num_drafts: int) -> float:
    """Tokens that a pass over so many drafts commits if each is accepted with this chance."""
    return sum(chance**slot for slot in range(num_drafts + 1))


def default_costs(drafter: Any, target: PreTrainedModel, num_steps: int) -> Costs:
    """Costs where nobody has measured them: a pass over few tokens takes the time of reading the
    weights, so a jump costs the share of what it reads, the target's vocabulary head included, for
    as many tokens as a block has slots.

    What a further token costs was measured with 135 million parameters: 0.1 in float32 on a CPU,
    where one token alone takes a faster way, and next to nothing elsewhere.
    """
    head = target.get_output_embeddings()
    assert head is not None
    share = (_size(drafter) + _size(head)) / max(_size(target), 1)
    token = _TOKEN_COSTS.get((target.device.type, target.dtype), _TOKEN_COST)
    return Costs(num_steps * share * (1.0 + min(drafter.config.block_size * token, 1.0)), token)


def _size(module: nn.Module) -> int:
    """Bytes of the module's weights."""
    return sum(weight.numel() * weight.element_size() for weight in module.parameters())


@dataclass
class Pace:
    """One sequence's choice.

    Attributes:
        costs: of a round, by how many drafts deep it verifies; 0 is plain decoding.
    """

    costs: dict[int, float]

    def __post_init__(self) -> None:
        self._accepted, self._rejected = _PRIOR
        self._debt, self._depth = 0.0, 0
        self._limit = max(_LIMIT, max(self.costs.values()) - 1.0)

    def choose(self) -> int:
        """How many drafts deep the next round should verify."""
        chance = self._accepted / (self._accepted + self._rejected)
        rates = {depth: mean_tokens(chance, depth) / cost for depth, cost in self.costs.items()}
        best = max(rates, key=lambda depth: rates[depth])
        if best == 0 and self._debt <= 0.0:
            del rates[0]
            best = max(rates, key=lambda depth: rates[depth])
        self._depth = best if self._debt + self.costs[best] - 1.0 <= self._limit else 0
        return self._depth

    def note(self, accepted: int) -> None:
        """That round accepted so many drafts."""
        earned = (accepted + 1) * (1.0 + _PAYBACK)
        self._debt = max(self._debt + self.costs[self._depth] - earned, 0.0)
        if self._depth:
            self._accepted = _MEMORY * self._accepted + accepted
            self._rejected = _MEMORY * self._rejected + (accepted < self._depth)
