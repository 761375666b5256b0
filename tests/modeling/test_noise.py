"""One-jump noise has covariance E^T E for any embedding E, singular ones included."""

from typing import Any

import pytest
import torch
from support import toys
from torch import Tensor, nn

from flashmap import FlashMapDraftModel
from flashmap.kernels.fused_flashmap import seeded_normal
from flashmap.modeling.constants_flashmap import noise_factor, uniform_embedding


def embedding(rows: int = 50, width: int = 12, seed: int = 0) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def zero_column(table: Tensor) -> None:
    table[:, 3] = 0


def duplicate_columns(table: Tensor) -> None:
    table[:, 5] = table[:, 2]


def dependent_columns(table: Tensor) -> None:
    table[:, 0] = table[:, 1] - 2 * table[:, 2]


def zero_rows(table: Tensor) -> None:
    table[8:] = 0  # rank 8 of 12


def all_zero(table: Tensor) -> None:
    table[:] = 0


SINGULAR = [zero_column, duplicate_columns, dependent_columns, zero_rows, all_zero]


@pytest.mark.parametrize("spoil", [None, *SINGULAR])
def test_the_factor_squares_to_the_gram_matrix(spoil: Any) -> None:
    table = embedding()
    if spoil is not None:
        spoil(table)
    factor = noise_factor(table)
    gram = table.double().T @ table.double()
    assert factor.dtype == torch.float64
    assert (factor @ factor.T - gram).abs().max() <= 1e-6 * max(float(gram.abs().max()), 1e-30)


def test_the_factor_of_a_regular_embedding_is_lower_triangular() -> None:
    factor = noise_factor(embedding())
    assert factor.equal(factor.tril())
    assert (factor.diagonal() > 0).all()


def test_more_rows_than_a_chunk() -> None:
    table = embedding(rows=40_000, width=4)
    factor = noise_factor(table)
    gram = table.double().T @ table.double()
    assert (factor @ factor.T - gram).abs().max() <= 1e-6 * gram.abs().max()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_embedding_of_nan_or_inf_is_refused(value: float) -> None:
    table = embedding()
    table[20, 4] = value
    with pytest.raises(ValueError, match="NaN or infinite"):
        noise_factor(table)


@pytest.mark.parametrize("spoil", SINGULAR)
def test_a_singular_embedding_decodes(spoil: Any) -> None:
    target = toys.llama()
    with torch.no_grad():
        spoil(target.model.embed_tokens.weight)
    ids = toys.prompt(5)
    out = toys.drafter().spec_generate(target, ids, max_new_tokens=10)
    assert toys.text_of(out, ids) == toys.greedy(target, ids, 10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_mean_row_rounds_its_weight_first(dtype: torch.dtype) -> None:
    table = embedding().to(dtype)
    weight = torch.full((1, 50), 1 / 50).to(dtype)
    assert uniform_embedding(table).equal(weight @ table)
    assert uniform_embedding(table).dtype == dtype


def first_inputs(model: FlashMapDraftModel, table: nn.Embedding, seeds: list[int]) -> Tensor:
    """What the network sees at the first jump of a draft, (len(seeds), K, H)."""
    seen: list[Tensor] = []

    def keep(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen.append(args[0])

    handle = model.x_embed.register_forward_pre_hook(keep)
    cache = model.new_cache(len(seeds), 4)
    head = nn.Linear(toys.WIDTH, toys.VOCAB, bias=False)
    with torch.no_grad():
        model.draft(torch.zeros(len(seeds), dtype=torch.long), cache, table, head, seed=seeds)
    handle.remove()
    return seen[0]


def plain_norms(model: FlashMapDraftModel) -> FlashMapDraftModel:
    """Make the noise term of the inputs the noise itself: no normalisation, no posterior term."""
    model.noise_norm = nn.Identity()
    with torch.no_grad():
        model.state_norm.weight.zero_()
        model.noise_gate.fill_(1.0)
    return model


@pytest.mark.parametrize("spoil", [None, duplicate_columns, zero_rows])
def test_one_jump_noise_has_the_covariance_of_the_embedding(spoil: Any) -> None:
    model = plain_norms(toys.drafter(block_size=50))
    table = nn.Embedding(toys.VOCAB, toys.WIDTH)
    with torch.no_grad():
        table.weight.copy_(embedding(toys.VOCAB, toys.WIDTH, seed=2))
        if spoil is not None:
            spoil(table.weight)
    noise = first_inputs(model, table, list(range(400))).flatten(0, 1).double()
    gram = table.weight.detach().double().T @ table.weight.detach().double()
    count = noise.shape[0]
    found = noise.T @ noise / count
    variance = gram.square() + gram.diagonal()[:, None] * gram.diagonal()
    spread = (variance / count).sqrt()  # of each entry of the sample covariance
    assert ((found - gram).abs() <= 5 * spread + 1e-4).all()
    assert (noise.mean(dim=0).abs() <= 5 * (gram.diagonal() / count).sqrt() + 1e-4).all()


def test_one_jump_noise_is_the_documented_product() -> None:
    model = plain_norms(toys.drafter())
    table = toys.llama().get_input_embeddings()
    found = first_inputs(model, table, [5, 6])
    positions = torch.arange(1, 4).expand(2, 3)
    z = seeded_normal(torch.tensor([5, 6]), positions, toys.WIDTH)
    gram = (table.weight.double().T @ table.weight.double()).detach()
    exact = z.double() @ torch.linalg.cholesky(gram).T
    assert (found - exact).abs().max() < 1e-5 * exact.abs().max()


def test_noise_of_several_jumps_is_drawn_over_the_vocabulary() -> None:
    target, model = toys.llama(), toys.drafter()
    modules = target.get_input_embeddings(), target.get_output_embeddings()
    positions = torch.arange(1, 4).expand(2, 3)
    noise = seeded_normal(torch.tensor([5, 6]), positions, toys.VOCAB)
    anchors = torch.tensor([1, 2])
    with torch.no_grad():
        by_seed = model.draft(anchors, model.new_cache(2, 4), *modules, 3, seed=5)
        by_noise = model.draft(anchors, model.new_cache(2, 4), *modules, 3, noise=noise)
    assert by_seed.equal(by_noise)
