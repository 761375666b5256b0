"""`release check`: a sound folder passes, and each way of breaking one is found by the check that
is meant for it."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.pair_folders import edit_json, edit_weights, truncate, write_drafter

from flashmap.release import fresh
from flashmap.release.build import build_release
from flashmap.release.check import (
    CHECKS,
    FAILED,
    SKIPPED,
    Finding,
    ReleaseFolder,
    check_release,
)
from flashmap.release.contents import folder_files
from flashmap.release.errors import ReleaseError
from flashmap.release.fresh import run_fresh
from flashmap.release.remote_code import RELATIVE, code_digest, read_closure, sibling_names, stamped


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("release")
    return build_release(write_drafter(folder / "source"), folder / "out").folder


def append(name: str, text: str) -> Callable[[Path], Any]:
    def change(folder: Path) -> None:
        with (folder / name).open("a") as file:
            file.write(text)

    return change


def fill(value: float) -> Callable[[Path], Any]:
    def change(folder: Path) -> None:
        edit_weights(folder, lambda tensors: tensors["head.bias"].fill_(value))

    return change


BROKEN: dict[str, tuple[Callable[[Path], Any], set[str]]] = {
    "licence missing": (lambda f: (f / "LICENSE").unlink(), {"files", "record"}),
    "weights missing": (
        lambda f: (f / "model.safetensors").unlink(),
        {"files", "weights", "finite", "stray", "record"},
    ),
    "weights truncated": (
        lambda f: truncate(f / "model.safetensors"),
        {"weights", "finite", "record"},
    ),
    "no taps": (
        lambda f: edit_json(f / "config.json", target_layer_ids=None),
        {"config", "remote-code", "weights", "record"},
    ),
    "no auto_map": (lambda f: edit_json(f / "config.json", auto_map=None), {"config", "record"}),
    "first stage only": (
        lambda f: edit_json(f / "config.json", flow_map=False),
        {"config", "record"},
    ),
    "helper missing": (
        lambda f: (f / "layers_flashmap.py").unlink(),
        {"remote-code", "stray", "record"},
    ),
    "dotted import": (
        append("layers_flashmap.py", '\n_ = """\nfrom .utils.x import y\n"""\n'),
        {"remote-code", "stray", "record"},
    ),
    "helper edited": (append("layers_flashmap.py", "\n# a hot fix\n"), {"code-digest", "record"}),
    "stamp edited": (
        lambda f: edit_json(f / "config.json", code_digest="0" * 64),
        {"code-digest", "record"},
    ),
    "wider than its weights": (
        lambda f: edit_json(f / "config.json", intermediate_size=32),
        {"weights", "record"},
    ),
    "tensor missing": (
        lambda f: edit_weights(f, lambda tensors: tensors.pop("fc.weight")),
        {"weights", "record"},
    ),
    "tensor unknown": (
        lambda f: edit_weights(f, lambda tensors: tensors.update(x=torch.zeros(1))),
        {"weights", "record"},
    ),
    "NaN": (fill(float("nan")), {"finite", "record"}),
    "infinite": (fill(float("inf")), {"finite", "record"}),
    "stray weights": (
        lambda f: shutil.copy(f / "model.safetensors", f / "adapter.safetensors"),
        {"stray", "record"},
    ),
    "folder inside": (lambda f: (f / "notes").mkdir(), {"stray", "record"}),
    "symlink": (
        lambda f: (f / "LICENSE").rename(f.parent / "L") and (f / "LICENSE").symlink_to("../L"),
        {"stray", "record"},
    ),
    "broken symlink": (lambda f: (f / "gone.py").symlink_to("nowhere"), {"stray", "record"}),
    "pipe": (lambda f: os.mkfifo(f / "pipe.safetensors"), {"stray", "record"}),
    "code is a pipe": (
        lambda f: [(f / "layers_flashmap.py").unlink(), os.mkfifo(f / "layers_flashmap.py")],
        {"remote-code", "stray", "record"},
    ),
    "code is no text": (
        lambda f: (f / "layers_flashmap.py").write_bytes(b"\xff\xfe"),
        {"remote-code", "stray", "record"},
    ),
    "index of numbers": (
        lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": 5}}'),
        {"files", "weights", "finite", "stray", "record"},
    ),
    "record is a pipe": (
        lambda f: [(f / "release.json").unlink(), os.mkfifo(f / "release.json")],
        {"files", "stray", "record"},
    ),
    "configuration is a pipe": (
        lambda f: [(f / "config.json").unlink(), os.mkfifo(f / "config.json")],
        {"files", "config", "remote-code", "weights", "stray", "record"},
    ),
    "record of a list": (
        lambda f: (f / "release.json").write_text('{"files": ["README.md"]}'),
        {"record"},
    ),
    "unrecorded file": (
        lambda f: edit_json(
            f / "release.json",
            files={n: r for n, r in folder_files(f).items() if n != "LICENSE"},
        ),
        {"record"},
    ),
    "bottomless configuration": (
        lambda f: (f / "config.json").write_text("[" * 100_000),
        {"config", "remote-code", "weights", "record"},
    ),
    "no record": (lambda f: (f / "release.json").unlink(), {"files", "record"}),
}


def test_a_sound_folder_passes_everything(sound: Path) -> None:
    findings = check_release(sound)
    assert {finding.check for finding in findings} == {*CHECKS, "code-digest"}
    assert [finding for finding in findings if finding.status == FAILED] == []


@pytest.mark.parametrize("case", BROKEN)
def test_each_break_is_found(
    case: str, sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(CHECKS, "fresh-load")  # seconds a run; tested below
    folder = tmp_path / "out"
    shutil.copytree(sound, folder)
    break_it, expected = BROKEN[case]
    break_it(folder)
    failed = [finding for finding in check_release(folder) if finding.status == FAILED]
    assert {finding.check for finding in failed} == expected
    assert all(finding.found and finding.expected and finding.fix for finding in failed)


@pytest.mark.parametrize(
    ("case", "word"),
    [
        ("no auto_map", "fresh_load.py"),
        ("helper missing", "layers_flashmap.py"),
        ("tensor missing", "fc.weight"),
        ("NaN", "head.bias"),
    ],
)
def test_the_fresh_process_finds_it_too(case: str, word: str, sound: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    shutil.copytree(sound, folder)
    BROKEN[case][0](folder)
    try:
        found = [finding.found for finding in CHECKS["fresh-load"](ReleaseFolder(folder))]
    except ReleaseError as error:
        found = [error.found]
    assert len(found) == 1 and word in found[0]


@pytest.mark.parametrize("name", ["layers_flashmap.py", "README.md"])
def test_tampered_code_is_not_run(name: str, sound: Path, tmp_path: Path) -> None:
    folder, trace = tmp_path / "out", tmp_path / "it-ran"
    shutil.copytree(sound, folder)
    append(name, f"\nopen({str(trace)!r}, 'w')\n")(folder)
    last = check_release(folder)[-1]
    assert (last.check, last.status) == ("fresh-load", SKIPPED) and "record" in last.found
    assert not trace.exists()


def test_what_goes_wrong_in_a_check_is_its_finding(
    sound: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(release: ReleaseFolder) -> Iterator[Finding]:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr("flashmap.release.check.CHECKS", {"odd": check})
    (finding,) = check_release(sound)
    assert finding.status == FAILED and "ZeroDivisionError: by zero" in finding.found


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("code is no text", "layers_flashmap.py"),
        ("broken symlink", "gone.py (symlink)"),
        ("pipe", "pipe.safetensors (special file)"),
        ("index of numbers", "model.safetensors.index.json"),
    ],
)
def test_a_finding_names_the_file(
    case: str, name: str, sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(CHECKS, "fresh-load")
    shutil.copytree(sound, tmp_path / "out")
    BROKEN[case][0](tmp_path / "out")
    assert any(name in row.found for row in check_release(tmp_path / "out"))


def test_no_folder_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(ReleaseError) as caught:
        check_release(tmp_path / "gone")
    assert "flashmap release build" in caught.value.fix


# --- remote code


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("from .a_flashmap import x", ["a_flashmap.py"]),
        ("    from .a_flashmap import x", ["a_flashmap.py"]),
        ("import torch\nfrom torch import nn", []),
        ("# see from the .a file import", []),
    ],
)
def test_what_the_loader_takes_for_a_sibling(line: str, names: list[str]) -> None:
    assert sibling_names(line, "x.py") == names


@pytest.mark.parametrize(
    "line",
    [
        "from . import a",
        "from .. import a",
        "from .a.b import c",
        "from ..a import b",
        "import .a.b",
    ],
)
def test_other_relative_imports_are_refused(line: str) -> None:
    with pytest.raises(ReleaseError) as caught:
        sibling_names(line, "x.py")
    assert line in caught.value.found


def test_the_expression_agrees_with_transformers(sound: Path) -> None:
    from transformers.dynamic_module_utils import get_relative_imports

    for path in sound.glob("*.py"):
        theirs = {f"{name}.py" for name in get_relative_imports(path)}
        assert set(sibling_names(path.read_text(), path.name)) == theirs
        assert RELATIVE.groups == 2


def test_a_helper_of_a_helper_has_to_be_named(tmp_path: Path) -> None:
    (tmp_path / "modeling_flashmap.py").write_text(
        "from .configuration_flashmap import a\nfrom .b import c\n"
    )
    (tmp_path / "configuration_flashmap.py").write_text('CODE_DIGEST = "source tree"\n')
    (tmp_path / "b.py").write_text("from .d import e\n")
    (tmp_path / "d.py").write_text("e = 1\n")
    with pytest.raises(ReleaseError) as caught:
        read_closure(tmp_path)
    assert "d.py" in caught.value.found


def test_the_digest_sees_every_byte_but_the_stamp() -> None:
    files = {"configuration_flashmap.py": b'A = 1\nCODE_DIGEST = "x"\nB = 2\n', "z.py": b"y = 1\n"}
    digest = code_digest(files)
    assert code_digest(stamped(files)) == code_digest(dict(reversed(files.items()))) == digest
    assert digest.encode() in stamped(files)["configuration_flashmap.py"]
    assert code_digest({**files, "z.py": b"y = 2\n"}) != digest
    assert code_digest({**files, "w.py": b""}) != digest
    for text in (b"A = 1\n", b'CODE_DIGEST = "x"\nCODE_DIGEST = "y"\n'):
        with pytest.raises(ReleaseError):
            stamped({"configuration_flashmap.py": text})


# --- the fresh process


def test_a_fresh_process_is_a_stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "json.py").write_text("raise SystemExit('a neighbour was imported')\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import json, os, sys\n"
        "try:\n    import flashmap.pair\n    found = True\nexcept ImportError:\n    found = False\n"
        "print('chatter')\n"
        "print(json.dumps({'found': found, 'cwd': os.getcwd(), 'args': sys.argv[1:],"
        " 'offline': os.environ['HF_HUB_OFFLINE'], 'path': os.environ.get('PYTHONPATH')}))\n"
    )
    (seen,) = run_fresh(script, ["a b"])
    assert seen["found"] is False and seen["args"] == ["a b"]
    assert seen["offline"] == "1" and seen["path"] is None
    assert not Path(seen["cwd"]).exists()  # its folder is gone with it


def test_a_failing_script_is_one_error(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('{\"a\": 1}')\nraise KeyError('the reason')\n")
    events = run_fresh(script, [])
    assert next(events) == {"a": 1}
    with pytest.raises(ReleaseError, match="the reason"):
        next(events)


def test_a_hanging_script_is_stopped(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import time\ntime.sleep(600)\n")
    with pytest.raises(ReleaseError):
        list(run_fresh(script, [], timeout=1.0))
    assert fresh.BOOTSTRAP.is_file()
