"""Drafters that know what the target will say, but for errors: sequences of a batch accept very
different numbers each round. And what it takes to compare a batch with its sequences alone.

Legend: B sequences, K slots of a block, P prompt tokens with padding.
"""

import copy
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from support import toys
from torch import Tensor

from flashmap import FlashMapDraftModel
from flashmap.modeling.loop_flashmap import DraftLoop

_LOUD = 30.0  # far above the toys' logits
Text = tuple[list[int], list[int], int, int]  # tokens, acceptance lengths, their number, the seed


class Oracle(FlashMapDraftModel):
    """A toy drafter whose drafts are the tokens of `texts`, up to an error.

    `texts` maps a sequence's seed to its text, prompt included. How many slots of a block are right
    follows from seed and position alone: none to all. Other slots keep the network's own logits.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.texts: dict[int, list[int]] = {}
        self.batch_sizes: list[int] = []
        self.loud = _LOUD

    def draft(self, anchor_ids: Tensor, cache: Any, *args: Any, **kwargs: Any) -> Tensor:
        """The network's logits, with known tokens far above all others."""
        self.batch_sizes.append(len(anchor_ids))
        logits = super().draft(anchor_ids, cache, *args, **kwargs).float().clone()
        size = logits.shape[-2]
        for row, (seed, position) in enumerate(zip(kwargs["seed"], cache.lengths, strict=True)):
            right = num_right(seed, position, size)
            for slot, token in enumerate(self.likely(seed, position, right)):
                logits[row, ..., slot, token] += self.loud
        return logits

    def likely(self, seed: int, position: int, count: int) -> list[int]:
        """So many tokens after the anchor at `position`, fewer where the text ends."""
        return self.texts[seed][position + 1 : position + 1 + count]


class Seer(Oracle):
    """An oracle for sampling: what comes after the true text so far by a copy of the target.

    Use it inside `seen_texts`, which tells it that text.
    """

    target: Any = None
    loops: Sequence[Any] = ()

    def likely(self, seed: int, position: int, count: int) -> list[int]:
        """The target's greedy continuation of the sequence with this seed."""
        (sampler,) = [one for one in self.loops[-1]._samplers if one.seed == seed]
        text = list(sampler.text)
        assert len(text) == position + 1
        for _ in range(min(count, self.target.config.max_position_embeddings - len(text))):
            text.append(int(self.target(torch.tensor([text])).logits[0, -1].argmax()))
        return text[position + 1 :]


def num_right(seed: int, position: int, block_size: int) -> int:
    """How many slots of a block are right: none to all, some sequences luckier than others."""
    chance = random.Random(f"{seed} {position}").random()
    lucky = seed % 3
    if lucky == 0:
        return int(chance * (block_size + 1))
    return block_size if chance < (0.15, 0.8)[lucky - 1] else int(chance * 7919) % 2


def oracle(block_size: int = 3, seed: int = 1, cls: Any = Oracle) -> Any:
    """An `Oracle` with a toy's weights; give it `texts`."""
    return toys.drafter(seed, cls=cls, block_size=block_size)


@contextmanager
def seen_texts(seer: Seer, target: Any) -> Iterator[None]:
    """Lets a seer know the text of every sequence."""
    loops: list[Any] = []
    honest = DraftLoop.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        honest(self, *args, **kwargs)
        loops.append(self)

    object.__setattr__(seer, "target", copy.deepcopy(target))  # not a module of the drafter
    seer.loops, seer.loud = loops, 4.0
    DraftLoop.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        DraftLoop.__init__ = honest  # type: ignore[method-assign]


def padded(prompts: Sequence[Tensor], side: str, pad: int = 0, more: int = 0) -> tuple[Any, Any]:
    """Ids and mask (B, P) of prompts (1, n), padded by at least `more`."""
    longest = max(ids.shape[1] for ids in prompts) + more
    rows, masks = [], []
    for ids in prompts:
        filler = torch.full((1, longest - ids.shape[1]), pad)
        parts = [(filler, torch.zeros_like(filler)), (ids, torch.ones_like(ids))]
        parts = parts if side == "left" else parts[::-1]
        rows.append(torch.cat([part for part, _ in parts], dim=1))
        masks.append(torch.cat([mask for _, mask in parts], dim=1))
    return torch.cat(rows), torch.cat(masks)


def texts_of(output: Any, ids: Tensor) -> list[Text]:
    """What a result says of each sequence, after checking its prompt."""
    assert output.sequences[:, : ids.shape[1]].equal(ids)
    new = output.sequences[:, ids.shape[1] :].tolist()
    if len(new) == 1:
        numbers, lengths = [output.num_new_tokens], [output.acceptance_lengths]
    else:
        numbers, lengths = output.num_new_tokens, output.acceptance_lengths
    assert max(numbers) == len(new[0])
    return [
        (row[:number], one, number, seed)
        for row, number, one, seed in zip(new, numbers, lengths, output.seeds, strict=True)
    ]


def alone(
    drafter: Any, target: Any, prompts: Sequence[Tensor], seeds: Sequence[int], **arguments: Any
) -> list[Text]:
    """Each prompt (1, n) decoded by itself, without padding."""
    found = []
    for ids, seed in zip(prompts, seeds, strict=True):
        out = drafter.spec_generate(target, ids, seed=[seed], **arguments)
        found += texts_of(out, ids)
    return found


def together(
    drafter: Any, target: Any, prompts: Sequence[Tensor], seeds: Any, side: str, **arguments: Any
) -> list[Text]:
    """The prompts decoded as one batch, padded on this side."""
    ids, mask = padded(prompts, side)
    out = drafter.spec_generate(target, ids, attention_mask=mask, seed=seeds, **arguments)
    return texts_of(out, ids)
