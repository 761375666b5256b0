"""Trees of drafts: several continuations of an anchor that one pass of the target verifies at once.

A path of the tree has the chance Q(y_1 .. y_k) = 1/M sum_m prod_j q_m,j(y_j) under the drafter's M
noise draws. The tree holds the likeliest paths of all lengths, which makes the number of drafts
that the target is expected to accept, the sum of Q over the tree, as large as it can be. A path is
never likelier than what it begins with, so a best-first search finds them in order, and the tree is
closed under parents.

Where each draw is sure of one token a slot, 1 for it and 0 for all others, Q counts the draws that
share a path: the vote of the published engines, whose encoding is `engine_tree`.

Legend: M draws, K slots of a block, V vocabulary, C tokens that are looked at in a slot, W nodes.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from operator import itemgetter
from typing import NamedTuple

from torch import Tensor


class Slot(NamedTuple):
    """What the draws say of one slot: C token ids, and their chances in each of the M draws."""

    tokens: list[int]
    chances: list[list[float]]


@dataclass(frozen=True)
class DraftTree:
    """Drafts after an anchor. Node 0 is the anchor; node i + 1 has the i-th of these.

    Attributes:
        tokens: token id of each node after the anchor.
        parents: number of the node before it, always a smaller one.
    """

    tokens: list[int]
    parents: list[int]

    @property
    def depths(self) -> list[int]:
        """How many tokens after the anchor each node stands, the anchor included."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return depths

    @property
    def lines(self) -> list[list[int]]:
        """The nodes from the anchor to each node, itself included."""
        lines = [[0]]
        for node, parent in enumerate(self.parents, 1):
            lines.append([*lines[parent], node])
        return lines

    def walk(self, best: Callable[[int, list[int]], int]) -> tuple[list[int], int]:
        """The path that the target takes, as nodes, anchor included, and its token after it.

        `best` gives the target's token after a node, which the drafts lead to.
        """
        path, drafts = [0], list[int]()
        while True:
            token = best(path[-1], drafts)
            children = (node for node, parent in enumerate(self.parents, 1) if parent == path[-1])
            node = next((child for child in children if self.tokens[child - 1] == token), None)
            if node is None:
                return path, token
            path.append(node)
            drafts.append(token)


@dataclass(frozen=True)
class _Child:
    """A node that may come next: its token, and the chance of its path in every draw."""

    token: int
    shares: list[float]
    chance: float
    draw: int  # the first of those that think it likeliest


def likeliest_tree(
    slots: Sequence[Slot], num_nodes: int, costs: tuple[float, float] | None = None
) -> DraftTree:
    """The `num_nodes` likeliest paths of 1 to K drafts, fewer where there are no more.

    Equally likely ones: the shorter first, then that of the lower draw. Nodes are numbered by
    depth, then by the draw that thinks their path likeliest.

    `costs`, of a round and of one more node, end the tree where another node would lower the tokens
    that the round is expected to commit for its cost.
    """
    num_draws = len(slots[0].chances) if slots else 1
    tokens, cost = 1.0, costs[0] if costs else 0.0
    order = count()  # keeps equal entries of the heap in the order in which they came
    waiting: list[tuple[float, int, int, int, int, _Child, Iterator[_Child]]] = []

    def offer(depth: int, parent: int, siblings: Iterator[_Child]) -> None:
        child = next(siblings, None)
        if child is not None:
            entry = (-child.chance, depth, child.draw, next(order), parent, child, siblings)
            heapq.heappush(waiting, entry)

    found: list[tuple[int, int, int, int]] = []  # depth, draw, parent as found, token
    if slots:
        offer(1, -1, _ranked(slots[0], [1.0] * num_draws))
    while waiting and len(found) < num_nodes:
        _, depth, draw, _, parent, child, siblings = heapq.heappop(waiting)
        if costs is not None:
            if child.chance / num_draws * cost < costs[1] * tokens:
                break
            tokens, cost = tokens + child.chance / num_draws, cost + costs[1]
        found.append((depth, draw, parent, child.token))
        offer(depth, parent, siblings)
        if depth < len(slots):
            offer(depth + 1, len(found) - 1, _ranked(slots[depth], child.shares))
    listed = sorted(range(len(found)), key=lambda node: found[node][:2])
    number = {-1: 0} | {node: place for place, node in enumerate(listed, 1)}
    return DraftTree(
        [found[node][3] for node in listed], [number[found[node][2]] for node in listed]
    )


def _ranked(slot: Slot, shares: list[float]) -> Iterator[_Child]:
    """The tokens of a slot after a path with these chances, likeliest first."""
    children = []
    for column, token in enumerate(slot.tokens):
        split = [
            share * chances[column] for share, chances in zip(shares, slot.chances, strict=True)
        ]
        chance = sum(split)
        if chance > 0.0:
            children.append((-chance, split.index(max(split)), token, split))
    children.sort(key=itemgetter(0, 1))
    for chance, draw, token, split in children:
        yield _Child(token, split, -chance, draw)


def likeliest_slots(q_MKV: Tensor, num_tokens: int) -> list[Slot]:
    """Each slot's `num_tokens` tokens that the draws (M, K, V) think likeliest on average.

    As many as a tree has nodes are enough for one draw: a token that so many others precede is in
    none of the likeliest paths.
    """
    size = min(num_tokens, q_MKV.shape[-1])
    tokens_KC = q_MKV.mean(dim=0).topk(size, dim=-1).indices
    q_MKC = q_MKV.gather(-1, tokens_KC.expand(len(q_MKV), -1, -1))
    chances = q_MKC.transpose(0, 1).tolist()
    return [Slot(*slot) for slot in zip(tokens_KC.tolist(), chances, strict=True)]


class EngineTree(NamedTuple):
    """A verify tree as the engines' tree builders take it (EAGLE's encoding).

    Attributes:
        tokens: of the W - 1 nodes after the root; padding repeats the first, under the root.
        ids: parent * W + number of each node.
        num_paths: distinct paths of all lengths before the cut.
        num_candidates: distinct candidates.
    """

    tokens: list[int]
    ids: list[int]
    num_paths: int
    num_candidates: int


def engine_tree(candidates: Sequence[Sequence[int]], width: int) -> EngineTree:
    """The tree of `width` nodes, root included, with the paths that most candidates (N, K) take."""
    slots = []
    for column in zip(*candidates, strict=True):
        tokens = sorted(set(column))
        slots.append(Slot(tokens, [[float(token == own) for token in tokens] for own in column]))
    whole = likeliest_tree(slots, len(candidates) * len(slots))
    tree = likeliest_tree(slots, width - 1)
    padding = width - 1 - len(tree.tokens)
    tokens, parents = tree.tokens + tree.tokens[:1] * padding, tree.parents + [0] * padding
    ids = [parent * width + node for node, parent in enumerate(parents, 1)]
    return EngineTree(tokens, ids, len(whole.tokens), len(set(map(tuple, candidates))))
