"""Two release folders of one name in one process: each loads with its own code, siblings too."""

import json
import subprocess
import sys
from pathlib import Path

from support import toys

from flashmap.release.build import build_release

SCRIPT = """
import json, sys
from transformers import AutoModel
found = []
for folder in sys.argv[1:]:
    model = AutoModel.from_pretrained(folder, trust_remote_code=True)
    layers = sys.modules[type(model.layers[0]).__module__]
    cache = sys.modules[type(model.new_cache(1, 4)).__module__]
    found.append([getattr(layers, "MARK", None), getattr(cache, "MARK", None)])
print(json.dumps(found))
"""


def test_same_named_folders_keep_their_own_siblings(tmp_path: Path) -> None:
    source = tmp_path / "source"
    toys.drafter().save_pretrained(source)
    (source / "README.md").write_text("# toy\n")
    folders = [tmp_path / parent / "same" for parent in "ab"]
    for mark, folder in zip("ab", folders, strict=True):
        build_release(source, folder)
        for name in ("layers_flashmap.py", "cache_flashmap.py"):
            with (folder / name).open("a") as file:
                file.write(f"\nMARK = {mark!r}\n")
        stamped = folder / "configuration_flashmap.py"
        text = stamped.read_text().replace('CODE_DIGEST = "', f'CODE_DIGEST = "{mark}')
        stamped.write_text(text)
    bootstrap = Path(sys.modules[build_release.__module__].__file__ or "").with_name("bootstrap.py")
    script = tmp_path / "load.py"
    script.write_text(SCRIPT)
    order = [str(folder) for folder in (folders[0], folders[1], folders[0])]
    done = subprocess.run(
        [sys.executable, "-P", "-B", str(bootstrap), str(script), *order],
        capture_output=True, text=True, cwd=tmp_path,
        env={"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1", "HOME": "/tmp"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [["a", "a"], ["b", "b"], ["a", "a"]]
