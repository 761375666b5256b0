"""The flow between two times: how sharply a state is read, and where a jump takes it.

Legend: V vocabulary.
"""

from torch import Tensor

_MIN_REMAINING_TIME = 1e-3  # floor of 1 - s; no shipped grid comes near it


def sharpness(s: float) -> float:
    """e(s) = s / (1 - s)^2: softmax(e(s) x) is the posterior over tokens of a state x at time s."""
    return s / max(1.0 - s, _MIN_REMAINING_TIME) ** 2


def advance(state: Tensor, prediction: Tensor, s: float, t: float) -> Tensor:
    """The float32 state (..., V) at time t, after a jump from s that predicted these
    probabilities."""
    return ((1.0 - t) * state + (t - s) * prediction) / (1.0 - s)
