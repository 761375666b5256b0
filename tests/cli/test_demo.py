"""`flashmap demo` on a tiny pair: the whole path, in a process that has no flashmap; and what it
says when they part."""

import json
import resource
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.commands import Run

from flashmap import embedded, references
from flashmap.cli import demo as demo_module
from flashmap.cli.demo_script import tie_gap
from flashmap.release.contents import folder_files


@pytest.fixture
def tiny(pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(embedded, "embedded_target", lambda: pair / "target")
    monkeypatch.setattr(references, "drafter_folder", lambda ref: pair / "draft")
    return tmp_path / "flashmap" / "demo" / "smollm2-135m-flashmap"


def test_the_whole_path(tiny: Path, run: Run) -> None:
    ended = run("demo", "--max-new-tokens", 10)
    assert ended.status == 0, ended.err
    words = [
        "target",
        "build",
        "check",
        "load",
        "no flashmap",
        "tokens/s",
        "tokens a pass",
        "same words",
        "3 of 3",
    ]
    assert [word for word in words if word not in ended.out] == []
    assert all(prompt in ended.out for prompt in demo_module.PROMPTS)
    assert (tiny / "modeling_flashmap.py").is_file() and str(tiny) in ended.out
    assert "\x1b[" not in ended.out  # plain where it is no terminal


def test_json(tiny: Path, run: Run) -> None:
    ended = run("demo", "--max-new-tokens", 4, "--json")
    assert ended.status == 0, ended.err
    document = json.loads(ended.out)
    assert document["folder"] == str(tiny)
    assert [row["prompt"] for row in document["results"]] == list(demo_module.PROMPTS)
    assert all(row["same"] and row["dtype"] == "float32" for row in document["results"])
    assert document["summary"][0]["same"] == 3


def event(dtype: str, **changes: Any) -> dict[str, Any]:
    fields = {
        "event": "decoded",
        "dtype": dtype,
        "prompt": "p",
        "text": "t",
        "tokens": 8,
        "plain_tokens": 8,
        "seconds": 1.0,
        "plain_seconds": 2.0,
        "acceptance_lengths": [2, 2, 3],
        "same": True,
        "parts_at": None,
        "gap": None,
    }
    return {**fields, **changes}


@pytest.mark.parametrize(
    ("dtype", "gap", "status", "words"),
    [
        (
            "bfloat16",
            0.5,
            0,
            "up to token 4, where the target's two best tokens are within 1 ",
        ),
        ("bfloat16", 3.2, 0, "within 4 rounding steps"),
        ("bfloat16", 7.0, 0, "7.00 rounding steps apart: please report this"),
        ("float32", 0.5, 1, "Decoding must not change a token"),
    ],
)
def test_a_difference_is_told(
    dtype: str,
    gap: float,
    status: int,
    words: str,
    tiny: Path,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [event("bfloat16"), event(dtype, same=False, parts_at=3, gap=gap), event("float32")]
    monkeypatch.setattr(demo_module, "_prepare", lambda story: (tiny, tiny, 9))
    monkeypatch.setattr("flashmap.release.fresh.run_fresh", lambda script, arguments: iter(rows))
    ended = run("demo")
    assert ended.status == status
    assert words in ended.out + ended.err
    explained = dtype != "float32" and gap <= demo_module.NEAR_TIE
    assert ("within rounding of each other" in ended.out) is explained
    assert "Traceback" not in ended.err


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("best", "second", "steps"),
    [(0.0, 0.0, 0.0), (0.0, -1.0, None), (1.0, 0.0, None), (4.0, 4.0, 0.0), (-1.0, -1.5, None)],
)
def test_the_gap_is_in_rounding_steps(
    dtype: torch.dtype, best: float, second: float, steps: float | None
) -> None:
    logits = torch.tensor([[[best, second]]], dtype=dtype)
    gap = tie_gap(lambda ids: SimpleNamespace(logits=logits), torch.zeros(1, 1).long(), [])
    expected = (best - second) / torch.finfo(dtype).eps if steps is None else steps
    assert gap == pytest.approx(expected)


@pytest.mark.parametrize("damage", ["edited", "added", "no record", "a file"])
def test_a_damaged_folder_of_its_own_is_made_anew(damage: str, tiny: Path, pair: Path) -> None:
    whole = folder_files(demo_module._build(pair / "draft", tiny).folder, record=True)
    match damage:
        case "edited":
            (tiny / "README.md").write_text("?")
        case "added":
            (tiny / "x").mkdir()
        case "no record":
            (tiny / "release.json").unlink()
        case "a file":
            shutil.rmtree(tiny)
            tiny.write_text("?")
    assert demo_module._build(pair / "draft", tiny).changed
    assert folder_files(tiny, record=True) == whole


def test_a_full_disk_costs_no_folder(tiny: Path, pair: Path) -> None:
    demo_module._build(pair / "draft", tiny)
    whole = folder_files(tiny, record=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        with pytest.raises(ValueError, match=r"cannot be written .*it is as it was before"):
            demo_module._build(pair / "draft", tiny)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert folder_files(tiny, record=True) == whole


def test_a_failing_check_ends_the_demo(
    tiny: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashmap.release import check

    bad = [check.Finding("weights", check.FAILED, "nonsense", "sense", "mend it")]
    monkeypatch.setattr(check, "check_release", lambda folder: bad)
    ended = run("demo")
    assert ended.status == 1 and "weights: found nonsense; expected sense. mend it" in ended.err


def test_no_tokens_are_refused(run: Run) -> None:
    assert run("demo", "--max-new-tokens", 0).status == 1
