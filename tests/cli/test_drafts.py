"""How commands are told to draft: it reaches decoding, is told again, and leaves the text alone."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.commands import Run, assert_one_message, refs

import flashmap
from flashmap.modeling import select_flashmap

DRAFTS = [
    ([], {"num_draws": 1, "num_candidates": 1, "adaptive": False}),
    (["--num-candidates", 3], {"num_candidates": 3}),
    (["--num-candidates", "auto", "--adaptive"], {"num_candidates": "auto", "adaptive": True}),
    (["--num-draws", "auto", "--no-adaptive"], {"num_draws": "auto", "adaptive": False}),
]


def spied(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Notes what every call of `spec_generate` is asked for."""
    asked: list[dict[str, Any]] = []
    honest = flashmap.FlashMapDraftModel.spec_generate

    def spec_generate(*args: Any, **settings: Any) -> Any:
        asked.append(settings)
        return honest(*args, **settings)

    monkeypatch.setattr(flashmap.FlashMapDraftModel, "spec_generate", spec_generate)
    return asked


@pytest.mark.parametrize(("flags", "expected"), DRAFTS)
def test_generate_drafts_as_it_is_told_and_the_text_stays(
    flags: list[object], expected: dict[str, Any], pair: Path, run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    command = ["generate", "hi", *refs(pair), "--max-new-tokens", 12, "--json"]
    plain = json.loads(run(*command).out)["token_ids"]
    asked = spied(monkeypatch)
    assert json.loads(run(*command, *flags).out)["token_ids"] == plain
    assert [{name: one[name] for name in expected} for one in asked] == [expected]


def test_contradictory_drafts_are_one_message(pair: Path, run: Run) -> None:
    command = ["generate", "hi", *refs(pair), "--num-candidates", 2]
    assert_one_message(run(*command, "--temperature", 0.5), "num_candidates=2", "num_draws=2")
    assert_one_message(run(*command, "--num-draws", 2), "num_draws=2 and num_candidates=2")
    assert_one_message(run("generate", "hi", *refs(pair), "--num-draws", 0), "num_draws=0")
    command = ["generate", "hi", *refs(pair), "--top-p", 0.9, "--temperature", 0]
    assert_one_message(run(*command), "top_p=0.9", "temperature 0")


def test_the_decoding_loop_runs_the_reference_operations(
    pair: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("an operation was selected: say which in --json")

    monkeypatch.setattr(select_flashmap, "_select", fail)
    document = json.loads(run("generate", "hi", *refs(pair), "--max-new-tokens", 5, "--json").out)
    assert document["kernels"] == "reference"


def test_bench_drafts_as_it_is_told_and_says_so(
    pair: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "p.txt").write_text("one\n")
    asked = spied(monkeypatch)
    flags = ["--num-candidates", 2, "--adaptive", "--max-new-tokens", 8, "--json"]
    document = json.loads(run("bench", *refs(pair), "--prompts", tmp_path / "p.txt", *flags).out)
    expected = {"num_draws": 1, "num_candidates": 2, "adaptive": True}
    assert [{name: one[name] for name in expected} for one in asked] == [expected] * 2
    assert expected.items() <= document["protocol"].items()
    assert document["overall"]["identical"] == 1
