"""Passes of the target over trees of drafts: every node sees the text, the nodes that lead to it
and itself, at the position that its depth gives it.

The target's cache then holds all nodes. Those off the path that is kept become holes, like rejected
drafts in a batch.

Legend: B sequences, W nodes, T cache entries, V vocabulary of the target's head, H target hidden
width, n tapped layers.
"""

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .runner_flashmap import TargetRunner
from .target_flashmap import FeatureTap, num_embedding_rows, tree_obstacle
from .tree_flashmap import DraftTree

_MOST_DIFFERENCE = 0.1  # of logits, relative; bfloat16 rounds them by some per cent


class TreeRunner(TargetRunner):
    """A `TargetRunner` that also verifies trees."""

    @classmethod
    def checked(cls, target: PreTrainedModel, tap: FeatureTap) -> "TreeRunner":
        """A runner, once it is known that the target heeds a mask of its own.

        Raises:
            ValueError: its layers do not see the whole text, its attention takes no such mask, or
                it computes something else with one.
        """
        obstacle = tree_obstacle(target)
        if obstacle is None and target not in _tried_out:
            obstacle = _try_out(target, tap)
            if obstacle is None:
                _tried_out.add(target)
        if obstacle is not None:
            raise ValueError(
                f"num_candidates verifies a tree, and {type(target).__name__} {obstacle}: leave"
                " num_candidates out."
            )
        return cls(target, tap)

    def verify_trees(
        self, anchors: Sequence[int], trees: Sequence[DraftTree]
    ) -> tuple[Tensor, Tensor]:
        """Run a tree of drafts after each anchor; `keep_paths` must follow every pass.

        Returns:
            Logits (B, W, V) and features (B, W, n H) of the nodes; those of a smaller tree than the
            largest mean nothing in the last rows.
        """
        width = max(len(tree.parents) for tree in trees) + 1
        rows, depths = [], []
        ancestors = torch.eye(width, dtype=torch.bool).repeat(len(trees), 1, 1)
        for row, (anchor, tree) in enumerate(zip(anchors, trees, strict=True)):
            missing = [0] * (width - 1 - len(tree.tokens))
            rows.append([anchor, *tree.tokens, *missing])
            depths.append([*tree.depths, *missing])
            for node, line in enumerate(tree.lines):
                ancestors[row, node, line] = True
        self._newest = torch.tensor(rows)
        positions = torch.tensor(self._lengths).unsqueeze(1) + torch.tensor(depths)
        before = self._all_visible()[:, None].expand(-1, width, -1)
        visible = torch.cat((before, ancestors.to(self._device)), dim=2)
        mask = torch.zeros(visible.shape, dtype=self._target.dtype, device=self._device)
        mask = mask.masked_fill_(~visible, torch.finfo(mask.dtype).min).unsqueeze(1)
        logits = self._forward(self._newest, width, mask, position_ids=positions.to(self._device))
        return logits, self._features(width)

    def keep_paths(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep these nodes of the newest pass, in ascending order, and forget the rest."""
        size, end = self._newest.shape[1], max(path[-1] for path in paths) + 1
        self._drop(size - end)
        kept = torch.zeros(len(paths), end, dtype=torch.bool)
        for row, path in enumerate(paths):
            kept[row, list(path)] = True
        self._visible = torch.cat((self._all_visible(), kept.to(self._device)), dim=1)
        self._grow([len(path) for path in paths])


_tried_out: "weakref.WeakSet[PreTrainedModel]" = weakref.WeakSet()


def _try_out(target: PreTrainedModel, tap: FeatureTap) -> str | None:
    """Verify a small tree, keep a path, go on, and compare with the same tokens in a row. What is
    wrong, or None."""
    tokens = (torch.arange(9) % num_embedding_rows(target)).tolist()
    text, anchor, drafts, last = tokens[:3], tokens[3], tokens[4:8], tokens[8]
    tree = DraftTree(drafts, [0, 0, 1, 2])
    try:
        runner = TreeRunner(target, tap)
        runner.prefill([torch.tensor(text)])
        found = list(runner.verify_trees([anchor], [tree])[0][0, 3:])
        runner.keep_paths([[0, 2, 4]])
        found.append(runner.verify(torch.tensor([[last]]))[0][0, -1])
        for path, logits in zip(([0, 2], [1, 3], [1, 3, 4]), found, strict=True):
            row = [*text, anchor, *(drafts[node] for node in path[:2])]
            row += [last] * (len(path) - 2)
            expected, _ = TargetRunner(target, tap).prefill([torch.tensor(row)])
            difference = (logits - expected[0]).abs().max() / expected.abs().max()
            if not difference <= _MOST_DIFFERENCE:
                return f"heeds no mask for one (its logits change by {float(difference):.0%})"
    except (TypeError, ValueError, AttributeError, IndexError, KeyError, RuntimeError) as error:
        return f"takes no mask for one ({type(error).__name__}: {error})"
    return None
