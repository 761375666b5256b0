"""What a round of speculative decoding takes on a GPU, beside its floor and what else decodes.

    python benchmarks/round_latency.py [--shape qwen3-8b] [--batch 1] [--context 2048]
        [--method graphs] [--peer PYTHON] [--out FILE.csv] [--png FILE.png]

Every flag that selects may be repeated; without any of a kind, all are run. Methods: `generate`
(transformers, a token a round), `static` (the same with a static cache, compiled), `plain` and
`graphs` (ours), and with `--peer` the published package in the interpreter of that path, one
sequence at a time. Shapes are targets of random weights in bfloat16, so that hardly a draft is
accepted and a round commits one token; `smollm2-135m` is the embedded pair with its real weights.

The floor is the bytes that a round cannot avoid (the target's weights and caches, the drafter's
weights, its head folded with the target's) over the bandwidth of a copy of 1 GiB in the same run.
`first_call_s` is what a first call took more than a second: captures, compilation, constants.
`peak_gb` is the most memory that was allocated. `--png` draws what the CSV file holds.
"""

import argparse
import csv
import datetime
import inspect
import json
import statistics
import subprocess
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from decode_cpu import RoundClock, append_rows, commit
from fused_ops import copy_rate
from peer_round import random_drafter, random_target, time_rounds

from flashmap import FlashMapConfig, load_pair
from flashmap.modeling.modeling_flashmap import FlashMapDraftModel

_QWEN: dict[str, Any] = {
    "model_type": "qwen3", "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "max_position_embeddings": 40960,
}  # fmt: skip
TARGETS: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        **_QWEN, "hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False
    },
    "qwen3-4b": {
        **_QWEN, "hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True
    },
    "smollm2-135m": {
        "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "vocab_size": 49152, "tie_word_embeddings": True, "max_position_embeddings": 8192,
    },
}  # fmt: skip
EMBEDDED = "smollm2-135m"
DRAFTER = Path("models/smollm2-135m/config.json")
METHODS = ("generate", "static", "plain", "graphs", "peer")
BATCHES, CONTEXTS = (1, 8), (128, 2048, 16384)


class Case(NamedTuple):
    """One thing to measure."""

    shape: str
    batch: int
    context: int


def drafter_fields(shape: str) -> dict[str, Any]:
    """Configuration of a drafter for a target's shape."""
    if shape != EMBEDDED:
        return {"target_hidden_size": TARGETS[shape]["hidden_size"]}
    known = inspect.signature(FlashMapConfig.__init__).parameters
    fields: dict[str, Any] = json.loads(DRAFTER.read_text())
    return {name: value for name, value in fields.items() if name in known}


def make_pair(shape: str) -> tuple[Any, Any]:
    """Target and drafter on the GPU."""
    if shape == EMBEDDED:
        return load_pair(EMBEDDED, EMBEDDED, "cuda", "bfloat16")[:2]
    return random_target(TARGETS[shape]), random_drafter(FlashMapDraftModel, drafter_fields(shape))


def floor_bytes(target: Any, drafter: Any, case: Case) -> int:
    """Bytes that a round of one jump has to read."""
    config, own = target.config, drafter.config
    rows = target.get_input_embeddings().weight
    tied = target.get_output_embeddings().weight is rows
    weights = sum(one.numel() for one in target.parameters()) - (0 if tied else rows.numel())
    unread = ("adaln", "time_embed", "jump_embed", "head.")  # folded, or the same every round
    weights += sum(
        weight.numel()
        for name, weight in drafter.named_parameters()
        if not any(part in name for part in unread)
    )
    weights += own.vocab_size * own.hidden_size + own.target_hidden_size**2
    entry = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    entry += 2 * own.num_hidden_layers * own.hidden_size
    return 2 * (weights + case.batch * case.context * entry)


def time_generate(
    target: Any, ids: torch.Tensor, num_tokens: int, **options: Any
) -> dict[str, float]:
    """A token of transformers' `generate`: the median of the later half."""
    clocks = []
    for _ in range(2):
        clocks.append(RoundClock())
        target.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, streamer=clocks[-1],
            max_new_tokens=num_tokens, min_new_tokens=num_tokens, **options,
        )  # fmt: skip
    first, second = (clock.times[-1] - clock.times[0] for clock in clocks)
    steps = [end - start for start, end in pairwise(clocks[-1].times)]
    median = statistics.median(steps[len(steps) // 2 :])
    return {"round_ms": median * 1e3, "tokens_per_round": 1.0, "first_call_s": first - second}


def measure(
    pair: tuple[Any, Any], case: Case, method: str, rounds: int, peer: str | None
) -> dict[str, float]:
    """One method on one case."""
    if method == "peer":
        return run_peer(case, rounds, str(peer))
    target, drafter = pair
    torch.manual_seed(2)
    ids = torch.randint(0, target.config.vocab_size, (case.batch, case.context), device="cuda")
    drafter.round_store.clear()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    if method in ("generate", "static"):
        options = {"cache_implementation": "static"} if method == "static" else {}
        found = time_generate(target, ids, rounds + 1, **options)
    else:
        found = time_rounds(_generate(drafter, target, ids, method == "graphs"), rounds)
    return {**found, "peak_gb": torch.cuda.max_memory_allocated() / 1e9}


def _generate(drafter: Any, target: Any, ids: torch.Tensor, graphs: bool) -> Callable[[int], Any]:
    return lambda num_tokens: drafter.spec_generate(
        target, ids, max_new_tokens=num_tokens, stop_token_ids=[], seed=0, graphs=graphs
    )


def run_peer(case: Case, rounds: int, peer: str) -> dict[str, float]:
    """The published package's round of random weights, in its own interpreter."""
    asked = {
        "target": TARGETS[case.shape], "drafter": drafter_fields(case.shape),
        "context": case.context, "rounds": rounds,
    }  # fmt: skip
    script = Path(__file__).with_name("peer_round.py")
    done = subprocess.run(
        [peer, "-I", str(script), json.dumps(asked)],
        capture_output=True,
        text=True,
        cwd=script.parent,
    )
    if done.returncode != 0:
        raise SystemExit(f"--peer {peer} failed:\n{done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def rows_of(args: argparse.Namespace, copy: float) -> Iterator[dict[str, Any]]:
    """A row a case and method, printed as it comes."""
    methods = args.method or [one for one in METHODS if one != "peer" or args.peer]
    for shape in args.shape or TARGETS:
        pair = make_pair(shape)
        for batch in args.batch or BATCHES:
            for context in args.context or CONTEXTS:
                case = Case(shape, batch, context)
                floor = floor_bytes(*pair, case) / copy / 1e6
                for method in methods:
                    if method == "peer" and batch > 1:
                        continue
                    found = measure(pair, case, method, args.rounds, args.peer)
                    yield _row(case, method, found, floor)
        del pair
        torch.cuda.empty_cache()


def _row(case: Case, method: str, found: dict[str, float], floor: float) -> dict[str, Any]:
    rate = found["tokens_per_round"] / found["round_ms"] * 1e3 * case.batch
    columns = {
        **case._asdict(),
        "method": method,
        "round_ms": f"{found['round_ms']:.3f}",
        "tokens_per_round": f"{found['tokens_per_round']:.2f}",
        "tokens_per_s": f"{rate:.1f}",
        "floor_ms": f"{floor:.3f}",
        "over_floor": f"{found['round_ms'] / floor:.2f}",
        "first_call_s": f"{found['first_call_s']:.2f}",
        "peak_gb": f"{found['peak_gb']:.2f}" if "peak_gb" in found else "",
    }
    print("  ".join(f"{value!s:>12}" for value in columns.values()), flush=True)
    return columns


def draw(table: Path, picture: Path) -> None:
    """Milliseconds a round over the context, a panel a shape and batch; the latest of each case."""
    from matplotlib.figure import Figure

    with table.open(newline="") as file:
        found = {
            (row["shape"], row["batch"], row["method"], int(row["context"])): row
            for row in csv.DictReader(file)
        }
    panels = sorted({key[:2] for key in found})
    figure = Figure(figsize=(4 * len(panels), 3.6), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        here = {key[2:]: row for key, row in found.items() if key[:2] == panel}
        for method in METHODS:
            points = sorted(
                (context, float(row["round_ms"]))
                for (name, context), row in here.items()
                if name == method
            )
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", label=method)
        floors = sorted(
            {context: float(row["floor_ms"]) for (_, context), row in here.items()}.items()
        )
        axes.plot(*zip(*floors, strict=True), "k--", label="floor")
        axes.set(xscale="log", yscale="log", title=f"{panel[0]}, batch {panel[1]}")
        axes.set(xlabel="context, tokens", ylabel="ms a round (generate: a token)")
        axes.grid(alpha=0.3, which="both")
        axes.legend(fontsize="small")
    figure.savefig(picture, dpi=110)


def main() -> None:
    """Measure, print, append to the CSV file, draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", action="append", choices=list(TARGETS))
    parser.add_argument("--batch", action="append", type=int)
    parser.add_argument("--context", action="append", type=int)
    parser.add_argument("--method", action="append", choices=METHODS)
    parser.add_argument("--rounds", type=int, default=32, help="tokens beyond the short run")
    parser.add_argument("--peer", help="interpreter that has the published package")
    parser.add_argument("--out", type=Path, help="CSV file to append to")
    parser.add_argument("--png", type=Path, help="picture of what --out holds")
    parser.add_argument("--draw-only", action="store_true", help="draw --png from --out as it is")
    args = parser.parse_args()
    if not args.draw_only:
        if not torch.cuda.is_available():
            raise SystemExit(
                "benchmarks/round_latency.py needs a CUDA device, and torch sees none."
            )
        run(args)
    if args.png is not None:
        draw(args.out, args.png)


def run(args: argparse.Namespace) -> None:
    """Measure what is asked for; a row is in the file as soon as it is measured."""
    if args.method and "peer" in args.method and not args.peer:
        raise SystemExit("--method peer needs --peer PYTHON, an interpreter with flashmap 0.1.0.")
    copy = copy_rate()
    print(f"{torch.cuda.get_device_name()}: a copy of 1 GiB moves {copy:.0f} GB/s")
    machine = {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "copy_gb_per_s": f"{copy:.0f}",
    }
    for row in rows_of(args, copy):
        if args.out is not None:
            append_rows(args.out, [{**machine, **row}])


if __name__ == "__main__":
    main()
