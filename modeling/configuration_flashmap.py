"""Configuration of a FlashMap drafter: the one vocabulary that the model, the release tools and the
engines share.

Every field is checked where it enters, because a drafter with a wrong field still decodes
correctly, only slowly: a mistake would show up as low acceptance and nothing else.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from transformers import PretrainedConfig

# transformers 4.57 runs this file again, in the same module, for another folder of the same name;
# without this it would go on with the first folder's siblings.
if "CODE_DIGEST" in globals() and __name__.startswith("transformers_modules."):
    for _name in [name for name in sys.modules if name.startswith(f"{__package__}.")]:
        if _name.endswith("_flashmap") and _name != __name__:
            del sys.modules[_name]

# Digest of the remote code that ships in a release folder, stamped by the release build.
# transformers caches remote code by folder name and by this file's contents, so a stamp that
# changes with any shipped file keeps a stale class from loading.
CODE_DIGEST = "source tree"

# Larger numbers are mistakes, which would else end in an overflow that names no field.
LARGEST_SIZE, LARGEST_DEPTH, LARGEST_FACTOR = 2**24, 1024, 1e30

NOISE_GATES = ("jump", "constant")
TIME_SCHEDULES = ("decoding_error",)

# Jump grids published for a vocabulary of 151936 tokens (float32 values, kept bit for bit).
PUBLISHED_VOCAB_SIZE = 151936
PUBLISHED_JUMP_GRIDS = {
    "1": [0.0, 1.0],
    "2": [0.0, 0.8172569274902344, 1.0],
    "3": [0.0, 0.8010796308517456, 0.8310279846191406, 1.0],
    "4": [0.0, 0.7906050682067871, 0.8172569274902344, 0.8379518389701843, 1.0],
}


class FlashMapConfig(PretrainedConfig):
    """Shape and numerics of a drafter, and the target it was trained for.

    Args:
        target_model: Hub id (or name) of the target language model.
        target_hidden_size: width H of the target's hidden states and token embeddings.
        vocab_size: number V of token ids the drafter knows, the first V rows of the target's
            embedding.
        target_layer_ids: decoder layers of the target whose outputs condition the drafter, 0-based
            and increasing. Value i is the output of decoder layer i before any final norm, which is
            `hidden_states[i + 1]` in transformers except on the last layer. A folder's config.json
            must state it.
        block_size: tokens K drafted at once.
        hidden_size: width D of the drafter.
        num_hidden_layers: number of DiT layers.
        num_attention_heads: attention heads A; D / A must be even.
        intermediate_size: width of the MLPs.
        cond_dim: width of the time conditioning.
        time_embed_dim: number of sinusoidal time features, even.
        time_scale: factor on times before the sinusoids.
        rope_theta: base of the rotary embedding.
        rms_norm_eps: epsilon of the RMS norms outside attention.
        qk_norm_eps: epsilon of the RMS norms of queries and keys.
        layer_norm_eps: epsilon of the adaptive layer norms.
        noise_gate: "jump" scales the noise term by gate * (t - s), "constant" by gate.
        time_schedule: name of the schedule the grids come from.
        num_steps: default number of jumps in a draft; must have a grid.
        jump_grids: number of jumps, as a string, to its times: strictly increasing from 0.0 to 1.0.
            Left out, it holds the published grids for the vocabulary they were computed for, else
            the one-jump grid, which no vocabulary changes.

    Raises:
        ValueError: a field has a wrong type or value; the message names the field, the value and
            the rule.
    """

    model_type = "flashmap"

    def __init__(
        self,
        target_model: str = "Qwen/Qwen3-8B",
        target_hidden_size: int = 4096,
        vocab_size: int = PUBLISHED_VOCAB_SIZE,
        target_layer_ids: Sequence[int] = (1, 9, 17, 25, 33),
        block_size: int = 16,
        hidden_size: int = 2048,
        num_hidden_layers: int = 6,
        num_attention_heads: int = 16,
        intermediate_size: int = 8192,
        cond_dim: int = 256,
        time_embed_dim: int = 256,
        time_scale: float = 1000.0,
        rope_theta: float = 10000.0,
        rms_norm_eps: float = 1e-6,
        qk_norm_eps: float = 1e-5,
        layer_norm_eps: float = 1e-6,
        noise_gate: str = "jump",
        time_schedule: str = "decoding_error",
        num_steps: int = 1,
        jump_grids: Mapping[str, Sequence[float]] | None = None,
        **kwargs: Any,
    ) -> None:
        self.target_model = target_model
        self.target_hidden_size = target_hidden_size
        self.vocab_size = vocab_size
        self.target_layer_ids = _as_list(target_layer_ids)
        self.block_size = block_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.intermediate_size = intermediate_size
        self.cond_dim = cond_dim
        self.time_embed_dim = time_embed_dim
        self.time_scale = time_scale
        self.rope_theta = rope_theta
        self.rms_norm_eps = rms_norm_eps
        self.qk_norm_eps = qk_norm_eps
        self.layer_norm_eps = layer_norm_eps
        self.noise_gate = noise_gate
        self.time_schedule = time_schedule
        self.num_steps = num_steps
        if jump_grids is None:
            published = vocab_size == PUBLISHED_VOCAB_SIZE
            jump_grids = PUBLISHED_JUMP_GRIDS if published else {"1": [0.0, 1.0]}
        self.jump_grids = (
            {key: _as_list(grid) for key, grid in jump_grids.items()}
            if isinstance(jump_grids, Mapping)
            else jump_grids
        )
        kwargs.setdefault("tie_word_embeddings", False)
        super().__init__(**kwargs)
        self.check_fields()

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Read a folder's config.json, which must state the target layers: guessing them would cost
        all acceptance.
        """
        if "target_layer_ids" not in config_dict:
            raise ValueError(
                "FlashMapConfig: config.json has no 'target_layer_ids'. It names the target's"
                " decoder layers the drafter was trained on and cannot be guessed; take it from the"
                " training run, for example [1, 9, 17, 25, 33]."
            )
        result = super().from_dict(config_dict, **kwargs)
        # Overrides given to from_pretrained are set after construction.
        (result[0] if isinstance(result, tuple) else result).check_fields()
        return result

    @property
    def head_size(self) -> int:
        """Width of one attention head of the drafter."""
        return self.hidden_size // self.num_attention_heads

    def grid(self, num_steps: int | None = None) -> list[float]:
        """Times of a draft in `num_steps` jumps (default: the configured number); ValueError if
        there is no such grid.
        """
        steps = self.num_steps if num_steps is None else num_steps
        if isinstance(steps, bool) or str(steps) not in self.jump_grids:
            known = ", ".join(sorted(self.jump_grids, key=int))
            raise ValueError(
                f"num_steps={steps!r} has no jump grid: this drafter has grids for {known} jump(s);"
                " ask for one of them, or add a grid for this vocabulary to jump_grids."
            )
        grid: list[float] = self.jump_grids[str(steps)]
        return grid

    def check_fields(self) -> None:
        """Raise ValueError for the first field that breaks its rule."""
        name = self.target_model
        self._require("target_model", isinstance(name, str) and name, "a non-empty string")
        self._require("noise_gate", self.noise_gate in NOISE_GATES, f"one of {NOISE_GATES}")
        self._require(
            "time_schedule", self.time_schedule in TIME_SCHEDULES, f"one of {TIME_SCHEDULES}"
        )
        sizes = ("target_hidden_size", "block_size", "hidden_size", "num_attention_heads")
        for name in (*sizes, "intermediate_size", "cond_dim", "time_embed_dim", "num_steps"):
            self._require_size(name, 1, LARGEST_SIZE)
        self._require_size("num_hidden_layers", 1, LARGEST_DEPTH)
        self._require_size("vocab_size", 2, LARGEST_SIZE)
        for name in ("time_scale", "rope_theta", "rms_norm_eps", "qk_norm_eps", "layer_norm_eps"):
            self._require(
                name,
                _is_number(getattr(self, name)) and 0 < getattr(self, name) <= LARGEST_FACTOR,
                f"a number above 0, at most {LARGEST_FACTOR:g}",
            )
        heads = self.num_attention_heads
        self._require(
            "hidden_size",
            self.hidden_size % heads == 0,
            f"divisible by num_attention_heads={heads}",
        )
        self._require(
            "hidden_size",
            self.head_size % 2 == 0,
            f"an even multiple of num_attention_heads={heads}",
        )
        self._require("time_embed_dim", self.time_embed_dim % 2 == 0, "even")
        self._require(
            "tie_word_embeddings",
            not self.tie_word_embeddings,
            "false: a drafter has no embeddings",
        )
        self._check_taps()
        self._check_grids()

    def _check_taps(self) -> None:
        rule = "a non-empty, strictly increasing list of decoder layer numbers, counted from 0"
        taps = self.target_layer_ids
        valid = (
            isinstance(taps, list)
            and len(taps) > 0
            and all(_is_int(tap) and 0 <= tap <= LARGEST_SIZE for tap in taps)
        )
        self._require("target_layer_ids", valid and _is_increasing(taps), rule)

    def _check_grids(self) -> None:
        grids = self.jump_grids
        self._require(
            "jump_grids",
            isinstance(grids, dict) and len(grids) > 0,
            "a mapping of step counts to times",
        )
        for key, grid in grids.items():
            counts = isinstance(key, str) and re.fullmatch("[1-9][0-9]{0,7}", key)
            rule = "keyed by step counts written as strings, such as '2'"
            self._require("jump_grids", counts, rule)
            name, size = f"jump_grids[{key!r}]", int(key) + 1
            valid = isinstance(grid, list) and len(grid) == size and all(map(_is_number, grid))
            self._require(name, valid, f"a list of {size} times", grid)
            spans = grid[0] == 0.0 and grid[-1] == 1.0 and _is_increasing(grid)
            self._require(name, spans, "strictly increasing from 0.0 to 1.0", grid)
        rule = f"one of the step counts in jump_grids ({', '.join(sorted(grids, key=int))})"
        self._require("num_steps", str(self.num_steps) in grids, rule)

    def _require_size(self, name: str, least: int, most: int) -> None:
        value = getattr(self, name)
        holds = _is_int(value) and least <= value <= most
        self._require(name, holds, f"a whole number of at least {least}, at most {most}")

    def _require(self, name: str, holds: object, rule: str, *values: object) -> None:
        if not holds:
            (value,) = values or (getattr(self, name),)
            raise ValueError(f"FlashMapConfig: {name}={value!r} is not valid: it must be {rule}.")


def _as_list(value: Any) -> Any:
    """A list of its own, so that configurations never share one; anything else is left for the
    checks to refuse.
    """
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_int(value) or (isinstance(value, float) and abs(value) < float("inf"))


def _is_increasing(values: Sequence[float]) -> bool:
    return all(low < high for low, high in pairwise(values))
