"""What whoever serves a drafter may choose: one frozen object, read from one environment variable.

Engines start worker processes that inherit nothing but the environment, so the choices travel
there, as a JSON object: FLASHMAP_OPTIONS='{"num_steps": 2}'.
"""

import json
import os
from dataclasses import asdict, dataclass, fields
from typing import Any

VARIABLE = "FLASHMAP_OPTIONS"
LEAST = {"jump_bank_size": 0, "jump_topk": 1, "tree_candidates": 0, "tree_budget": 1}


@dataclass(frozen=True)
class DraftOptions:
    """How a served drafter drafts. None takes what the release says.

    Attributes:
        num_steps: jumps a draft.
        draft_vocab_size: number of the release's ranked tokens that may be drafted.
        kernels: "auto", "eager" or "triton", see `select_ops`.
        fp8_weights: keep the drafter's large weights in eight bits.
        fold_noise: draw the noise in one product less; None: where one jump is made. Drafts have
            the same distribution and are other ones than the model's own for the same seed.
        fused_sampler: sglang draws a block's tokens in one kernel that makes its noise as it reads.
        jump_bank_size: draws of noise that are kept for drafts in several jumps, see
            modeling/states_flashmap.py; 0: exact jumps, over the whole vocabulary.
        jump_topk: tokens of each jump's prediction that go on with a bank.
        tree_candidates: most blocks that sglang drafts side by side for a tree; 0: no trees.
        tree_budget: blocks that it drafts for all requests of a batch, if that is fewer each.

    Raises:
        ValueError: a value has another type, or is out of range.
    """

    num_steps: int | None = None
    draft_vocab_size: int | None = None
    kernels: str = "auto"
    fp8_weights: bool = False
    fold_noise: bool | None = None
    fused_sampler: bool = False
    jump_bank_size: int = 0
    jump_topk: int = 16
    tree_candidates: int = 0
    tree_budget: int = 32

    def __post_init__(self) -> None:
        for name in ("num_steps", "draft_vocab_size"):
            value = getattr(self, name)
            counts = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            if value is not None and not counts:
                raise _refusal(name, value, "a whole number of at least 1, or null")
        for name, least in LEAST.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise _refusal(name, value, f"a whole number of at least {least}")
        if not isinstance(self.kernels, str):
            raise _refusal("kernels", self.kernels, "a string")
        for name in ("fp8_weights", "fused_sampler"):
            if not isinstance(getattr(self, name), bool):
                raise _refusal(name, getattr(self, name), "true or false")
        if self.fold_noise not in (None, True, False):
            raise _refusal("fold_noise", self.fold_noise, "true, false or null")


def _refusal(name: str, value: Any, rule: str) -> ValueError:
    return ValueError(f"{VARIABLE}: {name}={value!r} is not valid: it must be {rule}.")


def read_options() -> DraftOptions:
    """The options that the environment asks for; all defaults if it says nothing.

    Raises:
        ValueError: it holds no JSON object, an unknown name or a bad value.
    """
    text = os.environ.get(VARIABLE, "").strip() or "{}"
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{VARIABLE} holds no JSON ({error}): {text!r}.") from error
    known = [field.name for field in fields(DraftOptions)]
    if not isinstance(values, dict) or not values.keys() <= set(known):
        example = json.dumps(asdict(DraftOptions()))
        raise ValueError(
            f"{VARIABLE} is {text!r}, expected a JSON object with some of {', '.join(known)}, such"
            f" as {example}."
        )
    return DraftOptions(**values)
