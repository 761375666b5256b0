"""`target.generate(custom_generate=REF, trust_remote_code=True)` with a built release, by folder
and by Hub id, offline, in a process that has no flashmap and has never loaded it before.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
from support.pair_folders import write_drafter, write_target

from flashmap.release.build import build_release, custom_generate
from flashmap.release.fresh import run_fresh

SCRIPT = Path(__file__).resolve().parents[1] / "support/custom_generate_script.py"
REPO, TAG = "owner/tiny-drafter", "v1.2"
SHA = "0123456789abcdef0123456789abcdef01234567"


def cached(release: Path, cache: Path) -> None:
    """Lay the release out as the Hub's cache has it once main and the tag were downloaded."""
    repo = cache / f"models--{REPO.replace('/', '--')}"
    shutil.copytree(release, repo / "snapshots" / SHA)
    (repo / "refs").mkdir()
    for name in ("main", TAG):
        (repo / "refs" / name).write_text(SHA)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target; a release; one of the same name elsewhere, with other weights and no stamp."""
    root = tmp_path_factory.mktemp("custom")
    release = build_release(
        write_drafter(root / "source"), root / "release", tag=TAG, repo_id=REPO
    ).folder
    twin = write_drafter(root / "twin-source", block_size=5)
    cached(release, root / "hub")
    return {
        "target": write_target(root / "target"),
        "release": release,
        "twin": build_release(twin, root / "elsewhere" / "release").folder,
        "cache": root / "hub",
    }


@pytest.fixture(scope="module")
def report(folders: dict[str, Path]) -> dict[str, Any]:
    """What the process found."""
    arguments = [str(folders["target"]), str(folders["release"]), str(folders["twin"]), REPO]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_CACHE", str(folders["cache"]))
        (found,) = run_fresh(SCRIPT, arguments)
    return found


@pytest.mark.parametrize(
    "way",
    ["folder", "hub", "twin", "batch", "processed", "tree", "adaptive", "turn",
     "stop strings", "configured", "streamed", "seeded", "other drafter"],
)  # fmt: skip
def test_text_is_plain_generates(way: str, report: dict[str, Any]) -> None:
    plain, found = report[way]
    assert found == plain


def test_stop_strings_did_stop_it(report: dict[str, Any]) -> None:
    assert report["stopped"] < len(report["folder"][0][0])


def test_a_turn_runs_what_is_new(report: dict[str, Any]) -> None:
    assert report["first pass of the turn"] == 1


def test_a_drafter_is_loaded_once_for_where_it_is_from_device_and_dtype(
    report: dict[str, Any], folders: dict[str, Path]
) -> None:
    release = str(folders["release"])
    assert report["loads"] == [[release, None, "torch.float32"], [REPO, TAG, "torch.float32"]]
    assert report["later loads"] == [[release, None, "torch.float64"]]


def test_what_is_refused_ends_the_stream_once(report: dict[str, Any]) -> None:
    refused = report["refused"]
    assert refused["beams"].startswith("1 num_beams=2 does not go with flashmap_decoding")
    assert refused["assistant"].startswith("1 assistant_model does not go with")
    assert refused["unknown"].startswith("1 ") and "num_drafts" in refused["unknown"]
    assert refused["no drafter"].startswith("1 draft_model is a str, expected a loaded FlashMap")
    assert refused["nothing"] == "1 nothing"


def test_the_file_states_repository_and_tag(folders: dict[str, Path]) -> None:
    lines = [
        (folders[name] / "custom_generate/generate.py").read_text().splitlines()
        for name in ("release", "twin")
    ]
    changed = [pair for pair in zip(*lines, strict=True) if pair[0] != pair[1]]
    assert changed == [(f'REPO_ID, TAG = "{REPO}", "{TAG}"', 'REPO_ID, TAG = "", ""')]


def test_a_stamp_is_text_whatever_it_holds() -> None:
    written = custom_generate('a"b\n', "c\\")["custom_generate/generate.py"].decode()
    namespace: dict[str, Any] = {}
    exec(written, namespace)
    assert (namespace["REPO_ID"], namespace["TAG"]) == ('a"b\n', "c\\")
