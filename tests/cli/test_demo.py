"""`flashmap demo` on a tiny pair: the whole path, in a process that has no flashmap; and what it
says when they part."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.commands import Run

from flashmap import embedded, references
from flashmap.cli import demo as demo_module


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
        ("bfloat16", 0.5, 0, "up to token 4, where the target's two best tokens are tied"),
        ("bfloat16", 7.0, 0, "where they are not tied: please report this"),
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
    assert "Traceback" not in ended.err


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
