"""What drafting brings in sglang: tokens a second, and what a round costs beside a plain step.

    python benchmarks/serve_sglang.py --target DIR --draft DIR [--peer PYTHON] [--peer-draft DIR]
    python benchmarks/serve_sglang.py --shape qwen3-8b        random weights: the cost of a round

The protocol and the columns are those of benchmarks/serve_vllm.py. `--options` adds an engine with
these options of FlashMap's, such as '{"tree_candidates": 4}'. The package has to be installed, so
that sglang finds its plugin.
"""

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from serve_vllm import Engine, compare, say, start

CONCURRENCY = [1, 8]
SETTINGS: dict[str, Any] = {
    "dtype": "bfloat16", "skip_tokenizer_init": True, "attention_backend": "triton",
    "sampling_backend": "pytorch", "grammar_backend": "none", "disable_radix_cache": True,
    "disable_prefill_cuda_graph": True, "cuda_graph_bs_decode": [1, 2, 4, 8],
    "max_running_requests": 16, "max_total_tokens": 32768, "mem_fraction_static": 0.5,
    "log_level": "warning",
}  # fmt: skip


# --- one engine, in a process of its own; the peer's interpreter runs this part too


def serve(settings: dict[str, Any]) -> None:
    """Build an engine and answer requests for measurements, a line of JSON each."""
    import sglang
    import torch

    vocab = settings.pop("vocab")
    llm = sglang.Engine(**settings)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    say({"gpu": gpu, "sglang": sglang.__version__, "torch": torch.__version__})
    for line in sys.stdin:
        say(measure(llm, vocab, **json.loads(line)))


def measure(llm: Any, vocab: int, concurrency: int, prompt: int, tokens: int) -> dict[str, Any]:
    """Seconds of decoding `tokens` for so many requests at once, how many rounds they took (summed
    over requests) and how many drafts were accepted."""
    generator = random.Random(concurrency)
    asked = [[generator.randrange(vocab) for _ in range(prompt)] for _ in range(concurrency)]

    def run(length: int) -> tuple[float, list[dict[str, Any]]]:
        sampling = {"max_new_tokens": length, "temperature": 0.0, "ignore_eos": True}
        began = time.perf_counter()
        answers = llm.generate(input_ids=asked, sampling_params=sampling)
        return time.perf_counter() - began, [answer["meta_info"] for answer in answers]

    first, _ = run(1)
    whole, metas = run(tokens)
    return {
        "seconds": whole - first,
        "drafts": sum(meta.get("spec_verify_ct", 0) for meta in metas),
        "accepted": sum(meta.get("spec_num_correct_drafts", 0) for meta in metas),
    }


# --- the parent


def engines(arguments: argparse.Namespace, target: Path, draft: Path) -> list[Engine]:
    """Target only, ours with each set of options, and the peer's if there is one."""
    config = json.loads((target / "config.json").read_text())
    common = {
        "model_path": str(target), "vocab": config["vocab_size"], **SETTINGS,
        "context_length": arguments.prompt + arguments.tokens + 64,
        "load_format": "dummy" if arguments.shape else "auto", **json.loads(arguments.settings),
    }  # fmt: skip

    def drafting(folder: Path) -> dict[str, Any]:
        return common | {
            "speculative_algorithm": "DSPARK", "speculative_draft_model_path": str(folder),
            "speculative_draft_load_format": "auto",
            "speculative_draft_attention_backend": "triton",
        }  # fmt: skip

    found = [start("target only", sys.executable, common, script=__file__)]
    for options in arguments.options or ["{}"]:
        name = f"flashmap {options}".removesuffix(" {}")
        settings = drafting(draft)
        found.append(start(name, sys.executable, settings, str(draft), __file__, options))
    if arguments.peer:
        folder = arguments.peer_draft or draft
        found.append(start("published", arguments.peer, drafting(folder), str(folder), __file__))
    return found


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(json.loads(sys.argv[2]))
    else:
        compare(__doc__, "sglang", engines, CONCURRENCY)
