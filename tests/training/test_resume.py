"""Runs that stop, or are killed, go on exactly where they stood."""

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from support.pair_folders import truncate
from support.training import (
    assert_same,
    make_recipe,
    make_trainer,
    rows_of,
    state_of,
    steps_of,
)
from support.training import one_thread as in_one_thread

from flashmap.training import trainer as trainer_module
from flashmap.training.checkpoints import newest_checkpoint, save_checkpoint
from flashmap.training.log import Log
from flashmap.training.recipe import Recipe
from flashmap.training.trainer import TrainingError

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with in_one_thread():
        yield


def run_until(recipe: Recipe, stop: int) -> None:
    """Train as a new process would, with a time limit that strikes after `stop` steps."""
    trainer = make_trainer(recipe)
    take, now = trainer.step, 0.0

    def step(number: int) -> Any:
        nonlocal now
        now += 0.001 if number + 1 < stop else 1e6
        return take(number)

    def monotonic() -> float:
        nonlocal now
        now += 1e-6
        return now

    trainer.step = step  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer_module, "time", SimpleNamespace(monotonic=monotonic))
        assert trainer.run(seconds=1e5) == stop


@pytest.mark.parametrize(
    ("objective", "optimizer", "stops"),
    [
        ("product", "adamw", [1, 7, 8, 23]),
        ("product", "muon", [10]),
        ("mixture", "adamw", [10]),
        ("flow", "muon", [3, 19]),
        ("distillation", "adamw", [10]),
    ],
)
def test_a_run_in_parts_equals_a_run_in_one(
    objective: str, optimizer: str, stops: list[int], tmp_path: Path
) -> None:
    for name, parts in (("one", []), ("parts", stops)):
        recipe = make_recipe(
            tmp_path / name,
            {"objective": objective},
            steps=30,
            evaluate_every=9,
            optimizer=optimizer,
        )
        for stop in [*parts, 30]:
            run_until(recipe, stop)
    assert_same(state_of(tmp_path / "one"), state_of(tmp_path / "parts"))
    assert rows_of(tmp_path / "one") == rows_of(tmp_path / "parts")
    assert [row["step"] for row in rows_of(tmp_path / "parts")] == list(range(1, 31))


def test_rows_of_a_run_in_parts_average_over_the_same_steps(tmp_path: Path) -> None:
    for name, stops in (("one", []), ("parts", [7])):
        recipe = make_recipe(tmp_path / name, steps=12, log_every=5, evaluate_every=12)
        for stop in [*stops, 12]:
            run_until(recipe, stop)
    assert_same(state_of(tmp_path / "one"), state_of(tmp_path / "parts"))
    assert rows_of(tmp_path / "one") == rows_of(tmp_path / "parts")


def test_a_run_goes_on_after_steps_that_were_not_saved(tmp_path: Path) -> None:
    run_until(make_recipe(tmp_path / "one", steps=14), 14)
    recipe = make_recipe(tmp_path / "parts", steps=14)
    run_until(recipe, 6)
    trainer = make_trainer(recipe)
    take = trainer.step

    def step(number: int) -> Any:
        if number == 11:
            raise KeyboardInterrupt
        return take(number)

    trainer.step = step  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    assert rows_of(tmp_path / "parts")[-1]["step"] == 11 and steps_of(tmp_path / "parts") == [6]
    said: list[str] = []
    make_trainer(recipe, said=said).run()
    assert "going on from step 6" in said
    assert_same(state_of(tmp_path / "one"), state_of(tmp_path / "parts"))
    assert rows_of(tmp_path / "one") == rows_of(tmp_path / "parts")


KILLED = """
import os, signal, sys, time
from pathlib import Path
import torch
from support.training import make_recipe, make_trainer, steps_of
from flashmap.training.log import Log

torch.set_num_threads(1)
folder, delays = Path(sys.argv[1]), [float(delay) for delay in sys.argv[2:]]
Log.plot = lambda self: None  # drawing takes longer than all the rest


def child(name):
    pid = os.fork()
    if pid == 0:
        recipe = make_recipe(folder / name, steps=40, save_every=0.0, evaluate_every=15)
        object.__setattr__(recipe.data, "folder", "data")
        make_trainer(recipe).run()
        os._exit(0)
    return pid


for delay in delays:
    pid = child("killed")
    before = time.monotonic()
    folder_of = folder / "killed" / "checkpoints"
    start = steps_of(folder / "killed")[-1:] if folder_of.is_dir() else []
    while time.monotonic() - before < 60:  # at least one step further, else it would never end
        time.sleep(0.005)
        if folder_of.is_dir() and steps_of(folder / "killed")[-1:] != start:
            break
    time.sleep(delay)
    os.kill(pid, signal.SIGKILL)
    print(os.waitpid(pid, 0)[1], steps_of(folder / "killed"), flush=True)
for name in ("killed", "whole"):
    assert os.waitpid(child(name), 0)[1] == 0
"""


def test_a_run_that_is_killed_several_times_ends_with_the_same_weights(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(KILLED)
    delays = [f"{random.Random(0).uniform(0.0, 0.12) * part:.4f}" for part in (1, 0.3, 0.6, 0.1, 1)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py"), str(tmp_path), *delays],
        capture_output=True,
        text=True,
        env=env,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert len(lines) == len(delays)
    assert sum(line.startswith("9 ") for line in lines) >= 3, f"too few were killed: {lines}"
    assert_same(state_of(tmp_path / "killed"), state_of(tmp_path / "whole"))
    assert rows_of(tmp_path / "killed") == rows_of(tmp_path / "whole")
    assert [row["step"] for row in rows_of(tmp_path / "killed")] == list(range(1, 41))
    files = {path.name for path in (tmp_path / "killed" / "checkpoints").iterdir()}
    assert files == {"step-00000039", "step-00000040"}, "nothing half-written is left"


# --- checkpoints


def test_a_half_written_checkpoint_is_ignored(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, steps=8)
    run_until(recipe, 4)
    left = tmp_path / "checkpoints" / ".step-00000007.part"
    left.mkdir()
    (left / "state.safetensors").write_bytes(b"half of it")
    found = newest_checkpoint(tmp_path / "checkpoints", recipe)
    assert found is not None and found[0] == 4
    assert not left.exists()
    make_trainer(recipe).run()
    assert steps_of(tmp_path) == [4, 8]


def test_a_kill_while_an_old_checkpoint_is_removed_does_no_harm(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, steps=8)
    for stop in (2, 4, 6):
        run_until(recipe, stop)
    assert steps_of(tmp_path) == [4, 6]
    (tmp_path / "checkpoints" / "step-00000002").mkdir()  # emptied, but still there
    make_trainer(recipe).run()
    assert steps_of(tmp_path) == [6, 8]


def rewrite_state(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], Any]:
    def write(path: Path) -> None:
        tensors = load_file(path / "state.safetensors")
        change(tensors)
        save_file(tensors, path / "state.safetensors")

    return write


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "no record": lambda path: (path / "about.json").unlink(),
    "a record that is cut": lambda path: (path / "about.json").write_text("{"),
    "a record of another form": lambda path: (path / "about.json").write_text("[]"),
    "no state": lambda path: (path / "state.safetensors").unlink(),
    "a state that is cut": lambda path: truncate(path / "state.safetensors"),
    "a tensor missing": rewrite_state(lambda tensors: tensors.pop("average")),
    "no rows": rewrite_state(lambda tensors: tensors.pop("rows")),
    "a tensor of one number": rewrite_state(lambda tensors: tensors.update(average=torch.zeros(1))),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_one_before_serves(kind: str, tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, steps=8)
    for stop in (3, 5):
        run_until(recipe, stop)
    path = tmp_path / "checkpoints" / "step-00000005"
    DAMAGE[kind](path)
    with pytest.raises(ValueError, match="is damaged") as caught:
        make_trainer(recipe).run()
    assert str(path) in str(caught.value) and "remove it" in str(caught.value)
    shutil.rmtree(path)
    said: list[str] = []
    assert make_trainer(recipe, said=said).run() == 8
    assert "going on from step 3" in said


def test_a_kill_before_the_drafter_is_written_does_no_harm(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, steps=4)
    make_trainer(recipe).run()
    weights = tmp_path / "drafter" / "model.safetensors"
    whole = weights.read_bytes()
    truncate(weights)
    assert make_trainer(recipe).run() == 4
    assert weights.read_bytes() == whole


def test_a_checkpoint_is_not_replaced_by_itself(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, steps=4)
    make_trainer(recipe).run()
    path = tmp_path / "checkpoints" / "step-00000004" / "state.safetensors"
    before = path.stat()
    make_trainer(recipe).run(seconds=0)
    assert path.stat().st_ino == before.st_ino


@pytest.mark.parametrize("error", [OSError(28, "No space left"), SafetensorError("No space left")])
def test_a_full_disk_is_one_message_and_the_run_goes_on_later(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(tmp_path, steps=8)
    run_until(recipe, 3)

    def full(*arguments: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("flashmap.training.checkpoints.save_file", full)
        with pytest.raises(TrainingError, match="No space left") as caught:
            make_trainer(recipe).run()
    assert str(tmp_path) in str(caught.value)
    said: list[str] = []
    assert make_trainer(recipe, said=said).run() == 8
    assert "going on from step 3" in said


def test_the_newest_two_are_kept(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    for step in (1, 20, 300):
        save_checkpoint(tmp_path / "checkpoints", recipe, step, {"x": torch.full((2,), step)})
    assert steps_of(tmp_path) == [20, 300]
    found = newest_checkpoint(tmp_path / "checkpoints", recipe)
    assert found is not None and found[0] == 300 and found[1]["x"].tolist() == [300, 300]


def test_there_may_be_none(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    assert newest_checkpoint(tmp_path / "checkpoints", recipe) is None
    (tmp_path / "checkpoints").mkdir()
    assert newest_checkpoint(tmp_path / "checkpoints", recipe) is None


def test_another_recipe_is_refused_by_the_settings_that_differ(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, steps=8)
    run_until(recipe, 3)
    other = make_recipe(tmp_path, {"objective": "mixture"}, steps=9, rate=0.5)
    object.__setattr__(other, "seed", 4)
    with pytest.raises(ValueError) as caught:
        make_trainer(other).run()
    message = str(caught.value)
    expected = ("run.steps: 8 there, 9 here", "run.rate: 0.003 there, 0.5 here", "loss.objective")
    assert all(word in message for word in (*expected, "seed", "run.folder", str(tmp_path)))
    assert "batch_size" not in message
    assert steps_of(tmp_path) == [3] and rows_of(tmp_path)[-1]["step"] == 3


def test_what_changes_no_weight_may_differ(tmp_path: Path) -> None:
    run_until(make_recipe(tmp_path / "one", steps=6), 3)
    shutil.move(tmp_path / "one", tmp_path / "two")
    recipe = make_recipe(
        tmp_path / "two", steps=6, log_every=2, evaluate_every=5, save_every=7.0, chunk=1,
        shard_size="10KB",
    )  # fmt: skip
    object.__setattr__(recipe.data, "folder", str(tmp_path / "one" / "data"))
    object.__setattr__(recipe.evaluation, "samples", 3)
    said: list[str] = []
    assert make_trainer(recipe, said=said).run() == 6
    assert "going on from step 3" in said


# --- the log


def test_a_cut_last_line_is_dropped(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, steps=8)
    run_until(recipe, 5)
    path = tmp_path / "log.jsonl"
    whole = path.read_text()
    path.write_text(whole + '{"step": 6, "loss": 1.')
    assert [row["step"] for row in Log(tmp_path, False).rows()] == [1, 2, 3, 4, 5]
    make_trainer(recipe).run()
    assert path.read_text().startswith(whole)
    assert [row["step"] for row in rows_of(tmp_path)] == list(range(1, 9))


@pytest.mark.parametrize("line", ["[1]", "3", '{"loss": 1.0}', '{"step": null}'])
def test_a_line_that_is_no_row_is_dropped(line: str, tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text(f'{{"step": 1}}\n{line}\n')
    assert Log(tmp_path, False).rows() == [{"step": 1}]


def test_only_the_main_process_writes_the_log(tmp_path: Path) -> None:
    log = Log(tmp_path / "run", writes=False)
    log.add({"step": 1})
    log.forget_after(0)
    log.plot()
    assert not (tmp_path / "run").exists()


def test_rows_of_steps_that_come_again_are_forgotten(tmp_path: Path) -> None:
    log = Log(tmp_path, writes=True)
    for step in (1, 2, 3, 4):
        log.add({"step": step})
    log.forget_after(2)
    log.add({"step": 3})
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
