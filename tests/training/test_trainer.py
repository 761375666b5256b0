"""Steps of the trainer: the loss falls, shards and chunks change nothing, and bad runs stop."""

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import toys
from support.training import (
    CPU,
    make_recipe,
    make_trainer,
    random_documents,
    rows_of,
    state_of,
    steps_of,
)
from support.training import one_thread as in_one_thread

from flashmap import FlashMapDraftModel
from flashmap.training.recipe import OBJECTIVES
from flashmap.training.setup import make_objective
from flashmap.training.trainer import Trainer, TrainingError
from flashmap.training.walk import Walk


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with in_one_thread():
        yield


def loss_of(objective: str) -> dict[str, Any]:
    tv = 0.5 if objective in ("product", "mixture") else 0.0
    return {"objective": objective, "total_variation": tv, "num_draws": 2}


def gradients(trainer: Trainer, step: int = 0, shard: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    result = trainer.shard(step, shard)
    return result.loss, trainer.optimizer.take_gradients()


# --- learning


@pytest.mark.parametrize(
    ("objective", "optimizer"),
    [*((objective, "adamw") for objective in OBJECTIVES), ("product", "muon")],
)
def test_the_loss_falls(objective: str, optimizer: str, tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, loss_of(objective), steps=60, rate=1e-2, optimizer=optimizer)
    assert make_trainer(recipe).run() == 60
    losses = [row["loss"] for row in rows_of(tmp_path)]
    assert len(losses) == 60
    first, last = (sum(part) / 15 for part in (losses[:15], losses[-15:]))
    assert last < 0.93 * first, (first, last)


def test_every_drafter_weight_moves_and_no_target_weight(tmp_path: Path) -> None:
    target = toys.llama()
    before = {name: weight.clone() for name, weight in target.state_dict().items()}
    trainer = make_trainer(make_recipe(tmp_path, {"objective": "distillation"}), target=target)
    start = {name: weight.clone() for name, weight in trainer.model.named_parameters()}
    trainer.run()
    for name, weight in trainer.model.named_parameters():
        assert not torch.equal(weight, start[name]), name
    for name, weight in target.state_dict().items():
        assert torch.equal(weight, before[name]), name


def test_the_same_seed_gives_the_same_run_and_another_seed_another(tmp_path: Path) -> None:
    losses = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        recipe = make_recipe(tmp_path / name, steps=4)
        object.__setattr__(recipe, "seed", seed)
        make_trainer(recipe).run()
        losses.append([row["loss"] for row in rows_of(tmp_path / name)])
    assert losses[0] == losses[1] != losses[2]


def test_every_document_is_seen_once_an_epoch(tmp_path: Path) -> None:
    documents = random_documents(count=16, held_out=4)
    trainer = make_trainer(make_recipe(tmp_path, batch_size=5), documents=documents)
    order = trainer._rows(0, 36).tolist()
    epochs = [order[start : start + 12] for start in (0, 12, 24)]
    assert all(sorted(epoch) == list(range(12)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    # A step across the boundary of two epochs takes the end of one and the start of the next.
    assert trainer._rows(10, 5).tolist() == order[10:15]


def test_no_held_out_document_is_trained_on(tmp_path: Path) -> None:
    documents = random_documents(held_out=10)
    trainer = make_trainer(make_recipe(tmp_path), documents=documents)
    assert not bool(trainer.documents.held_out.any()) and len(trainer.documents) == 12
    assert bool(trainer.held_out.held_out.all()) and len(trainer.held_out) == 10
    with pytest.raises(ValueError, match="no document to train on"):
        make_trainer(make_recipe(tmp_path), documents=random_documents(10, held_out=10))


def test_distillation_needs_a_teacher(tmp_path: Path) -> None:
    trainer = make_trainer(make_recipe(tmp_path))
    recipe = make_recipe(tmp_path, {"objective": "distillation"})
    with pytest.raises(ValueError, match=r"run\.start"):
        make_objective(recipe.loss, trainer.model, trainer.target, None, recipe.run)


# --- shards and chunks


@pytest.mark.parametrize("weights", ["uniform", "d-pace"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_chunks_change_neither_loss_nor_gradients(
    objective: str, weights: str, tmp_path: Path
) -> None:
    found = []
    for chunk in (0, 5, 1):
        loss = {**loss_of(objective), "slot_weights": weights}
        found.append(gradients(make_trainer(make_recipe(tmp_path, loss, chunk=chunk))))
    for loss_, slopes in found[1:]:
        assert torch.allclose(loss_, found[0][0], rtol=1e-6, atol=1e-6)
        assert torch.allclose(slopes, found[0][1], rtol=1e-5, atol=1e-6)
    assert float(found[0][1].abs().max()) > 1e-3


def test_a_step_averages_its_shards(tmp_path: Path) -> None:
    trainer = make_trainer(make_recipe(tmp_path, num_shards=2, clip=1e9))
    taken: list[torch.Tensor] = []

    def keep(step: int, slopes: torch.Tensor) -> torch.Tensor:
        taken.append(slopes)
        return slopes.norm()

    trainer.optimizer.update = keep  # type: ignore[method-assign]
    values, norm = trainer.step(3)
    alone = make_trainer(make_recipe(tmp_path, num_shards=2))
    alone._local_shards = lambda: 1  # type: ignore[method-assign]
    parts = [gradients(alone, 3, shard) for shard in (0, 1)]
    assert torch.allclose(values[0], (parts[0][0] + parts[1][0]) / 2, atol=1e-6)
    assert torch.allclose(taken[0], (parts[0][1] + parts[1][1]) / 2, atol=1e-6)
    assert float(norm) == pytest.approx(float(taken[0].norm()))
    assert not torch.allclose(parts[0][1], parts[1][1], atol=1e-3)


def test_shards_cut_a_step_into_its_documents(tmp_path: Path) -> None:
    whole = make_trainer(make_recipe(tmp_path, num_shards=1)).blocks(2, 0)
    trainer = make_trainer(make_recipe(tmp_path, num_shards=2))
    parts = [trainer.blocks(2, shard) for shard in (0, 1)]
    assert torch.equal(torch.cat([part.ids for part in parts]), whole.ids)


# --- what is written


def test_the_drafter_that_is_written_holds_the_averages(tmp_path: Path) -> None:
    trainer = make_trainer(make_recipe(tmp_path))
    trainer.run()
    averages = trainer.optimizer.averages()
    loaded = FlashMapDraftModel.from_pretrained(tmp_path / "drafter")
    weights = dict(loaded.named_parameters())
    assert weights.keys() == averages.keys()
    for name, weight in weights.items():
        assert torch.equal(weight.float(), averages[name].bfloat16().float()), name
    assert loaded.config.target_layer_ids == trainer.model.config.target_layer_ids
    for file in (tmp_path / "drafter").glob("*.safetensors"):
        assert all(tensor.dtype == torch.bfloat16 for tensor in load_file(file).values())
    moved = [not torch.equal(averages[n], w) for n, w in trainer.model.named_parameters()]
    assert any(moved), "averages differ from the last weights"


def test_weight_files_are_split_at_the_recipes_size(tmp_path: Path) -> None:
    make_trainer(make_recipe(tmp_path, steps=1, shard_size="10KB")).run()
    files = list((tmp_path / "drafter").glob("*.safetensors"))
    assert len(files) > 1
    FlashMapDraftModel.from_pretrained(tmp_path / "drafter")


def test_the_log_says_what_happened(tmp_path: Path) -> None:
    said: list[str] = []
    recipe = make_recipe(tmp_path, loss_of("product"), steps=7, log_every=3, evaluate_every=5)
    make_trainer(recipe, said=said).run()
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in lines if "loss" in row] == [3, 6, 7]
    assert [row["step"] for row in lines if "acceptance_length_0" in row] == [5, 7]
    for row in lines:
        assert all(value is None or math.isfinite(value) for value in row.values())
        if "loss" in row:
            assert row["rate"] > 0 and row["gradient_norm"] > 0 and row["slots_per_second"] > 0
            assert 0 <= row["leading_greedy"] <= 3 and 0 <= row["leading_sampled"] <= 3
    assert (tmp_path / "log.png").stat().st_size > 1000
    assert any("step 7" in line for line in said)


def test_the_rate_rises_and_ends_at_its_share(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, steps=100, warm_up=0.1, rate=1.0, final_rate=0.02)
    rate = make_trainer(recipe).optimizer.rate
    rates = [rate(step) for step in range(101)]
    assert rates[0] == pytest.approx(0.1, rel=0.01)
    assert rates[:10] == sorted(rates[:10]) and rates[10:] == sorted(rates[10:], reverse=True)
    assert max(rates) > 0.95 and rates[100] == pytest.approx(0.02)


def test_a_run_of_so_many_seconds_stops_and_saves(tmp_path: Path) -> None:
    began = time.monotonic()
    done = make_trainer(make_recipe(tmp_path, steps=100_000, log_every=10)).run(seconds=0.5)
    assert 0 < done < 100_000 and time.monotonic() - began < 10
    assert steps_of(tmp_path) == [done]
    assert (tmp_path / "drafter" / "config.json").is_file()


def test_a_finished_run_is_not_run_again(tmp_path: Path) -> None:
    make_trainer(make_recipe(tmp_path, steps=3)).run()
    rows = rows_of(tmp_path)
    assert make_trainer(make_recipe(tmp_path, steps=3)).run() == 3
    assert rows_of(tmp_path) == rows


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_evaluation_changes_nothing_in_the_run(dtype: str, tmp_path: Path) -> None:
    states = []
    for name, every in (("rarely", 1000), ("often", 2)):
        recipe = make_recipe(tmp_path / name, steps=6, evaluate_every=every, dtype=dtype)
        move = getattr(torch, dtype)
        trainer = make_trainer(recipe, toys.drafter(1).to(move), target=toys.llama().to(move))
        for step in range(6):
            trainer.step(step)
            if step % 2 and every == 2:
                trainer._evaluate(step + 1)
        assert trainer.model.training
        states.append(trainer.optimizer.state())
    for name in states[0]:
        assert torch.equal(states[0][name], states[1][name]), name


# --- runs that cannot go on


@pytest.mark.parametrize("log_every", [1, 4])
@pytest.mark.parametrize("save_every", [0.0, 1e9])
def test_nan_stops_the_run_and_the_last_good_state_stays(
    log_every: int, save_every: float, tmp_path: Path
) -> None:
    first = make_trainer(make_recipe(tmp_path, steps=20))
    first.run(seconds=0.01)
    (good,) = steps_of(tmp_path)
    assert good < 17
    before = state_of(tmp_path)
    recipe = make_recipe(tmp_path, steps=20, log_every=log_every, save_every=save_every)
    trainer = make_trainer(recipe)
    update = trainer.optimizer.update

    def poisoned(step: int, slopes: torch.Tensor) -> torch.Tensor:
        return update(step, slopes * math.nan if step == good + 1 else slopes)

    trainer.optimizer.update = poisoned  # type: ignore[method-assign]
    with pytest.raises(TrainingError) as caught:
        trainer.run()
    message = str(caught.value)
    for word in (f"run.start = '{tmp_path / 'drafter'}'", "another run.folder", "run.rate"):
        assert word in message
    assert any(str(step) in message for step in range(good + 2, good + 6)), "names the step"
    after = state_of(tmp_path)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in after.values())
    assert steps_of(tmp_path)[0] == good
    if save_every:
        assert steps_of(tmp_path) == [good]
        assert all(torch.equal(before[name], after[name]) for name in before)
    exported = FlashMapDraftModel.from_pretrained(tmp_path / "drafter")
    assert all(bool(torch.isfinite(weight).all()) for weight in exported.parameters())
    # The next attempt goes on from there.
    assert make_trainer(make_recipe(tmp_path, steps=20)).run() == 20


def test_a_huge_rate_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"step"):
        make_trainer(make_recipe(tmp_path, steps=50, rate=1e30)).run()
    assert steps_of(tmp_path) == []


def test_a_run_that_fails_at_once_names_no_weights_to_start_from(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"another run\.folder, with a lower run\.rate"):
        make_trainer(make_recipe(tmp_path, steps=50, rate=1e30)).run()


def collapsed_trainer(folder: Path, **run: Any) -> Trainer:
    """A trainer of a drafter that says the same everywhere, and hardly learns: its head
    knows a bias alone."""
    trainer = make_trainer(
        make_recipe(folder, steps=6, evaluate_every=2, rate=1e-12, weight_decay=0.0, **run),
        documents=random_documents(60, held_out=30),
    )
    with torch.no_grad():
        trainer.model.head.weight.zero_()
        trainer.optimizer.master.copy_(trainer.optimizer.weights)
        trainer.optimizer.average.copy_(trainer.optimizer.weights)
    return trainer


def test_a_collapsed_drafter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainingError) as caught:
        collapsed_trainer(tmp_path, collapse_after=4).run()
    assert "collapsed by step 4" in str(caught.value)
    assert "another run.folder" in str(caught.value)


def test_a_drafter_may_say_the_same_early_on(tmp_path: Path) -> None:
    assert collapsed_trainer(tmp_path, collapse_after=7).run() == 6


def test_few_tokens_in_the_texts_are_no_collapse(tmp_path: Path) -> None:
    trainer = make_trainer(make_recipe(tmp_path))
    for said, wanted in ((1, 9), (2, 10), (2, 60), (5, 200)):
        trainer._refuse_collapse(10**6, Walk([[1]], (said, wanted)))
    for said, wanted in ((1, 10), (1, 99), (4, 200)):
        with pytest.raises(TrainingError):
            trainer._refuse_collapse(10**6, Walk([[1]], (said, wanted)))


def test_a_healthy_drafter_is_not_called_collapsed(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, steps=6, evaluate_every=2, collapse_after=1)
    documents = random_documents(60, held_out=30)
    assert make_trainer(recipe, documents=documents).run() == 6


def test_processes_must_share_the_shards_evenly(tmp_path: Path) -> None:
    class Three:
        device, num_processes, process_index, is_main_process = CPU, 3, 0, True

    recipe = make_recipe(tmp_path, num_shards=2)
    whole = make_trainer(recipe)
    with pytest.raises(ValueError, match=r"run\.num_shards is 2, which 3 processes"):
        Trainer(recipe, whole.target, whole.model, None, random_documents(), Three())  # type: ignore[arg-type]
