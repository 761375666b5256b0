"""Loads a release folder with AutoModel and its own remote code, drafts with it, and saves it; says
what came of it as one JSON line.

Run by `release check` through `bootstrap`, in a process that has no flashmap. Imports nothing of
this project; golden.py is run by its path.
"""

import json
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModel

GOLDEN = runpy.run_path(str(Path(__file__).resolve().with_name("golden.py")))


def main(folder: str) -> None:
    """Load ``folder`` and write the report to stdout."""
    model, info = AutoModel.from_pretrained(
        folder, trust_remote_code=True, output_loading_info=True, dtype="auto"
    )
    state = model.state_dict()
    report = {
        "class": type(model).__name__,
        "module": type(model).__module__,
        "transformers": transformers.__version__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "on_meta": [name for name, tensor in state.items() if tensor.is_meta],
        "not_finite": [
            name
            for name, tensor in state.items()
            if not tensor.is_meta and not torch.isfinite(tensor).all()
        ],
        **{
            kind: sorted(map(str, info[f"{kind}_keys"]))
            for kind in ("missing", "unexpected", "mismatched")
        },
        "resaved": resave(model),
    }
    # Last, for it leaves the model in float32.
    golden = json.loads((Path(folder) / "eval/golden.json").read_text(encoding="utf-8"))
    found = GOLDEN["golden_logits"](model)
    report["golden"] = GOLDEN["difference"](found, golden["logits"])
    sys.stdout.write(json.dumps(report) + "\n")


def resave(model: Any) -> list[str]:
    """What changes when the model is saved, loaded and saved again; nothing should."""
    with tempfile.TemporaryDirectory() as scratch:
        first, second = Path(scratch, "first"), Path(scratch, "second")
        model.save_pretrained(first)
        again: Any = AutoModel.from_pretrained(str(first), trust_remote_code=True, dtype="auto")
        again.save_pretrained(second)
        state, loaded = model.state_dict(), again.state_dict()
        changed = [
            name
            for name in state.keys() | loaded.keys()
            if name not in state or name not in loaded or not state[name].equal(loaded[name])
        ]
        names = {path.name for path in (*first.iterdir(), *second.iterdir()) if path.is_file()}
        changed += [n for n in names if _content(first / n) != _content(second / n)]
    return sorted(changed)


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


if __name__ == "__main__":
    main(sys.argv[1])
