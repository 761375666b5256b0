"""`release check` as a whole: a sound folder passes in a stranger's process, whatever goes wrong is
a finding, nothing untrusted runs. How each check finds its damage: test_damage.py."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.pair_folders import edit_json, edit_weights, write_target
from support.releases import MAX_NEW_TOKENS, PROMPTS, check_statically, failures, write_measurement

from flashmap import load_pair
from flashmap.modeling.modeling_flashmap import FlashMapDraftModel
from flashmap.prompts import Prompt
from flashmap.release import environments, loads
from flashmap.release.acceptance import standard_error
from flashmap.release.check import CHECKS, FAILED, OK, SKIPPED, Finding, Wanted, check_release
from flashmap.release.checking import Check, ReleaseFolder, run_check
from flashmap.release.contents import refresh_record
from flashmap.release.errors import ReleaseError
from flashmap.release.remote_code import code_digest, stamped
from flashmap.training.evaluation import evaluate_walks
from flashmap.training.recipe import EvaluationRecipe
from flashmap.training.setup import wrap_target


def status_of(findings: list[Finding], name: str) -> str:
    return next(finding.status for finding in findings if finding.check == name)


def test_a_sound_folder_passes_everything(sound: Path) -> None:
    findings = check_release(sound)
    expected = [name for name, entry in CHECKS.items() if entry.theme != "against_target"]
    assert [finding.check for finding in findings] == expected
    assert {finding.status for finding in findings} == {OK}


def reported(**changes: Any) -> dict[str, Any]:
    kinds = ("missing", "unexpected", "mismatched", "on_meta", "not_finite", "resaved")
    whole = {"class": "M", "transformers": "9.9", "parameters": 3, "golden": 0.0}
    return {**whole, **{kind: [] for kind in kinds}, **changes}


@pytest.mark.parametrize(
    ("changes", "name", "word"),
    [
        ({"missing": ["fc.weight"]}, "load", "missing: fc.weight"),
        ({"unexpected": ["x"]}, "load", "unexpected: x"),
        ({"mismatched": ["y"]}, "load", "mismatched: y"),
        ({"on_meta": ["z"]}, "load", "on_meta: z"),
        ({"not_finite": ["z"]}, "load", "not_finite: z"),
        ({"golden": 2e-4}, "golden", "0.0002"),
        ({"golden": float("nan")}, "golden", "nan"),
        ({"golden": None}, "golden", "None"),
        ({"resaved": ["config.json"]}, "resave", "config.json"),
    ],
)
def test_what_a_fresh_process_reports_is_judged(
    changes: dict[str, Any], name: str, word: str, sound: Path
) -> None:
    entries = [entry for entry in CHECKS.values() if entry.theme == "loading"]
    for others in ([], [reported()]):  # the installed transformers, and another one
        release = ReleaseFolder(sound)
        release.reports = [*others, reported(**changes)]
        found: dict[str, Finding] = {}
        for entry in entries:
            found[entry.name] = run_check(entry, release, found)
        assert failures(list(found.values())).keys() == {name}
        assert word in found[name].found and "9.9" in found[name].found


def test_other_numbers_and_a_crash_show_in_a_fresh_process(copy: Path) -> None:
    edit_weights(copy, lambda tensors: tensors["head.bias"].add_(0.01))
    refresh_record(copy, ["model.safetensors"])
    found = failures(check_release(copy))
    assert found.keys() == {"golden"} and "off by" in found["golden"]
    release = ReleaseFolder(copy)
    code = {**release.code, **release.custom_generate}
    code["modeling_flashmap.py"] += b"\nraise RuntimeError('not on my machine')\n"
    for name, content in stamped(code).items():
        (copy / name).write_bytes(content)
    for name in ("config.json", "release.json"):
        edit_json(copy / name, code_digest=code_digest(code))
    refresh_record(copy, [*code, "config.json"])
    found = failures(check_release(copy))
    assert found.keys() == {"load"} and "not on my machine" in found["load"]


def test_other_versions_load_in_environments_of_their_own(
    sound: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    @contextmanager
    def environment(version: str) -> Iterator[Path]:
        asked.append(version)
        yield Path(sys.executable)

    monkeypatch.setattr(loads, "environment_with", environment)
    monkeypatch.setattr(loads, "run_fresh", lambda *a, python=None: iter([{"python": python}]))
    reports = list(loads.load_reports(sound, ["4.57.6", "5.1"]))
    assert asked == ["4.57.6", "5.1"]
    assert [report["python"] for report in reports] == [None, *[Path(sys.executable)] * 2]


@pytest.mark.slow
def test_an_environment_borrows_all_but_transformers() -> None:
    with environments.environment_with("4.57.6") as python:
        code = "import torch, transformers; print(torch.__version__, transformers.__version__)"
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [torch.__version__, "4.57.6"] and not python.exists()


def test_a_version_that_cannot_be_had_is_one_finding(
    sound: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(loads, "run_fresh", lambda *a, python=None: iter([reported()]))
    (found,) = failures(check_release(sound, Wanted(transformers=("0.0.1",)))).values()
    assert "transformers 0.0.1 cannot be installed: ERROR: No matching distribution" in found


@pytest.mark.parametrize("name", ["layers_flashmap.py", "LICENSE"])
def test_tampered_code_is_not_run(name: str, copy: Path, tmp_path: Path) -> None:
    trace = tmp_path / "it-ran"
    with (copy / name).open("a") as file:
        file.write(f"\nopen({str(trace)!r}, 'w')\n")
    findings = check_release(copy)
    assert status_of(findings, "load") == SKIPPED and not trace.exists()


def test_what_goes_wrong_in_a_check_is_its_finding(sound: Path) -> None:
    def crash(release: ReleaseFolder) -> str:
        raise ZeroDivisionError("by zero")

    entry = Check("odd", crash, frozenset(), lambda wanted: True)
    finding = run_check(entry, ReleaseFolder(sound), {})
    assert finding.status == FAILED and "ZeroDivisionError: by zero" in finding.found


def test_a_file_that_another_check_owns_is_not_told_twice(copy: Path) -> None:
    (copy / "config.json").write_text("{")
    findings = check_statically(copy)
    assert failures(findings).keys() == {"config"}
    skipped = {finding.check for finding in findings if finding.status == SKIPPED}
    assert {"auto-map", "grids", "weights", "card-current"} <= skipped


def test_no_folder_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(ReleaseError) as caught:
        check_release(tmp_path / "gone")
    assert "flashmap release build" in caught.value.fix


# --- against the target


@pytest.fixture(scope="module")
def measured(sound: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target, and a release whose acceptance was counted along the target's own texts."""
    root = tmp_path_factory.mktemp("measured")
    target, release = write_target(root / "target"), root / "release"
    shutil.copytree(sound, release)
    model, draft, tokenizer = load_pair(target, release)
    assert isinstance(draft, FlashMapDraftModel)
    prompts = [Prompt(text, "ab"[index % 2]) for index, text in enumerate(PROMPTS)]
    recipe = EvaluationRecipe(max_new_tokens=MAX_NEW_TOKENS, temperatures=(0.0,))
    walks = evaluate_walks(draft, wrap_target(model, draft.config), tokenizer, prompts, recipe)
    write_measurement(release, walk=walks)
    return target, release


def against(target: Path, release: Path, prompts: int | None = None) -> dict[str, Finding]:
    """The checks against the target alone."""
    wanted = Wanted(str(target), acceptance=True, prompts=prompts)
    folder, found = ReleaseFolder(release, wanted), {}
    for entry in CHECKS.values():
        if entry.theme == "against_target":
            found[entry.name] = run_check(entry, folder, found)
    return found


def test_the_stated_acceptance_is_reproduced(measured: tuple[Path, Path]) -> None:
    found = against(*measured)
    assert {name: finding.status for name, finding in found.items()} == {
        "target-match": OK,
        "acceptance": OK,
    }
    assert f"over {len(PROMPTS)} of {len(PROMPTS)} prompts" in found["acceptance"].found
    few = against(*measured, prompts=3)["acceptance"]
    assert few.status == OK and f"over 3 of {len(PROMPTS)} prompts" in few.found


def test_another_acceptance_is_a_finding(measured: tuple[Path, Path], tmp_path: Path) -> None:
    target, release = measured
    copy = Path(shutil.copytree(release, tmp_path / "copy"))
    path = copy / "eval/acceptance.json"
    document = json.loads(path.read_text())
    document["walk"][0]["overall"]["acceptance_length_without_looped"] += 0.5
    path.write_text(json.dumps(document))
    found = against(target, copy)["acceptance"]
    assert found.status == FAILED and "in eval/acceptance.json" in found.found


def test_another_target_is_a_finding(measured: tuple[Path, Path], tmp_path: Path) -> None:
    target, release = measured
    copy = Path(shutil.copytree(release, tmp_path / "copy"))
    edit_json(copy / "config.json", num_target_layers=99)
    found = against(target, copy)
    assert found["target-match"].status == FAILED and found["acceptance"].status == SKIPPED
    assert "99" in found["target-match"].found
    edit_json(copy / "config.json", num_target_layers=3, draft_vocab_size=50)
    edit_json(copy / "config.json", target_vocab_hash="0" * 64)
    assert "vocabulary" in against(target, copy)["target-match"].found


def test_the_standard_error_is_that_of_resampled_texts() -> None:
    generator = torch.Generator().manual_seed(0)
    texts = [
        torch.randint(1, 5, (int(n),), generator=generator).tolist()
        for n in torch.randint(5, 40, (50,), generator=generator)
    ]
    means = []
    for _ in range(4000):
        drawn = [texts[int(i)] for i in torch.randint(50, (50,), generator=generator)]
        means.append(sum(map(sum, drawn)) / sum(map(len, drawn)))
    assert standard_error(texts) == pytest.approx(float(torch.tensor(means).std()), rel=0.1)
