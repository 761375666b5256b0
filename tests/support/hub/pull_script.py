"""What somebody does who found a release on the Hub: download it, load it with its own code,
generate.

Runs in a process that has no flashmap. Prints one JSON line.
"""

import json
import sys
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer


def main(repo_id: str, revision: str, target_folder: str, prompt: str, tokens: int) -> None:
    """Generate greedily from `prompt` with the drafter of a Hub repository."""
    folder = Path(snapshot_download(repo_id, revision=revision))
    draft: Any = AutoModel.from_pretrained(repo_id, revision=revision, trust_remote_code=True)
    target: Any = AutoModelForCausalLM.from_pretrained(target_folder, dtype="auto")
    tokenizer: Any = AutoTokenizer.from_pretrained(target_folder)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    out = draft.to(target.dtype).spec_generate(target.eval(), ids, max_new_tokens=tokens)
    generated = out.sequences[0, ids.shape[1] :].tolist()
    report = {
        "commit": folder.name,
        "files": [
            path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
        ],
        "module": type(draft).__module__,
        "tokens": generated,
        "text": tokenizer.decode(generated, skip_special_tokens=True),
        "acceptance_length": out.acceptance_length,
    }
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:5], int(sys.argv[5]))
