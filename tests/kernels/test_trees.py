"""Trees on the device are the golden ones and those of the model's own search; the path through
them is the one that a walk node by node takes."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from flashmap.kernels.tree import build_trees, commit_trees, triton_commit_trees
from flashmap.kernels.triton_flashmap import HAS_TRITON
from flashmap.modeling.tree_flashmap import DraftTree, engine_tree

GOLDEN = Path(__file__).resolve().parents[1] / "golden/verify_tree.safetensors"
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs triton (make test installs it)")


def ids(parents: Tensor, width: int) -> Tensor:
    """EAGLE's encoding of a tree."""
    return parents * width + torch.arange(1, width)


def random_candidates(seed: int, batch: int = 5, number: int = 4, slots: int = 6) -> Tensor:
    return torch.randint(3, (batch, number, slots), generator=torch.Generator().manual_seed(seed))


def test_golden_trees() -> None:
    tensors = load_file(GOLDEN)
    cases = sorted({name.partition(".")[0] for name in tensors})
    assert cases
    for case in cases:
        width = int(tensors[f"{case}.width"])
        trees = build_trees(tensors[f"{case}.candidates"], width)
        assert trees.tokens.equal(tensors[f"{case}.tokens"])
        assert ids(trees.parents, width).equal(tensors[f"{case}.ids"])


@pytest.mark.parametrize("width", [2, 7, 30])
@pytest.mark.parametrize("number", [1, 4])
def test_they_are_the_trees_of_the_models_search(width: int, number: int) -> None:
    candidates = random_candidates(width, number=number)
    trees = build_trees(candidates, width)
    for row, group in enumerate(candidates.tolist()):
        expected = engine_tree(group, width)
        assert trees.tokens[row].tolist() == expected.tokens
        assert ids(trees.parents, width)[row].tolist() == expected.ids
        tree = DraftTree(expected.tokens, trees.parents[row].tolist())
        assert trees.depths[row].tolist() == tree.depths
        seen = torch.zeros(width, width, dtype=torch.bool)
        for node, line in enumerate(tree.lines):
            seen[node, line] = True
        assert trees.visible[row].equal(seen)


@pytest.mark.parametrize(
    "commit", [commit_trees, pytest.param(triton_commit_trees, marks=needs_triton)]
)
def test_the_targets_path_comes_first(commit) -> None:  # type: ignore[no-untyped-def]
    width, batch = 9, 12
    trees = build_trees(random_candidates(1, batch), width)
    generator = torch.Generator().manual_seed(2)
    best = torch.randint(3, (batch, width), generator=generator)
    slots = 100 + torch.randperm(batch * width, generator=generator).view(batch, width)
    positions = torch.randint(5, (batch,), generator=generator)
    requests = torch.randperm(batch + 3, generator=generator)[:batch]
    table = torch.full((batch + 3, 20), -7, dtype=torch.int32)
    found = commit(trees, best, slots, positions, requests, table)
    lengths = set()
    for row in range(batch):
        tree = DraftTree(trees.tokens[row].tolist(), trees.parents[row].tolist())
        said = best[row].tolist()
        path, bonus = tree.walk(lambda node, drafts, said=said: said[node])
        lengths.add(len(path))
        assert int(found.lengths[row]) == len(path)
        assert int(found.bonus[row]) == bonus
        assert found.tokens[row].tolist() == [said[node] for node in path] + [0] * (
            width - len(path)
        )
        others = [node for node in range(width) if node not in path]
        begin = int(positions[row])
        entries = table[requests[row]].tolist()
        assert entries[begin : begin + width] == slots[row, path + others].tolist()
        assert set(entries[:begin] + entries[begin + width :]) <= {-7}
        kept = [int(slots[row, node]) if node in path else -1 for node in range(width)]
        assert found.slots[row].tolist() == kept
    assert len(lengths) > 2, "paths of several lengths are to be tried"
