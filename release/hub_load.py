"""Loads a model repository at one commit with AutoModel and its own remote code, from a cache that
holds nothing else; prints what came of it as one JSON line.

Run before a commit becomes main, through `bootstrap`, in a process that has no flashmap. Imports
nothing of this project.
"""

import json
import sys

from transformers import AutoModel


def main(repo_id: str, revision: str, cache: str) -> None:
    """Load the model; exit with a message unless every tensor finds its place."""
    model, info = AutoModel.from_pretrained(
        repo_id,
        revision=revision,
        cache_dir=cache,
        trust_remote_code=True,
        output_loading_info=True,
    )
    for kind in ("missing", "unexpected", "mismatched"):
        if names := sorted(map(str, info[f"{kind}_keys"])):
            sys.exit(f"{kind} tensors: {', '.join(names[:3])}")
    sys.stdout.write(json.dumps({"class": type(model).__name__, "revision": revision}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:4])
