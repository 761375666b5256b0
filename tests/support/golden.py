"""The golden vectors as objects: a drafter, the target's modules, inputs and outputs."""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from flashmap import FlashMapCache, FlashMapConfig, FlashMapDraftModel

FOLDER = Path(__file__).resolve().parents[1] / "golden"
CASES = ("tiny-fp32", "tiny-bf16", "constant-gate-fp32")


@dataclass
class Golden:
    """One golden case; `value` reads its tensors by name."""

    name: str
    model: FlashMapDraftModel
    embed_tokens: nn.Embedding
    lm_head: nn.Linear
    tensors: dict[str, Tensor]

    def value(self, name: str) -> Tensor:
        """The golden tensor of this name."""
        return self.tensors[name]

    @property
    def embedding(self) -> Tensor:
        """The target's embedding matrix."""
        return self.embed_tokens.weight

    def filled_cache(self) -> FlashMapCache:
        """A context of the golden features, appended in two pieces."""
        features = self.value("in.target_hidden")
        cache = self.model.new_cache(features.shape[0], features.shape[1] + 1)
        with torch.no_grad():
            self.model.extend_context(cache, features[:, :4])
            self.model.extend_context(cache, features[:, 4:])
        return cache


def load(name: str) -> Golden:
    """Load a golden case by its folder's name."""
    tensors = load_file(FOLDER / name / "golden.safetensors")
    dtype = torch.bfloat16 if "bf16" in name else torch.float32
    model = FlashMapDraftModel(FlashMapConfig.from_pretrained(FOLDER / name)).to(dtype).eval()
    weights = {
        key.removeprefix("weights."): value
        for key, value in tensors.items()
        if key.startswith("weights.")
    }
    model.load_state_dict(weights, strict=True)
    embedding, head = tensors["target.embed_tokens"], tensors["target.lm_head"]
    embed_tokens = nn.Embedding.from_pretrained(embedding)
    lm_head = nn.Linear(*reversed(head.shape), bias=False, dtype=head.dtype)
    lm_head.load_state_dict({"weight": head})
    return Golden(name, model, embed_tokens, lm_head, tensors)


def assert_matches(actual: Tensor, expected: Tensor) -> None:
    """Within 1e-5 of the largest golden value in float32, bit for bit in bfloat16."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    if expected.dtype == torch.bfloat16:
        assert actual.equal(expected), f"off by {(actual.float() - expected.float()).abs().max()}"
    else:
        assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()
