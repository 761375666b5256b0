"""Verify trees for the serving engines, on the device: the trie of a block's candidates, and the
path that the target takes through it. modeling/tree_flashmap.py builds the same trees, one at a
time, from probabilities.

Legend: B requests, N candidates, K slots, W nodes of a tree, its root (the anchor) included.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .triton_flashmap import padded, tl, triton


class Trees(NamedTuple):
    """Trees of W nodes, numbered by depth; padding repeats node 1 and comes last.

    Attributes:
        tokens: int64 (B, W - 1), of the nodes after the root.
        parents: int64 (B, W - 1).
        depths: int64 (B, W), 0 for the root.
        visible: bool (B, W, W), whether a node sees another: itself and those before it.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    visible: Tensor


class Committed(NamedTuple):
    """What a verified tree gives.

    Attributes:
        tokens: int64 (B, W), the target's token after each node of its path, then 0.
        lengths: int32 (B), how many those are.
        bonus: int64 (B), the last of them.
        slots: int64 (B, W), of the nodes on the path, -1 for the others.
    """

    tokens: Tensor
    lengths: Tensor
    bonus: Tensor
    slots: Tensor


def build_trees(candidates: Tensor, width: int) -> Trees:
    """The trees of the `width` - 1 paths that most `candidates` (B, N, K) begin with.

    Equally frequent ones: the shorter first, then that of the lower candidate. The host is not
    waited for. `width` is at least 2.
    """
    batch, number, slots = candidates.shape
    device = candidates.device
    # (B, N, N, K): do two candidates agree up to a slot?
    agree = (candidates[:, :, None] == candidates[:, None]).cumprod(dim=-1).bool()
    place = torch.arange(number, device=device)
    first = agree.int().argmax(dim=2)  # (B, N, K), the lowest candidate that agrees
    is_node = first == place[:, None]
    depth = torch.arange(slots, device=device)
    votes = agree.sum(dim=2)
    order = votes * (number * slots) + (slots - 1 - depth) * number + (number - 1 - place)[:, None]
    order = torch.where(is_node, order, -1).flatten(1)
    if order.shape[1] < width - 1:
        order = torch.nn.functional.pad(order, (0, width - 1 - order.shape[1]), value=-1)
    best, chosen = order.topk(width - 1, dim=1)
    # By depth, then candidate; what is no node last.
    candidate, depth_of = chosen // slots, chosen % slots
    rank = torch.where(best >= 0, depth_of * number + candidate, number * slots)
    rank, sorting = rank.sort(dim=1, stable=True)
    padding = rank == number * slots
    # Padding repeats the first node, which is the first candidate's first token or as frequent.
    candidate, depth_of = (
        torch.where(padding, rows.gather(1, sorting)[:, :1], rows.gather(1, sorting))
        for rows in (candidate, depth_of)
    )
    rows = torch.arange(batch, device=device).unsqueeze(1)
    tokens = candidates[rows, candidate, depth_of]
    # A node sees another if it begins with it; padding sees itself and the root alone.
    begins = agree[rows[..., None], candidate[:, :, None], candidate[:, None], depth_of[:, None]]
    begins &= (depth_of[:, None] <= depth_of[:, :, None]) & ~padding[:, None]
    itself = torch.eye(width - 1, dtype=torch.bool, device=device)
    begins = torch.where(padding[:, :, None], itself, begins)
    visible = torch.zeros((batch, width, width), dtype=torch.bool, device=device)
    visible[:, :, 0] = True
    visible[:, 1:, 1:] = begins
    # The parent is the last node that comes before and is seen.
    numbers = torch.arange(1, width, device=device)
    parents = torch.where(begins & ~itself, numbers, 0).amax(dim=2)
    depths = torch.nn.functional.pad(depth_of + 1, (1, 0))
    return Trees(tokens, parents, depths, visible)


def commit_trees(
    trees: Trees, best: Tensor, slots: Tensor, positions: Tensor, requests: Tensor, table: Tensor
) -> Committed:
    """Follow the target's tokens `best` (B, W) from the root, and put the slots of the path first.

    `slots` (B, W), int64, are those of the nodes; the row requests[b] of `table`, int32, gets the
    path's from entry positions[b] on and the others' after them, so that no keys or values move.
    """
    width = best.shape[1]
    node = torch.zeros_like(positions)
    taken = torch.zeros_like(best, dtype=torch.bool)
    going = torch.ones_like(positions, dtype=torch.bool)
    for _ in range(width - 1):
        taken.scatter_(1, node.unsqueeze(1), True)
        said = best.gather(1, node.unsqueeze(1))
        matches = (trees.parents == node.unsqueeze(1)) & (trees.tokens == said)
        going = going & matches.any(dim=1)
        node = torch.where(going, matches.int().argmax(dim=1) + 1, node)
    taken.scatter_(1, node.unsqueeze(1), True)
    lengths = taken.sum(dim=1)
    others = lengths.unsqueeze(1) + (~taken).cumsum(dim=1) - 1
    order = torch.where(taken, trees.depths, others)
    entries = positions.unsqueeze(1) + order
    table[requests.unsqueeze(1), entries] = slots.to(table.dtype)
    tokens = torch.zeros_like(best).scatter_(1, order, torch.where(taken, best, 0))
    bonus = best.gather(1, node.unsqueeze(1)).squeeze(1)
    return Committed(tokens, lengths.int(), bonus, slots.where(taken, -1))


@triton.jit
def _commit_trees_kernel(
    tokens_ptr, parents_ptr, depths_ptr, best_ptr, slots_ptr, positions_ptr, requests_ptr,
    table_ptr, out_ptr, lengths_ptr, bonus_ptr, kept_ptr, width, table_stride, NODES: tl.constexpr,
):  # fmt: skip
    """One request a program."""
    row = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, NODES)
    inside = number < width
    after = inside & (number > 0)
    at = row * (width - 1) + number - 1
    token = tl.load(tokens_ptr + at, mask=after, other=-1)
    parent = tl.load(parents_ptr + at, mask=after, other=-1)
    best = tl.load(best_ptr + row * width + number, mask=inside, other=0)
    depth = tl.load(depths_ptr + row * width + number, mask=inside, other=0)
    slot = tl.load(slots_ptr + row * width + number, mask=inside, other=0)
    taken = number == 0
    node, length, said = 0, 1, tl.sum(tl.where(number == 0, best, 0), axis=0)
    for _ in range(width - 1):
        match = after & (parent == node) & (token == said)
        child = tl.min(tl.where(match, number, NODES), axis=0)
        found = child < NODES
        node = tl.where(found, child, -2)  # nobody's parent: the walk is over
        taken = taken | (number == node)
        length += found.to(tl.int32)
        said = tl.where(found, tl.sum(tl.where(number == child, best, 0), axis=0), said)
    others = length + tl.cumsum((inside & (taken == 0)).to(tl.int32), axis=0) - 1
    order = tl.where(taken, depth.to(tl.int32), others)
    entry = tl.load(positions_ptr + row).to(tl.int64) + order
    request = tl.load(requests_ptr + row).to(tl.int64)
    tl.store(table_ptr + request * table_stride + entry, slot.to(tl.int32), mask=inside)
    tl.store(out_ptr + row * width + order, tl.where(taken, best, 0), mask=inside)
    tl.store(kept_ptr + row * width + number, tl.where(taken, slot, -1), mask=inside)
    tl.store(lengths_ptr + row, length)
    tl.store(bonus_ptr + row, said)


def triton_commit_trees(
    trees: Trees, best: Tensor, slots: Tensor, positions: Tensor, requests: Tensor, table: Tensor
) -> Committed:
    """See `commit_trees`."""
    batch, width = best.shape
    out, kept = torch.empty_like(best), torch.empty_like(slots)
    lengths = torch.empty(batch, dtype=torch.int32, device=best.device)
    bonus = torch.empty(batch, dtype=torch.int64, device=best.device)
    _commit_trees_kernel[(batch,)](
        trees.tokens.contiguous(), trees.parents.contiguous(), trees.depths.contiguous(),
        best.contiguous(), slots.contiguous(), positions, requests, table, out, lengths, bonus,
        kept, width, table.stride(0), NODES=padded(width), num_warps=1,
    )  # fmt: skip
    return Committed(out, lengths, bonus, kept)
