"""Rounds that verify a tree of drafts: the target takes the path through it that it would have
taken alone, so the text is its own greedy one.

Legend: B sequences, M draws, K slots of a block, V vocabulary, W nodes of a tree.
"""

from functools import partial

import torch
from torch import Tensor

from .loop_flashmap import Commit, DraftLoop
from .pace_flashmap import Costs
from .sampling_flashmap import Sampler, require_numbers
from .tree_flashmap import DraftTree, likeliest_slots, likeliest_tree
from .treerunner_flashmap import TreeRunner


class TreeLoop(DraftLoop):
    """A `DraftLoop` at temperature 0 whose rounds verify `num_nodes` drafts."""

    _runner: TreeRunner
    runner_class = TreeRunner

    def step(self) -> list[Commit]:
        """One round: one draft and one pass of the target for all sequences that go on."""
        depths = self._depths()
        if not any(depths):
            return self._round(depths)
        self._past.text = []
        samplers, block = self._samplers, self._draft(self._drafting.num_draws)
        trees = [
            self._tree(sampler, logits, depth)
            for sampler, logits, depth in zip(samplers, block, depths, strict=True)
        ]
        logits, features = self._runner.verify_trees([one.text[-1] for one in samplers], trees)
        require_numbers(logits, self._sampling)
        walks = [
            tree.walk(partial(sampler.best_after, rows))
            for sampler, tree, rows in zip(samplers, trees, logits, strict=True)
        ]
        paths = [path for path, _ in walks]
        counts = list(map(len, paths))
        self._drafter.extend_context(self._cache, _along(paths, features), counts)
        self._runner.keep_paths(paths)
        accepted = [
            [tree.tokens[node - 1] for node in path[1:]]
            for tree, path in zip(trees, paths, strict=True)
        ]
        return self._commit(accepted, [bonus for _, bonus in walks], _along(paths, logits))

    def _tree(self, sampler: Sampler, logits: Tensor, depth: int) -> DraftTree:
        """The tree of a sequence for a block's logits (K, V), or (M, K, V)."""
        num_nodes = self._drafting.num_nodes
        if self._limit is not None:  # such targets may have room for no more entries either
            num_nodes = min(num_nodes, self._limit - self._runner.num_entries - 1)
        if depth == 0 or num_nodes <= 0:
            return DraftTree([], [])
        q_MKV = sampler.chances(logits[..., :depth, :].reshape(-1, depth, logits.shape[-1]))
        return likeliest_tree(likeliest_slots(q_MKV, num_nodes), num_nodes, self._drafting.worth)

    def _round_costs(self, costs: Costs) -> dict[int, float]:
        """A whole tree, or plain decoding."""
        block_size = self._drafter.config.block_size
        return {0: costs.round(0), block_size: costs.round(self._drafting.num_nodes)}


def _along(paths: list[list[int]], nodes: Tensor) -> Tensor:
    """What belongs to the nodes of each path, of (B, W, ...); of a shorter path than the longest,
    the last rows mean nothing."""
    longest = max(map(len, paths))
    places = [path + [0] * (longest - len(path)) for path in paths]
    index = torch.tensor(places, device=nodes.device).unsqueeze(2)
    return nodes.gather(1, index.expand(-1, -1, nodes.shape[2]))
