"""Golden outputs of a release: logits that its drafter gave when it was built, on inputs that
anybody can make again.

The inputs come from a rule instead of a file: an integer hash of their place, the same on every
machine and version. The pseudo target they stand for has twice as many tokens as its width, which a
drafter allows, since the size of the vocabulary shapes none of its weights.

Used by the build and, by path, in processes that have no flashmap or another one: imports nothing
of this project.
"""

import copy
import sys
from typing import Any

import torch

COLUMNS = 16  # of the logits that are recorded
CONTEXT = 3  # positions before the anchor
TOLERANCE = 1e-4  # of the largest golden value
DIGITS = 6  # significant ones: below them, sums of other lengths or orders may differ
MAX_STEPS = 2  # numbers of jumps that are recorded at most


def hashed(name: str, *shape: int) -> torch.Tensor:
    """Float32 values in [-1, 1) by place in a flat order, another series for every name."""
    count = 1
    for size in shape:
        count *= size
    values = torch.arange(1, count + 1, dtype=torch.int64) + 1000003 * sum(name.encode())
    for factor in (0x45D9F3B, 0x45D9F3B):
        values = ((values ^ (values >> 16)) * factor) & 0xFFFFFFFF
    values = values ^ (values >> 16)
    return (values.double() / 2.0**31 - 1.0).float().view(shape)


def golden_logits(model: Any) -> dict[str, list[list[float]]]:
    """Draft logits (K, 16) of `model` by number of jumps, for the smallest numbers it has grids
    for. The model computes in float32 on one thread; it is in float32 afterwards."""
    model = model.float().eval()
    new_cache: Any = vars(sys.modules[type(model).__module__])["FlashMapCache"]
    config, threads = model.config, torch.get_num_threads()
    width, taps = config.target_hidden_size, len(config.target_layer_ids)
    tokens = 2 * width  # fewer would leave the noise without a Cholesky factor
    model.config = copy.deepcopy(config)
    model.config.vocab_size = tokens
    embed = torch.nn.Embedding.from_pretrained(hashed("embedding", tokens, width))
    head = torch.nn.Linear(width, tokens, bias=False)
    head.weight.data = hashed("head", tokens, width)
    features = hashed("features", 1, CONTEXT, taps * width)
    noise = 2.0 * hashed("noise", 1, config.block_size, tokens)
    found = {}
    try:
        torch.set_num_threads(1)
        with torch.no_grad():
            for steps in sorted(map(int, config.jump_grids))[:MAX_STEPS]:
                cache = new_cache(config, 1, CONTEXT + 1, dtype=torch.float32)
                model.extend_context(cache, features)
                logits = model.draft(torch.tensor([1]), cache, embed, head, steps, noise)
                found[str(steps)] = [
                    [_rounded(x) for x in row] for row in logits[0, :, :COLUMNS].tolist()
                ]
    finally:
        torch.set_num_threads(threads)
        model.config = config
    return found


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS - 1}e}")


def difference(
    found: dict[str, list[list[float]]], golden: dict[str, list[list[float]]]
) -> float | None:
    """Largest difference relative to the largest golden value; None where the two are not of one
    shape."""
    worst = 0.0
    if found.keys() != golden.keys():
        return None
    for steps, rows in golden.items():
        wanted, ours = torch.tensor(rows), torch.tensor(found[steps])
        if wanted.shape != ours.shape or not torch.isfinite(wanted).all():
            return None
        worst = max(worst, float((ours - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30)))
    return worst
