"""From a trained drafter to a stranger who generates with it: build, push, snapshot_download,
AutoModel, spec_generate, with the real clients."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.commands import Run
from support.hub import pull_script
from support.hub.server import LocalHub
from support.pair_folders import write_pair

from flashmap import load_pair
from flashmap.release import bootstrap
from flashmap.release.build import build_release

PROMPT, TOKENS = "Why is the sky blue?", 24


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair(tmp_path_factory.mktemp("pushed-pair"))


def test_what_was_pushed_generates(pair: Path, tmp_path: Path, hub: LocalHub, run: Run) -> None:
    out = tmp_path / "out"
    build_release(pair / "draft", out, tag="v1", repo_id="ada/tiny")
    ended = run("release", "push", out, "ada/tiny", "--yes", "--json")
    assert ended.status == 0, ended.err
    pushed = json.loads(ended.out)
    assert pushed["changed"] and pushed["mark"] == "v1"
    arguments = ["ada/tiny", "v1", str(pair / "target"), PROMPT, str(TOKENS)]
    done = subprocess.run(
        [sys.executable, "-P", bootstrap.__file__, pull_script.__file__, *arguments],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.strip().splitlines()[-1])
    assert seen["commit"] == pushed["commit"]
    assert set(seen["files"]) == {row["path"] for row in pushed["files"]} | {".gitattributes"}
    target, _, tokenizer = load_pair(pair / "target", pair / "draft")
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    plain = target.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=TOKENS
    )
    assert seen["tokens"] == plain[0, ids.shape[1] :].tolist()
    assert seen["module"].startswith("transformers_modules.")
