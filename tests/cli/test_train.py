"""`flashmap train`: data, run and eval on tiny folders, and the messages where something is
missing."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.commands import Run, assert_one_message
from support.pair_folders import truncate
from support.training import one_thread as in_one_thread

from flashmap import FlashMapDraftModel
from flashmap.files import only_writer

RECIPE = """
target = "{target}"

[drafter]
block_size = 3
hidden_size = 16
num_hidden_layers = 1
num_attention_heads = 2
intermediate_size = 24
cond_dim = 12
time_embed_dim = 8
target_layer_ids = [0, 1]

[data]
folder = "{folder}/data"
num_prompts = 24
max_prompt_tokens = 260
max_new_tokens = 10
batch_size = 8
held_out_share = 0.3

[run]
folder = "{folder}/run"
steps = 4
batch_size = 4
blocks = 3
max_length = 200
dtype = "float32"
log_every = 2

[evaluation]
prompts = "{folder}/prompts.jsonl"
max_new_tokens = 12
temperatures = [0.0, 1.0]
num_steps = [1, 2]
"""
PROMPTS = [("Hi", "facts"), ("Write a poem.", "writing"), ("Why is the sky blue?", "facts")]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with in_one_thread():
        yield


@pytest.fixture
def recipe(pair: Path, tmp_path: Path) -> Path:
    """A recipe in a folder of its own, with prompts to evaluate on."""
    rows = [json.dumps({"prompt": text, "domain": domain}) for text, domain in PROMPTS]
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows))
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.format(target=pair / "target", folder=tmp_path))
    return path


def document_of(out: str) -> Any:
    """The one JSON document that stdout holds."""
    return json.loads(out)


def test_from_nothing_to_a_measured_drafter(recipe: Path, run: Run) -> None:
    made = run("train", "data", recipe, "--json")
    assert made.status == 0, made.err
    found = document_of(made.out)
    folder = recipe.parent
    assert found["documents"] > 5 and Path(found["picture"]).is_file()
    assert json.loads((folder / "data" / "report.json").read_text()) == found
    again = run("train", "data", recipe)
    assert again.status == 0 and f"documents: {found['documents']}" in again.out

    trained = run("train", "run", recipe, "--cpu", "--set", "run.steps=6", "--set", "seed=0")
    assert trained.status == 0, trained.err
    said = trained.out + trained.err
    assert "step 6 of 6" in said and "parameters" in said
    assert str(folder / "run" / "drafter") in said
    drafter = FlashMapDraftModel.from_pretrained(folder / "run" / "drafter")
    assert drafter.config.block_size == 3

    twice = f'data.other_folders=["{folder / "data"}"]'
    options = ("--cpu", "--set", "run.steps=1", "--set", f'run.folder="{folder / "more"}"')
    more = run("train", "run", recipe, *options, "--set", twice)
    assert more.status == 0, more.err
    assert f", {2 * found['documents']:,} documents," in more.out + more.err

    done = run("train", "eval", recipe, "--json", "--device", "cpu", "--set", "run.steps=6")
    assert done.status == 0, done.err
    measured = document_of(done.out)
    assert measured["draft"] == str(folder / "run" / "drafter")
    assert measured["prompts"]["count"] == 3
    check_rows(measured)


def check_rows(measured: dict[str, Any]) -> None:
    """Rows of the walk and of the loop, for every setting, with all that is promised."""
    for name in ("walk", "loop"):
        rows = measured[name]
        settings = [(row["temperature"], row["num_steps"]) for row in rows]
        assert sorted(settings) == [(0.0, 1), (0.0, 2), (1.0, 1), (1.0, 2)]
        for row in rows:
            assert [part["domain"] for part in row["domains"]] == ["facts", "writing"]
            assert [part["texts"] for part in row["domains"]] == [2, 1]
            whole = row["overall"]
            for key in ("texts", "looped", "rounds"):
                assert whole[key] == sum(part[key] for part in row["domains"])
            assert whole["rounds"] == 0 or 1.0 <= whole["acceptance_length"] <= 4.0
            assert len(whole["slots"]) == 3
            assert all(rate is None or 0.0 <= rate <= 1.0 for rate in whole["slots"])
    assert all(row["num_draws"] == 1 for row in measured["loop"])


def test_the_walk_equals_the_loop_at_temperature_0(recipe: Path, pair: Path, run: Run) -> None:
    sets = ["--set", "evaluation.temperatures=[0.0]", "--set", "evaluation.dtype=float32"]
    sets += ["--set", "evaluation.max_new_tokens=40"]
    done = run(
        "train", "eval", recipe, "--draft", pair / "draft", "--device", "cpu", "--json", *sets
    )
    assert done.status == 0, done.err
    found = document_of(done.out)
    assert found["dtype"] == "float32" and found["draft"] == str(pair / "draft")
    assert len(found["walk"]) == len(found["loop"]) == 2
    for walked, looped in zip(found["walk"], found["loop"], strict=True):
        for one, other in zip(
            [*walked["domains"], walked["overall"]],
            [*looped["domains"], looped["overall"]],
            strict=True,
        ):
            assert one == pytest.approx(other) if None not in one["slots"] else one == other
        assert walked["overall"]["rounds"] > 20


def test_several_draws_and_samples_are_measured(recipe: Path, pair: Path, run: Run) -> None:
    sets = ["--set", "evaluation.num_draws=[1, 2]", "--set", "evaluation.samples=2"]
    sets += ["--set", "evaluation.num_steps=[1]", "--no-loop"]
    done = run(
        "train", "eval", recipe, "--draft", pair / "draft", "--device", "cpu", "--json", *sets
    )
    assert done.status == 0, done.err
    found = document_of(done.out)
    assert found["loop"] == []
    rows = {(row["temperature"], row["num_draws"]): row["overall"] for row in found["walk"]}
    assert set(rows) == {(0.0, 1), (0.0, 2), (1.0, 1), (1.0, 2)}
    assert [rows[key]["texts"] for key in sorted(rows)] == [3, 3, 6, 6]


def test_without_json_there_is_a_table(recipe: Path, pair: Path, run: Run) -> None:
    done = run(
        "train", "eval", recipe, "--draft", pair / "draft", "--device", "cpu", "--no-loop",
        "--set", "evaluation.temperatures=[0]",
    )  # fmt: skip
    assert done.status == 0, done.err
    for word in ("walk", "temperature", "looped", "acceptance", "facts", "writing", "all"):
        assert word in done.out
    assert "loop\n" not in done.out


def test_the_recipes_own_drafter_is_measured_where_none_was_trained(
    recipe: Path, pair: Path, run: Run
) -> None:
    done = run(
        "train", "eval", recipe, "--json", "--device", "cpu", "--no-loop",
        "--set", f"evaluation.draft={pair / 'draft'}", "--set", "evaluation.temperatures=[0]",
    )  # fmt: skip
    assert done.status == 0, done.err
    assert document_of(done.out)["draft"] == str(pair / "draft")


def test_a_run_can_stop_after_some_seconds_and_go_on(recipe: Path, run: Run) -> None:
    assert run("train", "data", recipe).status == 0
    stopped = run("train", "run", recipe, "--cpu", "--seconds", 0)
    assert stopped.status == 0, stopped.err
    assert "step 0 of 4" in stopped.out + stopped.err
    done = run("train", "run", recipe, "--cpu")
    assert done.status == 0, done.err
    assert "going on from step 0" in done.out + done.err
    assert "step 4 of 4" in done.out + done.err
    refused = run("train", "run", recipe, "--cpu", "--set", "run.rate=0.5")
    assert refused.status == 1 and "run.rate" in refused.err and "Traceback" not in refused.err
    assert "run.folder" in refused.err


def test_a_run_that_fails_ends_with_a_message(recipe: Path, run: Run) -> None:
    assert run("train", "data", recipe).status == 0
    done = run(
        "train", "run", recipe, "--cpu", "--set", "run.rate=1e30", "--set", "run.log_every=1",
        "--set", "run.steps=40",
    )  # fmt: skip
    assert done.status == 1 and "Traceback" not in done.err
    assert "flashmap: " in done.err and "run.rate" in done.err


# --- what is missing or misspelt


def test_a_run_without_data_says_how_to_make_it(recipe: Path, run: Run) -> None:
    words = [recipe.parent / "data", "flashmap train data", "data.folder"]
    assert_one_message(run("train", "run", recipe, "--cpu"), *words)


def test_an_evaluation_without_a_drafter_says_so(recipe: Path, run: Run) -> None:
    words = [recipe.parent / "run" / "drafter", "evaluation.draft", "--draft"]
    assert_one_message(run("train", "eval", recipe), *words)


def test_an_evaluation_without_prompts_says_so(recipe: Path, pair: Path, run: Run) -> None:
    draft = ["--draft", pair / "draft"]
    ended = run("train", "eval", recipe, *draft, "--set", "evaluation.prompts=")
    assert_one_message(ended, "evaluation.prompts")
    (recipe.parent / "prompts.jsonl").unlink()
    ended = run("train", "eval", recipe, *draft)
    assert_one_message(ended, "prompts.jsonl", "cannot be read")
    (recipe.parent / "prompts.jsonl").write_text('{"prompt": 3}\n')
    assert_one_message(run("train", "eval", recipe, *draft), "prompts.jsonl:1")


@pytest.mark.parametrize("command", ["data", "run", "eval"])
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--set", "run.stepz=3"], ["'run.stepz'", "steps"]),
        (["--set", "stepz=3"], ["'stepz'"]),
        (["--set", "run.steps"], ["'run.steps'", "run.steps=10"]),
        (["--set", "run.steps=0"], ["run.steps", "at least 1"]),
        (["--set", "run.steps=ten"], ["run.steps", "'ten'"]),
    ],
)
def test_a_bad_setting(
    command: str, flags: list[str], words: list[str], recipe: Path, run: Run
) -> None:
    assert_one_message(run("train", command, recipe, *flags), *words)


@pytest.mark.parametrize("command", ["data", "run", "eval"])
def test_a_recipe_that_is_not_there(command: str, tmp_path: Path, run: Run) -> None:
    assert_one_message(run("train", command, tmp_path / "gone.toml"), "gone.toml", "cannot be read")


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("drafter.blok_size=3", ["drafter.blok_size", "block_size"]),
        ("drafter.hidden_size=15", ["hidden_size"]),
        ("drafter.target_layer_ids=[0, 9]", ["9"]),
        ("run.start=nowhere", ["run.start", "nowhere"]),
        ("loss.objective=distillation", ["distillation", "run.start"]),
    ],
)
def test_a_drafter_that_cannot_be(setting: str, words: list[str], recipe: Path, run: Run) -> None:
    assert run("train", "data", recipe, "--set", "data.num_prompts=6").status == 0
    ended = run("train", "run", recipe, "--cpu", "--set", setting)
    assert ended.status == 1 and "Traceback" not in ended.err
    assert all(word in ended.err for word in words), ended.err


def test_a_run_starts_from_a_drafter_of_the_same_shape(recipe: Path, run: Run) -> None:
    assert run("train", "data", recipe).status == 0
    start = recipe.parent / "stage1"
    flow = ["--set", "loss.objective=flow", "--set", f"run.folder={start}"]
    assert run("train", "run", recipe, "--cpu", *flow).status == 0
    second = ["--set", "loss.objective=distillation", "--set", f"run.start={start / 'drafter'}"]
    done = run("train", "run", recipe, "--cpu", *second)
    assert done.status == 0, done.err
    refused = run(
        "train", "run", recipe, "--cpu", *second, "--set", "drafter.block_size=4",
        "--set", f"run.folder={recipe.parent / 'other'}",
    )  # fmt: skip
    assert refused.status == 1 and "block_size" in refused.err and "run.start" in refused.err


def test_a_start_that_is_damaged(recipe: Path, pair: Path, run: Run) -> None:
    assert run("train", "data", recipe, "--set", "data.num_prompts=6").status == 0
    for name, damage in (("cut", truncate), ("gone", Path.unlink)):
        folder = shutil.copytree(pair / "draft", recipe.parent / name)
        damage(folder / "model.safetensors")
        ended = run("train", "run", recipe, "--cpu", "--set", f"run.start={folder}")
        assert_one_message(ended, "run.start", folder)


def test_a_first_stage_says_that_it_is_one(recipe: Path, run: Run) -> None:
    assert run("train", "data", recipe).status == 0
    for objective, start in (("flow", ""), ("distillation", "flow/drafter"), ("product", "")):
        sets = [f"loss.objective={objective}", f"run.folder={recipe.parent / objective}"]
        sets += [f"run.start={recipe.parent / start}"] if start else []
        options = [word for one in sets for word in ("--set", one)]
        assert run("train", "run", recipe, "--cpu", "--set", "run.steps=1", *options).status == 0
        config = json.loads((recipe.parent / objective / "drafter" / "config.json").read_text())
        assert config["flow_map"] is (objective != "flow")


def test_two_runs_at_once_are_refused(recipe: Path, run: Run) -> None:
    with only_writer(recipe.parent / "run" / "checkpoints"):
        words = ["another process", recipe.parent / "run"]
        assert_one_message(run("train", "run", recipe, "--cpu"), *words)


def test_documents_of_another_target(recipe: Path, pair: Path, run: Run) -> None:
    assert run("train", "data", recipe).status == 0
    other = shutil.copytree(pair / "target", recipe.parent / "other")
    done = run("train", "run", recipe, "--cpu", "--set", f"target={other}")
    assert done.status == 0 and f"was made for target '{pair / 'target'}'" in done.err
    few = ["--set", "drafter.vocab_size=9", "--set", f"run.folder={recipe.parent / 'few'}"]
    assert_one_message(run("train", "run", recipe, "--cpu", *few), "token id", "another target")


def test_a_target_that_is_not_there(recipe: Path, pair: Path, run: Run) -> None:
    for command in ("data", "eval"):
        draft = ["--draft", pair / "draft"] if command == "eval" else []
        ended = run("train", command, recipe, *draft, "--set", "target=/nowhere/at/all")
        assert_one_message(ended, "/nowhere/at/all")


@pytest.mark.parametrize("command", ["data", "run", "eval"])
def test_help_shows_an_example(command: str, run: Run) -> None:
    done = run("train", command, "--help")
    assert done.status == 0
    assert f"Example: flashmap train {command} " in " ".join(done.out.split())
    assert "--set" in done.out and "RECIPE" in done.out


def test_help_lists_the_steps(run: Run) -> None:
    done = run("train", "--help")
    assert done.status == 0 and all(name in done.out for name in ("data", "run", "eval"))
