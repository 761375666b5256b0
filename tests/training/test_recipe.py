"""Recipes: what is read, what is replaced, and what is refused with a message that helps."""

import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flashmap.training.recipe import DataRecipe, LossRecipe, Recipe, RunRecipe, read_recipe

RECIPES = sorted((Path(__file__).parents[2] / "training" / "recipes").glob("*.toml"))
BASE = 'target = "toy"\n'


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(tmp_path: Path, text: str = BASE, *overrides: str) -> str:
    with pytest.raises(ValueError) as caught:
        read_recipe(write(tmp_path, text), overrides)
    return str(caught.value)


def test_there_are_recipes() -> None:
    assert RECIPES


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_every_recipe_in_the_repository_reads(path: Path) -> None:
    recipe = read_recipe(path)
    assert recipe.target and recipe.run.steps > 0
    root = path.parents[2]
    assert not recipe.evaluation.prompts or (root / recipe.evaluation.prompts).is_file()


def test_what_is_left_out_has_the_defaults(tmp_path: Path) -> None:
    found = read_recipe(write(tmp_path, BASE))
    assert found == Recipe(target="toy")
    assert (found.data, found.loss, found.run) == (DataRecipe(), LossRecipe(), RunRecipe())


def test_every_table_is_read(tmp_path: Path) -> None:
    text = """
        target = "toy"
        seed = 7
        drafter = { block_size = 3 }
        [data]
        temperatures = { "0" = 1, "0.7" = 0.5 }
        files = ["a.txt", "b.jsonl"]
        [loss]
        objective = "mixture"
        [run]
        rate = 1
        [evaluation]
        num_steps = [1, 2]
    """
    found = read_recipe(write(tmp_path, text))
    assert (found.seed, found.drafter) == (7, {"block_size": 3})
    assert dict(found.data.temperatures) == {"0": 1, "0.7": 0.5}
    assert tuple(found.data.files) == ("a.txt", "b.jsonl")
    assert found.loss.objective == "mixture"
    assert found.run.rate == 1.0 and isinstance(found.run.rate, float)
    assert tuple(found.evaluation.num_steps) == (1, 2)


@pytest.mark.parametrize("table", ["", "data", "loss", "run", "evaluation"])
def test_a_misspelt_key_is_refused_by_name(table: str, tmp_path: Path) -> None:
    header = f"[{table}]\n" if table else ""
    message = refusal(tmp_path, f"{BASE}{header}stepz = 3\n")
    assert repr(f"{table}.stepz" if table else "stepz") in message
    assert "recipe.toml" in message
    known = {"": "evaluation", "data": "num_passages", "loss": "decay", "run": "warm_up"}
    assert known.get(table, "num_draws") in message, "says what there is instead"


def test_the_target_must_be_named(tmp_path: Path) -> None:
    assert "target is missing" in refusal(tmp_path, "seed = 1\n")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("run.steps=ten", ["run.steps", "'ten'", "int"]),
        ("run.steps=1.5", ["run.steps", "1.5", "int"]),
        ("run.steps=true", ["run.steps", "True", "int"]),
        ("run.rate=true", ["run.rate", "True", "float"]),
        ("run.compile=1", ["run.compile", "1", "bool"]),
        ("run.folder=3", ["run.folder", "3", "str"]),
        ("run=3", ["run", "3", "table"]),
        ("drafter=3", ["drafter", "3"]),
        ("data.temperatures=[0]", ["data.temperatures"]),
        ("data.files=a.txt", ["data.files", "a.txt", "list"]),
        ("evaluation.num_steps=[1, 'a']", ["evaluation.num_steps", "'a'", "int"]),
        ("seed=x", ["seed", "'x'", "int"]),
    ],
)
def test_a_wrong_type_is_refused(override: str, words: list[str], tmp_path: Path) -> None:
    message = refusal(tmp_path, BASE, override)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("loss.objective=magic", "product, mixture, flow, distillation"),
        ("loss.slot_weights=magic", "uniform, exponential, d-pace"),
        ("run.dtype=float16", "float32, bfloat16"),
        *((f"run.{name}=0", "at least 1") for name in ("steps", "num_shards", "blocks")),
        *((f"run.{name}=-1", "at least 1") for name in ("log_every", "evaluate_every")),
        ("run.batch_size=0", "at least 1"),
        ("data.max_prompt_tokens=0", "at least 1"),
        ("data.max_new_tokens=0", "at least 1"),
        ("data.batch_size=0", "at least 1"),
        ("loss.num_draws=0", "at least 1"),
        ("data.held_out_share=1.5", "between 0 and 1"),
        ("data.held_out_share=nan", "between 0 and 1"),
        ("run.warm_up=-0.1", "between 0 and 1"),
        ("loss.confidence=2", "between 0 and 1"),
        ("loss.uniform_times=-1", "between 0 and 1"),
        ("loss.diagonal_share=0.8", "at most 1"),
        ("loss.cross_entropy=0", "not both 0"),
        ("loss.slot_weights=acceptance", "total_variation above 0 for these weights"),
        ("loss.total_variation=-1", "0 or more"),
        ("run.rate=0", "above 0"),
        ("run.rate=nan", "above 0"),
        ("run.num_shards=3", "multiple of 3"),
        ("data.temperatures={}", "temperatures and their shares"),
        ('data.temperatures={ "hot" = 1.0 }', "temperatures and their shares"),
        ('data.temperatures={ "1" = "all" }', "temperatures and their shares"),
        ('data.temperatures={ "-1" = 1.0 }', "temperatures and their shares"),
        ('data.temperatures={ "1" = 0.0 }', "temperatures and their shares"),
    ],
)
def test_a_value_out_of_range_is_refused(override: str, rule: str, tmp_path: Path) -> None:
    message = refusal(tmp_path, BASE, override)
    assert rule in message
    asked = "run.batch_size=64" if override == "run.num_shards=3" else override
    key, _, value = asked.partition("=")
    assert key in message or key.rpartition(".")[2] in message
    assert value[:1] == "{" or key == "loss.diagonal_share" or value in message


# What would only show up later, as a traceback from somewhere deep.
@pytest.mark.parametrize(
    "override",
    [
        "run.max_length=1",
        "run.chunk=-1",
        "run.average=1.5",
        "run.beta2=1.0",
        "run.clip=0",
        "run.weight_decay=-1",
        "loss.decay=0",
        "data.num_prompts=-1",
        "evaluation.max_new_tokens=0",
        "evaluation.samples=0",
        "evaluation.num_draws=[0]",
        "evaluation.num_steps=[]",
        "evaluation.temperatures=[]",
        "evaluation.temperatures=[-1.0]",
        "evaluation.temperatures=[inf]",
        "evaluation.temperatures=[1e-40]",
        "run.rate=inf",
        "run.clip=1e308",
        "run.shard_size=16",
        "run.shard_size=0MB",
        "run.shard_size=",
        "seed=100000000000000000000",
        "data.temperatures={ '1' = '0.5' }",
        "data.temperatures={ 'inf' = 1.0 }",
        "data.temperatures={ '1' = inf }",
        "data.temperatures={ '1e-40' = 1.0 }",
        "data.temperatures={ '1' = 1e31 }",
    ],
)
def test_a_value_that_no_run_can_use_is_refused(override: str, tmp_path: Path) -> None:
    assert override.partition("=")[0] in refusal(tmp_path, BASE, override)


def numbers() -> Iterator[tuple[str, type, bool]]:
    """Every number of a recipe: where it stands, its type, and whether there is a list of it."""
    for table in ("data", "loss", "run", "evaluation"):
        hints = typing.get_type_hints(typing.get_type_hints(Recipe)[table])
        for name, hint in hints.items():
            kind = next(iter(typing.get_args(hint)), hint)
            if kind in (int, float):
                yield f"{table}.{name}", kind, kind is not hint
    yield "seed", int, False


@pytest.mark.parametrize(("key", "kind", "listed"), list(numbers()))
def test_no_number_is_without_bounds(key: str, kind: type, listed: bool, tmp_path: Path) -> None:
    beyond = ["-1" + "0" * 31, "1" + "0" * 31, *(["nan", "inf", "-inf"] if kind is float else [])]
    for value in beyond:
        override = f"{key}=[{value}]" if listed else f"{key}={value}"
        assert key in refusal(tmp_path, BASE, override), override


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("run.steps=10", "run.steps", 10),
        (" run.steps = 10 ", "run.steps", 10),
        ("run.rate=1e-4", "run.rate", 1e-4),
        ("run.compile=true", "run.compile", True),
        ('run.folder="some where"', "run.folder", "some where"),
        ("run.folder=/some/where", "run.folder", "/some/where"),
        ("run.folder=some where", "run.folder", "some where"),
        ("run.start=a=b", "run.start", "a=b"),
        ("run.start=", "run.start", ""),
        ("data.files=['a', \"b\"]", "data.files", ("a", "b")),
        ("evaluation.temperatures=[0, 0.5]", "evaluation.temperatures", (0.0, 0.5)),
        ('data.temperatures={ "0" = 1.0 }', "data.temperatures", {"0": 1.0}),
        ("data.temperatures.0=1.0", "data.temperatures", {"0": 1.0}),
        ("drafter.target_layer_ids=[0, 1]", "drafter", {"target_layer_ids": [0, 1]}),
        ("seed=3", "seed", 3),
        ("target=other", "target", "other"),
    ],
)
def test_an_override_replaces_one_setting(
    override: str, path: str, value: Any, tmp_path: Path
) -> None:
    found: Any = read_recipe(write(tmp_path, BASE), [override])
    for name in path.split("."):
        found = getattr(found, name)
    assert found == value


def test_the_last_override_counts_and_neighbours_stay(tmp_path: Path) -> None:
    text = f"{BASE}[run]\nsteps = 5\nblocks = 9\n"
    found = read_recipe(write(tmp_path, text), ["run.steps=6", "run.steps=7"])
    assert (found.run.steps, found.run.blocks) == (7, 9)


@pytest.mark.parametrize("override", ["run.steps", "=3", "run.=3", ".steps=3", ""])
def test_an_override_of_another_form_is_refused(override: str, tmp_path: Path) -> None:
    message = refusal(tmp_path, BASE, override)
    assert repr(override) in message and "run.steps=10" in message


def test_an_override_inside_a_value_is_refused(tmp_path: Path) -> None:
    message = refusal(tmp_path, BASE, "target.name=3")
    assert "target" in message and "not a table" in message


def test_an_override_with_an_unknown_key_is_refused(tmp_path: Path) -> None:
    assert "'run.stepz'" in refusal(tmp_path, BASE, "run.stepz=3")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "gone.toml", tmp_path):
        with pytest.raises(ValueError, match="cannot be read") as caught:
            read_recipe(path)
        assert str(path) in str(caught.value)
    assert "cannot be read" in refusal(tmp_path, "target = \n")
    (tmp_path / "recipe.toml").write_bytes(b'target = "\xff"\n')
    with pytest.raises(ValueError, match="cannot be read"):
        read_recipe(tmp_path / "recipe.toml")


def test_a_mark_of_byte_order_is_no_setting(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_bytes(b"\xef\xbb\xbf" + BASE.replace("\n", "\r\n").encode())
    assert read_recipe(path) == Recipe(target="toy")


def test_a_recipe_made_in_python_is_checked_too() -> None:
    with pytest.raises(ValueError, match=r"run\.batch_size"):
        Recipe("toy", run=RunRecipe(batch_size=5, num_shards=2))
