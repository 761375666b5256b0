"""What drafting brings in vLLM: tokens a second, and what a round costs beside a plain step.

    python benchmarks/serve_vllm.py --target DIR --draft DIR [--peer PYTHON] [--peer-draft DIR]
    python benchmarks/serve_vllm.py --shape qwen3-8b          random weights: the cost of a round

Every engine runs in a process of its own and all of them stay, sharing the GPU's memory; they take
turns, so that a slow minute of the machine hits all alike. `--peer` is an interpreter in which the
published package is installed instead of this one. Prompts are random tokens, temperature is 0.

A row is one engine at one concurrency: seconds of decoding are those of the whole generation less
those of one that stops at its first token, the median of the repeats. `round_ms` is what one pass
of the target takes with all that belongs to it, `accepted` how many tokens it commits a request.
"""

import argparse
import csv
import datetime
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = ("engine", "concurrency", "tokens_per_second", "round_ms", "accepted", "speedup")
PROTOCOL = ("target", "draft", "prompt", "tokens", "repeats", "gpu")
SHAPES = {
    "qwen3-8b": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096,
        "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0, "max_position_embeddings": 40960, "hidden_act": "silu",
        "tie_word_embeddings": False, "attention_bias": False, "torch_dtype": "bfloat16",
    },
    "tiny": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64,
        "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 96, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "max_position_embeddings": 1024, "hidden_act": "silu",
        "tie_word_embeddings": False, "attention_bias": False, "torch_dtype": "bfloat16",
    },
}  # fmt: skip
DRAFTERS: dict[str, dict[str, Any]] = {
    "qwen3-8b": {},  # the configuration's own defaults
    "tiny": {
        "target_hidden_size": 64, "vocab_size": 96, "target_layer_ids": [0, 1], "block_size": 4,
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 64, "cond_dim": 16, "time_embed_dim": 8,
    },
}  # fmt: skip


# --- one engine, in a process of its own; the peer's interpreter runs this part too


def serve(settings: dict[str, Any]) -> None:
    """Build an engine and answer requests for measurements, a line of JSON each."""
    import torch
    import vllm

    vocab = settings.pop("vocab")
    llm = vllm.LLM(**settings)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    say({"gpu": gpu, "vllm": vllm.__version__, "torch": torch.__version__})
    for line in sys.stdin:
        say(measure(llm, vocab, **json.loads(line)))


def say(answer: dict[str, Any]) -> None:
    """Print an answer so that the parent finds it among the engine's own lines."""
    print("ANSWER " + json.dumps(answer), flush=True)


def measure(llm: Any, vocab: int, concurrency: int, prompt: int, tokens: int) -> dict[str, Any]:
    """Seconds of decoding `tokens` for so many requests at once, and how many drafts were made and
    accepted."""
    from vllm import SamplingParams

    generator = random.Random(concurrency)
    asked = [
        {"prompt_token_ids": [generator.randrange(vocab) for _ in range(prompt)]}
        for _ in range(concurrency)
    ]

    def run(length: int) -> float:
        options = SamplingParams(
            max_tokens=length, temperature=0.0, ignore_eos=True, detokenize=False
        )
        began = time.perf_counter()
        llm.generate(asked, options, use_tqdm=False)
        return time.perf_counter() - began

    first, before = run(1), counters(llm)
    seconds = run(tokens) - first
    found = {name: value - before[name] for name, value in counters(llm).items()}
    return {"seconds": seconds, **found}


def counters(llm: Any) -> dict[str, int]:
    """Rounds (summed over requests) and accepted drafts of an engine's life."""
    names = {"drafts": "spec_decode_num_drafts", "accepted": "spec_decode_num_accepted_tokens"}
    values = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    return {name: values.get(f"vllm:{metric}", 0) for name, metric in names.items()}


# --- the parent; benchmarks/serve_sglang.py runs this part for its engines


@dataclass
class Engine:
    """An engine's process, and what it measured: a list of answers a concurrency."""

    name: str
    process: "subprocess.Popen[str]"
    facts: dict[str, Any]
    draft: str

    def ask(self, **request: Any) -> dict[str, Any]:
        """One measurement."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return answer(self.process, self.name)


def answer(process: "subprocess.Popen[str]", name: str) -> dict[str, Any]:
    """The next answer of an engine; what else it prints goes to stderr."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("ANSWER "):
            found: dict[str, Any] = json.loads(line.removeprefix("ANSWER "))
            return found
        sys.stderr.write(f"{name}: {line}")
    raise SystemExit(f"the engine {name} ended with {process.wait()}; its output is above")


def start(
    name: str,
    python: str,
    settings: dict[str, Any],
    draft: str = "",
    script: str = __file__,
    options: str = "{}",
) -> Engine:
    """Start an engine and wait until it is ready; `options` are FlashMap's."""
    command = [python, str(Path(script).resolve()), "--serve", json.dumps(settings)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env=os.environ | {"FLASHMAP_OPTIONS": options}, **pipes)
    return Engine(name, process, answer(process, name), draft)


def write_shape(folder: Path, shape: str) -> tuple[Path, Path]:
    """A target's configuration, for random weights, and a random drafter."""
    import torch

    from flashmap import FlashMapConfig, FlashMapDraftModel

    target, draft = folder / "target", folder / "draft"
    target.mkdir()
    (target / "config.json").write_text(json.dumps(SHAPES[shape]))
    torch.manual_seed(0)
    model = FlashMapDraftModel(FlashMapConfig(target_model=shape, **DRAFTERS[shape]))
    model.to(torch.bfloat16).save_pretrained(draft)
    return target, draft


def engines(arguments: argparse.Namespace, target: Path, draft: Path) -> list[Engine]:
    """Target only, ours, and the peer's if there is one, each with its share of the memory."""
    config = json.loads((target / "config.json").read_text())
    share = 0.85 / (1 + len(arguments.options or [""]) + bool(arguments.peer))
    common = {
        "model": str(target), "dtype": "bfloat16", "skip_tokenizer_init": True,
        "max_model_len": arguments.prompt + arguments.tokens + 64, "max_num_seqs": 32,
        "gpu_memory_utilization": share, "enable_prefix_caching": False,
        "disable_log_stats": False, "vocab": config["vocab_size"], **json.loads(arguments.settings),
    }  # fmt: skip
    loads = {"load_format": "auto"}
    if arguments.shape:
        common["load_format"] = "dummy"
    found = [start("target only", sys.executable, common)]
    ours = {"model": str(draft), "draft_load_config": loads}
    for options in arguments.options or ["{}"]:
        settings = common | {"speculative_config": ours}
        name = f"flashmap {options}".removesuffix(" {}")
        found.append(start(name, sys.executable, settings, str(draft), options=options))
    if arguments.peer:
        theirs = ours | {"model": str(arguments.peer_draft or draft)}
        settings = common | {"speculative_config": theirs}
        found.append(start("published", arguments.peer, settings, theirs["model"]))
    return found


def rows(
    arguments: argparse.Namespace, target: Path, running: list[Engine]
) -> list[dict[str, Any]]:
    """Measure every engine at every concurrency, in turns."""
    from flashmap.machine import checkout_commit

    found = []
    for concurrency in arguments.concurrency:
        request = {
            "concurrency": concurrency,
            "prompt": arguments.prompt,
            "tokens": arguments.tokens,
        }
        answers: dict[str, list[dict[str, Any]]] = {engine.name: [] for engine in running}
        for repeat in range(arguments.repeats + 1):
            for engine in running:
                one = engine.ask(**request)
                if repeat:  # the first warms up
                    answers[engine.name].append(one)
        plain = statistics.median(one["seconds"] for one in answers["target only"])
        for engine in running:
            seconds = statistics.median(one["seconds"] for one in answers[engine.name])
            last, decoded = answers[engine.name][-1], arguments.tokens - 1
            rounds = last["drafts"] / concurrency or decoded
            found.append(
                {
                    "engine": engine.name, "concurrency": concurrency,
                    "tokens_per_second": round(concurrency * decoded / seconds, 1),
                    "round_ms": round(1000 * seconds / rounds, 3),
                    "accepted": round(1 + last["accepted"] / max(last["drafts"], 1), 2),
                    "speedup": round(plain / seconds, 3), "target": target, "draft": engine.draft,
                    "prompt": arguments.prompt, "tokens": arguments.tokens,
                    "repeats": arguments.repeats, "commit": checkout_commit(), **engine.facts,
                    "date": datetime.date.today().isoformat(),
                }
            )  # fmt: skip
            print({name: found[-1][name] for name in RESULTS}, flush=True)
    return found


def compare(
    description: str,
    name: str,
    start_all: Callable[[argparse.Namespace, Path, Path], list[Engine]],
    concurrency: list[int],
) -> None:
    """Read the command line, measure the engines, write the table of the engine `name`."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--target", type=Path, help="folder of the target")
    parser.add_argument("--draft", type=Path, help="folder of the release")
    parser.add_argument("--shape", choices=SHAPES, help="random weights of this shape instead")
    parser.add_argument("--peer", metavar="PYTHON", help="interpreter with the published package")
    parser.add_argument("--peer-draft", type=Path, help="the drafter in the form that it reads")
    parser.add_argument("--concurrency", type=int, nargs="+", default=concurrency)
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--settings", default="{}", help="further arguments of engines, as JSON")
    parser.add_argument("--options", action="append", help="FlashMap's, as JSON; one engine each")
    default = Path(f"benchmarks/results/serve_{name}.csv")
    parser.add_argument("--out", type=Path, default=default)
    arguments = parser.parse_args()
    if bool(arguments.shape) == bool(arguments.target and arguments.draft):
        parser.error("give --target and --draft, or --shape")
    with tempfile.TemporaryDirectory() as scratch:
        target, draft = arguments.target, arguments.draft
        if arguments.shape:
            target, draft = write_shape(Path(scratch), arguments.shape)
        running = start_all(arguments, target, draft)
        try:
            table = rows(arguments, target, running)
        finally:
            for engine in running:
                engine.process.kill()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with arguments.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, (*RESULTS, *PROTOCOL, name, "torch", "commit", "date"))
        writer.writeheader()
        writer.writerows(table)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(json.loads(sys.argv[2]))
    else:
        compare(__doc__, "vllm", engines, [1, 8, 32])
