"""Context rows arrive in dense and paged caches, normed and rotated; nothing else is touched."""

from collections.abc import Callable

import pytest
import torch
from support import exact
from torch import Tensor

from flashmap.kernels.fused_flashmap import rope_table
from flashmap.kernels.paged import gated_slots, sglang_layout, vllm_layout
from flashmap.kernels.reference_flashmap import EAGER_OPS, KvLayout, kv_layout
from flashmap.kernels.select_flashmap import TRITON_OPS

LAYERS, HEADS, WIDTH, ROOM, THETA = 2, 3, 20, 24, 10000.0
FP8 = torch.float8_e4m3fn
POISON = 88.0  # exact in every dtype
Made = tuple[list[Tensor], KvLayout]


def dense(dtype: torch.dtype, device: str) -> Made:
    """One tensor, two sequences of 12."""
    cache = torch.full((LAYERS, 2, 2, HEADS, ROOM // 2, WIDTH), POISON, device=device).to(dtype)
    keys, values = cache.transpose(3, 4).unbind(dim=1)
    return [cache], kv_layout(list(keys), list(values))


def vllm(dtype: torch.dtype, device: str) -> Made:
    """Pages of 4, stored as the engine does: entries before heads, and gaps between the layers."""
    shape = (ROOM // 4, 4, HEADS, 2 * WIDTH)
    caches = [torch.full(shape, POISON, device=device).to(dtype) for _ in range(LAYERS)]
    return caches, vllm_layout([cache.transpose(1, 2) for cache in caches])


def sglang(dtype: torch.dtype, device: str) -> Made:
    """A row an entry."""
    caches = [
        torch.full((ROOM, HEADS, WIDTH), POISON, device=device).to(dtype) for _ in range(2 * LAYERS)
    ]
    return caches, sglang_layout(caches[:LAYERS], caches[LAYERS:])


def entry(layout: KvLayout, layer: int, slot: int) -> tuple[Tensor, Tensor]:
    """Key and value (A, d) of one slot."""
    page = layout.keys[0].shape[1]
    block, row = divmod(slot, page)
    return layout.keys[layer][block, row], layout.values[layer][block, row]


@pytest.mark.parametrize("make", [dense, vllm, sglang])
@pytest.mark.parametrize(
    ("dtype", "stored"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, FP8)],
)
@pytest.mark.parametrize("version", ["eager", "triton"])
def test_entries(
    make: Callable[[torch.dtype, str], Made],
    dtype: torch.dtype,
    stored: torch.dtype,
    version: str,
    device: str,
) -> None:
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn(4, LAYERS, 2, HEADS, WIDTH, generator=generator).to(device, dtype)
    weight = (1 + 0.1 * torch.randn(LAYERS, WIDTH, generator=generator)).to(device, dtype)
    slots, positions = [7, -1, 0, 23], torch.tensor([7, 0, 31, 3], device=device)
    rope = rope_table(torch.arange(32, device=device), WIDTH, THETA)
    scales = torch.tensor([[0.5, 0.25], [1.0, 0.001]], device=device) if stored == FP8 else None
    layout = make(stored, device)[1]
    write = {"eager": EAGER_OPS, "triton": TRITON_OPS}[version]["write_context"]
    write(kv, positions, torch.tensor(slots, device=device), weight, 1e-5, rope, layout, scales)

    # Norm and rotation round like `norm_rope`, relative to the head's largest number; float8 keeps
    # four bits of each number, and steps of 2^-9 near zero.
    of_largest = 3 * 2.0**-8 if dtype == torch.bfloat16 else 1e-5
    of_own, near_zero = (2.0**-4, 2.0**-10) if stored == FP8 else (0.0, 0.0)
    for layer in range(LAYERS):
        normed = exact.norm(kv[:, layer, 0], weight[layer], 1e-5)
        keys = exact.rotate(normed, positions, THETA)
        for row, slot in enumerate(slots):
            if slot < 0:
                continue
            for part, right in enumerate((keys[row], kv[row, layer, 1].double())):
                found = entry(layout, layer, slot)[part].double()
                if scales is not None:  # 448 is the end of float8
                    right = (right / scales[layer, part].double()).clamp(-448, 448)
                allowed = of_largest * right.abs().max() + of_own * right.abs() + near_zero
                assert ((found - right).abs() <= allowed).all()
    written = {slot for slot in slots if slot >= 0}
    for layer in range(LAYERS):
        for slot in set(range(ROOM)) - written:
            assert all((part.float() == POISON).all() for part in entry(layout, layer, slot))


@pytest.mark.parametrize("stored", [torch.bfloat16, FP8])
def test_triton_rounds_as_the_reference(stored: torch.dtype, device: str) -> None:
    generator = torch.Generator().manual_seed(1)
    kv = torch.randn(12, LAYERS, 2, HEADS, WIDTH, generator=generator).to(device, torch.bfloat16)
    weight = torch.ones(LAYERS, WIDTH, device=device, dtype=torch.bfloat16)
    places = torch.arange(12, device=device)
    rope = rope_table(places, WIDTH, THETA)
    caches = []
    for ops in (EAGER_OPS, TRITON_OPS):
        made, layout = dense(stored, device)
        ops["write_context"](kv, places, places, weight, 1e-5, rope, layout)
        caches.append(made[0].float())
    assert (caches[0] != caches[1]).float().mean() <= 1e-3


def test_no_row_at_all_is_fine(device: str) -> None:
    _, layout = sglang(torch.bfloat16, device)
    kv = torch.ones(2, LAYERS, 2, HEADS, WIDTH, device=device, dtype=torch.bfloat16)
    weight = torch.ones(LAYERS, WIDTH, device=device, dtype=torch.bfloat16)
    none = torch.tensor([-1, -1], device=device)
    rope = rope_table(torch.arange(4, device=device), WIDTH, THETA)
    for ops in (EAGER_OPS, TRITON_OPS):
        ops["write_context"](kv, none + 1, none, weight, 1e-5, rope, layout)
        ops["write_context"](kv[:0], none[:0], none[:0], weight, 1e-5, rope, layout)
        assert all((view.float() == POISON).all() for view in (*layout.keys, *layout.values))


def test_a_window_is_gated_by_what_was_committed() -> None:
    slots = torch.tensor([[3, 4, 5], [8, 9, 10], [1, 2, 0]])
    assert gated_slots(slots, torch.tensor([1, 3, 0])).tolist() == [3, -1, -1, 8, 9, 10, -1, -1, -1]
