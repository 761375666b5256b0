"""A built folder in the published flashmap 0.1.0, in a process that has that package instead of
this one: the logits are those that the build recorded."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flashmap.release import golden

SCRIPT = """import json, runpy, sys
sys.path.insert(0, sys.argv[1])
import flashmap
from transformers import AutoModel
model = AutoModel.from_pretrained(sys.argv[2], dtype="auto")
found = runpy.run_path(sys.argv[3])["golden_logits"](model)
print(json.dumps({"file": flashmap.__file__, "class": type(model).__module__, "logits": found}))
"""


@pytest.mark.slow
def test_the_published_package_gives_the_golden_logits(sound: Path, tmp_path: Path) -> None:
    place = tmp_path / "published"
    pip = ["-m", "pip", "install", "--quiet", "--no-deps", "--target", str(place)]
    if subprocess.run([sys.executable, *pip, "flashmap==0.1.0"], capture_output=True).returncode:
        pytest.skip("flashmap 0.1.0 cannot be fetched from the package index")
    arguments = [str(place), str(sound), golden.__file__]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments],
        cwd=tmp_path, env={"PATH": "", "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["file"].startswith(str(place)) and found["class"] == "flashmap.modeling_flashmap"
    recorded = json.loads((sound / "eval/golden.json").read_text())
    difference = golden.difference(found["logits"], recorded["logits"])
    assert difference is not None and difference <= golden.TOLERANCE
