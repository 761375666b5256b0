"""How many noise draws pay: one, or several whose mixture is the proposal.

Once the target has said p of the token after an anchor, it is known with which chance a draft there
would be accepted: sum_v min(p, q_m) for draw m alone, sum_v min(p, mean_m q_m) for the mixture,
which is never less than the draws' mean. Running means of both stand for the chance a of every
slot, a round commits (1 - a^(K+1)) / (1 - a) tokens, and several draws are made where that is more
for their cost. Several are made at first, and now and then to look again.
"""

from dataclasses import dataclass

from .pace_flashmap import Costs, mean_tokens

MOST_DRAWS = 4
_DRAW_COST = 0.2  # of a draft: drafting one more draw, and mixing it in
_MEMORY = 0.95
_FIRST_ROUNDS, _LOOK_AGAIN = 4, 16  # rounds


@dataclass
class DrawChoice:
    """One sequence's choice between one draw and `MOST_DRAWS`.

    Attributes:
        costs: of a round, see `Costs`.
        block_size: slots of a block.
    """

    costs: Costs
    block_size: int

    def __post_init__(self) -> None:
        self._rounds, self._weight = 0, 0.0
        self._alone, self._mixed = 0.0, 0.0

    def choose(self) -> int:
        """Number of draws of the next round."""
        self._rounds += 1
        if self._rounds <= _FIRST_ROUNDS or self._rounds % _LOOK_AGAIN == 0:
            return MOST_DRAWS
        cost = self.costs.round(self.block_size)
        more = _DRAW_COST * (MOST_DRAWS - 1) * self.costs.draft
        alone = mean_tokens(self._alone / self._weight, self.block_size) / cost
        mixed = mean_tokens(self._mixed / self._weight, self.block_size) / (cost + more)
        return MOST_DRAWS if mixed > alone else 1

    def note(self, alone: float, mixed: float) -> None:
        """Chances that the first draft of a draw, and of their mixture, is accepted."""
        self._weight = _MEMORY * self._weight + 1.0
        self._alone = _MEMORY * self._alone + alone
        self._mixed = _MEMORY * self._mixed + mixed
