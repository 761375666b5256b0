"""Loads a release folder with AutoModel and its own remote code; prints what came of it as one JSON
line.

Run by `release check` through `bootstrap`, in a process that has no flashmap. Imports nothing of
this project.
"""

import json
import sys

import torch
import transformers
from transformers import AutoModel


def main(folder: str) -> None:
    """Load ``folder`` and write the report to stdout."""
    model, info = AutoModel.from_pretrained(
        folder, trust_remote_code=True, output_loading_info=True
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
    }
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
