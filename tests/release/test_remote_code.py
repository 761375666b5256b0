"""The loader's view of the remote code, its digest, and the process that loads it as a stranger."""

import resource
from pathlib import Path

import pytest

from flashmap.release import fresh
from flashmap.release.contents import GENERATE
from flashmap.release.errors import ReleaseError
from flashmap.release.fresh import run_fresh
from flashmap.release.remote_code import (
    RELATIVE,
    code_digest,
    read_closure,
    sibling_names,
    stamped,
)

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
    assert code_digest({**files, "w.txt": b"no code"}) == digest
    told = [code_digest({**files, GENERATE: text}) for text in (
        b'REPO_ID, TAG = "me/it", "v1"\n', b'REPO_ID, TAG = "", ""\n', b'REPO_ID, TAG = x, ""\n',
    )]  # fmt: skip
    assert told[0] == told[1] != told[2]
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


def test_last_words_need_no_room_on_a_disk(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("raise OSError('no room')\n")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # what the process inherits
    try:
        with pytest.raises(ReleaseError, match="status 1: OSError: no room"):
            list(run_fresh(script, []))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
