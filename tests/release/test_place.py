"""Where a build ends up: nothing of anybody's is lost and nothing is half-written, whether it
fails, is killed, or meets a full disk."""

import os
import shutil
import signal
from pathlib import Path

import pytest
from support.pair_folders import truncate, write_drafter
from support.releases import run_build

from flashmap.release import place
from flashmap.release.build import build_release
from flashmap.release.contents import folder_files
from flashmap.release.errors import ReleaseError


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_drafter(tmp_path / "source")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("foreign folder", "1 files that no build wrote (thesis.txt)"),
        ("file added", "1 files that no build wrote (notes/thesis.txt)"),
        ("file edited", "1 files changed since the build (README.md)"),
        ("a file", "something that no build wrote"),
        ("broken record", "that no build wrote"),
    ],
)
def test_what_no_build_wrote_is_never_replaced(
    kind: str, words: str, source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    if kind == "foreign folder":
        out.mkdir()
        (out / "thesis.txt").write_text("years of work")
    elif kind == "a file":
        out.write_text("years of work")
    else:
        build_release(source, out)
    if kind == "file added":
        (out / "notes").mkdir()
        (out / "notes" / "thesis.txt").write_text("years of work")
    if kind == "file edited":
        (out / "README.md").write_text("years of work")
    if kind == "broken record":
        (out / "release.json").write_text("[]")
    before = folder_files(out, record=True) if out.is_dir() else out.read_text()
    (source / "README.md").write_text("# Another card\n")
    with pytest.raises(ReleaseError) as caught:
        build_release(source, out)
    assert caught.value.check == "out" and str(out) in caught.value.found
    assert words in caught.value.found
    assert before == (folder_files(out, record=True) if out.is_dir() else out.read_text())
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out"}


def test_a_working_folder_is_filled_not_replaced(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.chdir(out)
    inode = out.stat().st_ino
    built = build_release(source, Path())
    assert out.stat().st_ino == inode and Path.cwd() == out == built.folder
    assert "release.json" in built.files and not build_release(source, Path()).changed
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out"}


@pytest.mark.parametrize("killed", [False, True])
def test_an_interrupted_move_leaves_an_empty_folder_empty(
    killed: bool, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, move = tmp_path / "out", shutil.move
    out.mkdir()
    monkeypatch.chdir(out)

    def fail_for_the_record(source: Path, to: Path) -> object:
        if to.name == "release.json":
            raise KeyboardInterrupt if killed else OSError(28, "No space left on device")
        return move(source, to)

    monkeypatch.setattr(shutil, "move", fail_for_the_record)
    with pytest.raises(KeyboardInterrupt if killed else ReleaseError):
        build_release(source, out)
    monkeypatch.undo()
    monkeypatch.chdir(out)
    assert list(out.iterdir()) == []
    assert build_release(source, out).changed


def test_a_failed_rename_puts_the_old_build_back(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = build_release(source, tmp_path / "out").folder
    before = folder_files(out, record=True)
    (source / "README.md").write_text("# Another card\n")
    rename = Path.rename

    def fail_for_the_new_one(self: Path, to: Path) -> Path:
        if to == out and self.name == place.NEW:
            raise OSError(5, "disk gone")
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", fail_for_the_new_one)
    with pytest.raises(ReleaseError, match="disk gone"):
        build_release(source, out)
    monkeypatch.undo()
    assert folder_files(out, record=True) == before
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out"}


KILLED = {
    "while it writes": "from flashmap.release import build\n"
    "def die(*a): os.kill(os.getpid(), 9)\nbuild.write_weights = die",
    "between the renames": "rename = Path.rename\n"
    "def die(self, to):\n"
    "    rename(self, to)\n"
    "    if to.name == 'old': os.kill(os.getpid(), 9)\n"
    "Path.rename = die",
}


@pytest.mark.parametrize("moment", KILLED)
def test_a_killed_build_is_made_good_by_the_next(moment: str, source: Path, tmp_path: Path) -> None:
    out = build_release(source, tmp_path / "out").folder
    before = folder_files(out, record=True)
    (source / "README.md").write_text("# Another card\n")
    done = run_build(f"import os\n{KILLED[moment]}", source, out)
    assert done.returncode == -signal.SIGKILL
    left = folder_files(out, record=True) if out.exists() else before
    assert left == before and (tmp_path / ".out.build").is_dir()
    # The next one fails: the earlier release is there all the same, and nothing else.
    truncate(source / "model.safetensors")
    with pytest.raises(ReleaseError), place.workplace(out) as scratch:
        build_release(source, scratch / "x")
    assert folder_files(out, record=True) == before
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out"}


def test_a_build_killed_while_it_filled_a_folder_is_made_good(source: Path, tmp_path: Path) -> None:
    out, work = tmp_path / "out", tmp_path / ".out.build"
    out.mkdir()
    work.mkdir()
    (out / "config.json").write_text("half of it")
    (work / place.FILLING).write_text('["config.json", "release.json"]')
    assert build_release(source, out).changed
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out"}


def test_one_build_at_a_time(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with place.workplace(out), pytest.raises(ValueError, match=rf"another process .*{out}"):
        build_release(source, out)
    assert build_release(source, out).changed


def test_a_full_disk_is_one_message(source: Path, tmp_path: Path) -> None:
    out = build_release(source, tmp_path / "out").folder
    before = folder_files(out, record=True)
    (source / "README.md").write_text("# Another card\n")
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (30000, 30000))"
    done = run_build(limit, source, out)
    (line,) = [line for line in done.stderr.splitlines() if line.strip()]
    assert done.returncode == 1 and line.startswith("flashmap: out: found") and str(out) in line
    assert "it is as it was before" in line and folder_files(out, record=True) == before
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out"}


@pytest.mark.parametrize("kind", ["a file's child", "no rights"])
def test_a_place_that_cannot_be_written_is_one_message(
    kind: str, source: Path, tmp_path: Path
) -> None:
    parent = tmp_path / "parent"
    if kind == "no rights":
        if os.geteuid() == 0:
            pytest.skip("root may write everywhere")
        parent.mkdir(mode=0o555)
    else:
        parent.write_text("a file")
    with pytest.raises(ValueError, match=f"{parent / 'out'} cannot be written"):
        build_release(source, parent / "out")
