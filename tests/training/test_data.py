"""Making documents of the target's own answers: what is asked, kept, made again, and reported."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save
from support import pair_folders, toys
from support.training import one_thread as in_one_thread

from flashmap.files import only_writer
from flashmap.training import data as module
from flashmap.training.data import DataMaker
from flashmap.training.documents import read_about, read_documents
from flashmap.training.prompts import make_prompts
from flashmap.training.recipe import DataRecipe, EvaluationRecipe, Recipe
from flashmap.training.report import report_data

TOKENIZER = pair_folders.tokenizer()
NUM_PROMPTS, BATCH = 26, 3


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with in_one_thread():
        yield


@pytest.fixture(autouse=True)
def frozen_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    # Files say how many seconds they took, which is no part of what they hold.
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 0.0))


@pytest.fixture(scope="module")
def target() -> Any:
    model = toys.llama(vocab_size=pair_folders.ROWS, eos_token_id=0, pad_token_id=0)
    return model.requires_grad_(False)


def make_recipe(folder: Path, prompts: str = "", seed: int = 0, **data: Any) -> Recipe:
    fields: dict[str, Any] = {
        "folder": str(folder), "num_prompts": NUM_PROMPTS, "max_prompt_tokens": 260,
        "max_new_tokens": 12, "batch_size": BATCH, "held_out_share": 0.3,
    }  # fmt: skip
    return Recipe(
        "toy",
        seed=seed,
        data=DataRecipe(**{**fields, **data}),
        evaluation=EvaluationRecipe(prompts=prompts),
    )


def make(recipe: Recipe, target: Any) -> Path:
    DataMaker(recipe, target, TOKENIZER).run()
    return Path(recipe.data.folder)


@pytest.fixture(scope="module")
def whole(target: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of one uninterrupted run."""
    with in_one_thread(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 0.0))
        return make(make_recipe(tmp_path_factory.mktemp("data") / "whole"), target)


def files_of(folder: Path) -> dict[str, Any]:
    """What every file holds; the tensors of documents as bytes, and what is said about them, which
    safetensors writes in any order."""
    return {
        path.name: path.read_bytes() if path.suffix != ".safetensors" else contents(path)
        for path in folder.iterdir()
    }


def contents(path: Path) -> tuple[bytes, dict[str, str]]:
    return save(load_file(path)), read_about(path)


def requests_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]


# --- requests and answers


def test_every_short_enough_request_becomes_a_document(whole: Path) -> None:
    requests, documents = requests_of(whole), read_documents(whole)
    assert len(requests) == NUM_PROMPTS
    wanted = [tuple(encode(row["text"])) for row in requests if len(encode(row["text"])) <= 260]
    assert len(wanted) > 10
    prompts = [tuple(prompt) for prompt, _ in split(documents)]
    assert len(prompts) > 0.8 * len(wanted), "few are too short to learn from"
    assert set(prompts) <= set(wanted) and len(prompts) == len(set(prompts))
    by_prompt = {tuple(encode(row["text"])): row for row in requests}
    for index, prompt in enumerate(prompts):
        row = by_prompt[prompt]
        assert bool(documents.held_out[index]) == row["held_out"]
        assert float(documents.temperatures[index]) == pytest.approx(row["temperature"])
    assert 0 < int(documents.held_out.sum()) < len(documents)
    assert {row["temperature"] for row in requests} == {0.0, 0.7, 1.0}


def encode(text: str) -> list[int]:
    turns = [{"role": "user", "content": text}]
    shell = TOKENIZER.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    ids: list[int] = TOKENIZER(shell, add_special_tokens=False)["input_ids"]
    return ids


def split(documents: Any) -> list[tuple[list[int], list[int]]]:
    tokens, offsets = documents.tokens.tolist(), documents.offsets.tolist()
    lengths = documents.prompt_lengths.tolist()
    return [
        (tokens[start : start + size], tokens[start + size : end])
        for start, end, size in zip(offsets, offsets[1:], lengths, strict=False)
    ]


def test_cold_answers_are_what_the_target_says(whole: Path, target: Any) -> None:
    documents = read_documents(whole)
    cold = documents.select(documents.temperatures == 0.0)
    assert len(cold) > 3
    for prompt, answer in split(cold):
        said = toys.greedy(target, torch.tensor([prompt]), 12) if 0 not in answer else None
        if said is not None:
            assert answer == said[: len(answer)]
    assert all(len(answer) <= 12 and 0 not in answer[:-1] for _, answer in split(documents))


def test_the_last_file_is_made_again_as_it_was(whole: Path, target: Any, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    shutil.copytree(whole, folder)
    before = files_of(folder)
    paths = sorted(folder.glob("documents-*"))
    assert len(paths) >= 2
    paths[-1].unlink()
    (folder / f".{paths[-1].name}.part").write_bytes(b"half")
    times = {path: path.stat().st_mtime_ns for path in paths[:-1]}
    make(make_recipe(folder), target)
    after = files_of(folder)
    assert set(after) == set(before)
    assert {name for name in before if after[name] != before[name]} <= {"recipe.json"}
    assert times == {path: path.stat().st_mtime_ns for path in times}


def test_a_run_that_is_killed_anywhere_ends_alike(whole: Path, target: Any, tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path / "data")
    asked = 0

    class KilledError(Exception):
        pass

    for patience in range(1, 9):
        calls = 0

        def progress(stage: str, done: int, total: int, patience: int = patience) -> None:
            nonlocal calls, asked
            calls, asked = calls + 1, asked + 1
            if calls == patience:
                raise KilledError

        try:
            DataMaker(recipe, target, TOKENIZER, progress).run()
            break
        except KilledError:
            continue
    make(recipe, target)
    assert asked > 3
    documents = [name for name in files_of(whole) if name.startswith("documents-")]
    after = files_of(tmp_path / "data")
    assert all(after[name] == files_of(whole)[name] for name in [*documents, "requests.jsonl"])


@pytest.mark.parametrize("changes", [{"max_new_tokens": 11}, {"num_prompts": 30}, {"seed": 1}])
def test_another_recipe_in_the_same_folder_is_refused(
    changes: dict[str, Any], whole: Path, target: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    shutil.copytree(whole, folder)
    before = files_of(folder)
    with pytest.raises(ValueError) as caught:
        make(make_recipe(folder, **changes), target)
    message = str(caught.value)
    assert str(folder) in message and "another recipe" in message and "data.folder" in message
    assert files_of(folder) == before


def test_a_batch_size_that_changes_halfway_gives_each_request_once(
    whole: Path, target: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    shutil.copytree(whole, folder)
    for path in sorted(folder.glob("documents-*"))[1:]:
        path.unlink()
    try:
        make(make_recipe(folder, batch_size=2 * BATCH), target)
    except ValueError:
        return
    expected = {tuple(prompt) for prompt, _ in split(read_documents(whole))}
    found = [tuple(prompt) for prompt, _ in split(read_documents(folder))]
    assert len(found) == len(set(found)), "some were answered twice"
    assert len(expected - set(found)) <= 2, "some were left out"


def test_an_evaluation_prompt_is_never_a_request(target: Any, tmp_path: Path) -> None:
    made = make_prompts(NUM_PROMPTS, 0, 0.3)
    asked = [made[0].text, made[3].text.upper() + "!!", "something else"]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text, "domain": "d"}) + "\n" for text in asked))
    folder = make(make_recipe(tmp_path / "data", str(path), max_new_tokens=2), target)
    texts = {row["text"] for row in requests_of(folder)}
    assert len(texts) == NUM_PROMPTS - 2
    assert texts == {prompt.text for prompt in made} - {made[0].text, made[3].text}


def test_answers_depend_on_the_seed(whole: Path, target: Any, tmp_path: Path) -> None:
    folder = make(make_recipe(tmp_path / "data", seed=3), target)
    assert requests_of(folder) != requests_of(whole)


class OwnPrompts:
    """Decodes to scripted users' messages instead of the target's."""

    max_prompt, batch_size = 64, BATCH

    def __init__(self, answers: list[list[int]]) -> None:
        self.answers, self.asked = answers, list[list[int]]()

    def run(self, prompts: Any, temperatures: Any, seed: int, *rest: Any) -> list[list[int]]:
        self.asked += prompts
        place = len(self.asked) - len(prompts)
        return [self.answers[(place + row) % len(self.answers)] for row in range(len(prompts))]


def test_own_prompts_are_kept_if_they_are_requests(target: Any, tmp_path: Path) -> None:
    def ids(text: str) -> list[int]:
        found: list[int] = TOKENIZER(text, add_special_tokens=False)["input_ids"]
        return found

    good = ["What is a bee?", "How far is the moon, and why?"]
    opening = "Tell me something about trees please, and "
    said = [*good, good[0], "ab" * 12, "x", "long " * 40, opening + "one", opening + "two"]
    answers = [[*ids(text), 0] for text in said]
    answers.insert(3, ids("no end of it"))
    maker = DataMaker(make_recipe(tmp_path, num_own_prompts=9), target, TOKENIZER)
    decoder = OwnPrompts(answers)
    maker._decoder = lambda width: decoder  # type: ignore[method-assign,assignment,return-value]
    texts = [row["text"] for row in maker._own_prompts()]
    assert texts == [*good, opening + "one"]
    # The target is given a conversation up to where the user begins.
    assert TOKENIZER.decode(decoder.asked[0]) == "<|user|>"
    assert len(decoder.asked) <= 4 * 9 + 5 * BATCH


def test_own_prompts_and_passages_are_stages_of_a_run(target: Any, tmp_path: Path) -> None:
    recipe = make_recipe(
        tmp_path / "data", num_prompts=6, num_own_prompts=2, num_passages=6, max_new_tokens=8
    )
    stages: list[str] = []
    DataMaker(recipe, target, TOKENIZER, lambda stage, done, total: stages.append(stage)).run()
    assert {"passages", "own prompts", "answers"} <= set(stages)
    own = [json.loads(line) for line in (tmp_path / "data/own_prompts.jsonl").open()]
    texts = [row["text"] for row in requests_of(tmp_path / "data") if row["domain"] == "own"]
    assert sorted(row["text"] for row in own) == sorted(texts)
    assert len(requests_of(tmp_path / "data")) == 6 + len(own)


def test_own_prompts_need_a_chat_template(target: Any, tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path / "data", num_own_prompts=2)
    with pytest.raises(ValueError, match=r"data\.num_own_prompts.*chat template"):
        DataMaker(recipe, target, pair_folders.tokenizer(template=None)).run()


# --- the report


def test_the_report_adds_up(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    shutil.copytree(whole, folder)
    found, documents = report_data(folder, "toy", pair_folders.ROWS), read_documents(folder)
    assert json.loads((folder / "report.json").read_text()) == found
    assert (folder / "lengths.png").stat().st_size > 1000
    assert found["documents"] == len(documents) == sum(found["temperatures"].values())
    assert found["held_out"] == int(documents.held_out.sum())
    answers = [len(answer) for _, answer in split(documents)]
    assert found["answer_tokens"] == sum(answers)
    assert found["tokens"] == len(documents.tokens)
    assert found["answer_tokens_mean"] == pytest.approx(sum(answers) / len(answers))
    assert found["answer_tokens_quantiles"]["1"] == max(answers)
    asked = sum(len(encode(row["text"])) <= 260 for row in requests_of(folder))
    assert found["documents"] + found["duplicates"] + found["too_short"] == asked
    looped = sum(int(read_about(path)["looped"]) for path in folder.glob("documents-*"))
    assert found["looped_share"] == pytest.approx(looped / asked)


@pytest.mark.parametrize("content", ['{"text"', "\xff"])
def test_a_damaged_stage_is_named(content: str, target: Any, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / "requests.jsonl"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match="is damaged") as caught:
        make(make_recipe(tmp_path / "data"), target)
    assert str(path) in str(caught.value)


def test_two_at_once_are_refused(target: Any, tmp_path: Path) -> None:
    with only_writer(tmp_path / "data" / "recipe.json"):
        with pytest.raises(ValueError, match="another process"):
            make(make_recipe(tmp_path / "data"), target)
        assert [path.name for path in (tmp_path / "data").iterdir()] == [".recipe.json.lock"]


def test_a_folder_whose_documents_were_all_sifted_out_says_so(target: Any, tmp_path: Path) -> None:
    folder = make(make_recipe(tmp_path / "data", max_new_tokens=1), target)
    with pytest.raises(ValueError, match=str(folder)):
        report_data(folder, "toy", pair_folders.ROWS)


def test_no_request_that_is_short_enough_says_so(target: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_prompt_tokens"):
        make(make_recipe(tmp_path / "data", max_prompt_tokens=2), target)
