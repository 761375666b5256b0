"""Which pair the page shows, and loading it with the package and without."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import pair_folders, toys

from flashmap.release.build import build_release
from pair import DRAFT, EMBEDDED, HUB, PINS, TARGET, Names, choose, load

SPACE = PINS.parent


def test_the_variables_come_first_then_the_pins_then_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pins = tmp_path / "pins.json"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose({}, pins) == EMBEDDED
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose({}, pins) == HUB
    pinned = {
        "draft": {"repo_id": "ada/drafter", "revision": "a" * 40},
        "target": {"repo_id": "ada/target", "revision": "b" * 40},
    }
    pins.write_text(json.dumps(pinned))
    assert choose({}, pins) == (f"ada/drafter@{'a' * 40}", f"ada/target@{'b' * 40}")
    both = {DRAFT: "me/drafter@v2", TARGET: "/models/target "}
    assert choose(both, pins) == ("me/drafter@v2", "/models/target")
    assert choose({DRAFT: "", TARGET: " "}, pins) == choose({}, pins)


@pytest.mark.parametrize(("alone", "other"), [(DRAFT, TARGET), (TARGET, DRAFT)])
def test_one_variable_alone_is_refused(alone: str, other: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{alone} is set and {other} is not"):
        choose({alone: "x"}, tmp_path / "none")


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> Names:
    """A tiny target, and a release folder of a drafter for it."""
    root = tmp_path_factory.mktemp("pair")
    target = pair_folders.write_target(root / "target")
    source = pair_folders.write_drafter(root / "source")
    return Names(str(build_release(source, root / "release").folder), str(target))


def test_with_the_package_its_loader_checks_the_pair(names: Names) -> None:
    pair = load(names)
    assert pair.names == names and pair.dtype == "float32"
    assert (pair.block_size, pair.jumps) == (3, 4)
    with pytest.raises(ValueError, match="no folder"):
        load(Names("/nowhere/draft", names.target))


SCRIPT = """
import sys
sys.modules["flashmap"] = None  # as where it is not installed
sys.path.insert(0, sys.argv[1])
from pair import Names, load
from race import FLASHMAP, PLAIN, Settings, encode, race
pair = load(Names(sys.argv[2], sys.argv[3]))
texts = {FLASHMAP: [], PLAIN: []}
for event in race(pair, encode(pair, "Why?"), Settings(max_new_tokens=12)):
    texts[event.side] += event.tokens
print(type(pair.draft).__module__.split(".")[0], *texts[PLAIN])
assert texts[PLAIN] == texts[FLASHMAP]
"""


@pytest.mark.skipif(not toys.IS_V5, reason="the Space pins transformers 5")
def test_without_the_package_a_release_brings_its_code(names: Names, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(SPACE), *names]
    environment = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    module, *tokens = done.stdout.split()
    assert module == "transformers_modules"
    pair = load(names)
    ids = pair.tokenizer("<|user|>Why?<|assistant|>", return_tensors="pt")["input_ids"]
    assert [int(token) for token in tokens] == toys.greedy(pair.target, ids, 12)
