"""The tree of drafts itself: which paths it holds, how engines get it, which path is taken."""

import itertools
import math

import pytest
import torch
from safetensors.torch import load_file
from support.golden import FOLDER

from flashmap.modeling.tree_flashmap import (
    DraftTree,
    Slot,
    engine_tree,
    likeliest_slots,
    likeliest_tree,
)

GOLDEN = load_file(FOLDER / "verify_tree.safetensors")
CASES = [
    (case, row) for case in range(5) for row in range(len(GOLDEN[f"{case}.candidates"]))
]  # fmt: skip
A, B, C = [5, 7, 9], [5, 7, 8], [6, 7, 9]


def chances_of_paths(q_MKV: torch.Tensor) -> dict[tuple[int, ...], float]:
    """Every path of 1 to K tokens with its exact chance, by enumeration in float64."""
    draws, slots, vocab = q_MKV.shape
    q = q_MKV.double()
    return {
        path: float(q[:, range(length), path].prod(dim=1).sum()) / draws
        for length in range(1, slots + 1)
        for path in itertools.product(range(vocab), repeat=length)
    }


def paths_of(tree: DraftTree) -> list[tuple[int, ...]]:
    """The drafts that lead to each node, its own included."""
    return [tuple(tree.tokens[node - 1] for node in line[1:]) for line in tree.lines[1:]]


def draws(num_draws: int, slots: int, vocab: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.softmax(torch.randn(num_draws, slots, vocab, generator=generator) * 2, dim=-1)


@pytest.mark.parametrize(("case", "row"), CASES)
def test_engines_get_the_published_tree(case: int, row: int) -> None:
    tree = engine_tree(GOLDEN[f"{case}.candidates"][row].tolist(), int(GOLDEN[f"{case}.width"]))
    assert tree.tokens == GOLDEN[f"{case}.tokens"][row].tolist()
    assert tree.ids == GOLDEN[f"{case}.ids"][row].tolist()
    assert [tree.num_paths, tree.num_candidates] == GOLDEN[f"{case}.stats"][row].tolist()


@pytest.mark.parametrize(
    ("width", "tokens", "ids"),
    [
        (4, [5, 6, 7], [1, 2, 7]),
        (5, [5, 6, 7, 7], [1, 2, 8, 14]),
        (9, [5, 6, 7, 7, 9, 8, 9, 5], [1, 2, 12, 22, 32, 33, 43, 8]),
    ],
)
def test_engines_get_the_documented_example(width: int, tokens: list[int], ids: list[int]) -> None:
    assert engine_tree([A, B, C], width) == (tokens, ids, 7, 3)
    assert engine_tree([A, A, A], 6) == ([5, 7, 9, 5, 5], [1, 8, 15, 4, 5], 3, 1)


@pytest.mark.parametrize("num_draws", [1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_the_likeliest_paths_are_kept(num_draws: int, seed: int) -> None:
    q_MKV = draws(num_draws, 4, 5, seed)
    exact = chances_of_paths(q_MKV)
    ordered = sorted(exact, key=lambda path: -exact[path])
    for num_nodes in (1, 2, 7, 30):
        slots = likeliest_slots(q_MKV, max(num_nodes, 5))  # all five tokens of a slot
        found = paths_of(likeliest_tree(slots, num_nodes))
        assert len(set(found)) == num_nodes
        assert set(found) == set(ordered[:num_nodes])


def test_one_draw_needs_no_more_tokens_a_slot_than_nodes() -> None:
    q_MKV = draws(1, 4, 40, 9)
    exact = chances_of_paths(q_MKV[:, :2])
    ordered = sorted(exact, key=lambda path: -exact[path])
    tree = likeliest_tree(likeliest_slots(q_MKV[:, :2], 6), 6)
    assert set(paths_of(tree)) == set(ordered[:6])


def test_nodes_follow_their_parents_and_are_numbered_by_depth() -> None:
    tree = likeliest_tree(likeliest_slots(draws(2, 5, 9, 3), 20), 20)
    assert tree.depths[1:] == sorted(tree.depths[1:])
    for node, parent in enumerate(tree.parents, 1):
        assert parent < node
        assert tree.depths[node] == tree.depths[parent] + 1


def test_there_may_be_fewer_paths_than_asked_for() -> None:
    tree = likeliest_tree([Slot([4], [[1.0]]), Slot([5, 6], [[0.5, 0.5]])], 10)
    assert paths_of(tree) == [(4,), (4, 5), (4, 6)]
    assert likeliest_tree([], 3) == DraftTree([], [])


@pytest.mark.parametrize("seed", range(6))
def test_a_tree_ends_where_its_tokens_for_their_cost_are_most(seed: int) -> None:
    q_MKV = draws(1, 3, 6, seed)
    exact = sorted(chances_of_paths(q_MKV).values(), reverse=True)
    for first, more in ((1.3, 0.01), (1.3, 0.1), (2.0, 0.3)):
        rates = [(1.0 + math.fsum(exact[:count])) / (first + more * count) for count in range(60)]
        tree = likeliest_tree(likeliest_slots(q_MKV, 60), 60, (first, more))
        size = len(tree.tokens)
        assert rates[size] == pytest.approx(max(rates))


def test_the_targets_own_path_is_walked() -> None:
    tree = DraftTree([5, 6, 7, 7], [0, 0, 1, 2])
    says = {(): 6, (6,): 7, (6, 7): 3, (5,): 7}
    seen = []

    def best(node: int, drafts: list[int]) -> int:
        seen.append(node)
        return says[tuple(drafts)]

    assert tree.walk(best) == ([0, 2, 4], 3)
    assert seen == [0, 2, 4]
    assert tree.walk(lambda node, drafts: 1) == ([0], 1)
