"""What the decoding loop itself costs on a CPU, in time and in memory, with the embedded pair.

    python benchmarks/decode_cpu.py [--dtype bfloat16] [--out benchmarks/results/decode_cpu.csv]

Time: a round of `spec_generate` against the target's forward pass over K + 1 tokens and the draft,
both timed inside that same round. What remains is the loop: acceptance, caches, context, streaming.
The claim is a ratio of at most 1.15. Each sequence counts from its second round; the first builds
the constants of the target.

Memory: growth of the process's peak over a generation of 2,000 tokens, beyond the two caches. The
claim is at most 200 MB. Linux only (`VmHWM`).
"""

import argparse
import csv
import datetime
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers

from flashmap import load_pair
from flashmap.machine import checkout_commit

PROMPTS = ("List five tips for better sleep.", "Explain photosynthesis in simple terms.")
MOST_RATIO, MOST_MEGABYTES = 1.15, 200.0
LONG = 2000


class Stopwatch:
    """Seconds spent in calls of one function, a list entry a call."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.seconds = function, list[float]()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function and note how long it took."""
        began = time.perf_counter()
        result = self.function(*args, **kwargs)
        self.seconds.append(time.perf_counter() - began)
        return result


class RoundClock:
    """A streamer that notes when each round's tokens arrive."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """Note the time."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is left to do."""


def encode(tokenizer: Any, prompt: str) -> torch.Tensor:
    """Token ids (1, P) of `prompt` in the target's chat template."""
    chat = [{"role": "user", "content": prompt}]
    ids: torch.Tensor = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]
    return ids


def time_rounds(
    target: Any, draft: Any, ids: torch.Tensor, tokens: int, temperature: float
) -> list[tuple[float, float, float]]:
    """(round, forward, draft) in seconds for every round but the first."""
    target.forward, draft.draft = Stopwatch(target.forward), Stopwatch(draft.draft)
    clock = RoundClock()
    options = {"temperature": temperature, "seed": 0, "stop_token_ids": [], "streamer": clock}
    try:
        draft.spec_generate(target, ids, max_new_tokens=tokens, **options)
        forwards, drafts = target.forward.seconds[1:], draft.draft.seconds  # the first: the prompt
    finally:
        del target.forward, draft.draft
    # Entry 0 is the prompt, entry 1 the token after it; a round lies between two later entries.
    arrivals = clock.times[1:]
    rounds = [end - start for start, end in pairwise(arrivals)]
    return list(zip(rounds, forwards, drafts, strict=True))[1:]


def peak_megabytes() -> float:
    """Highest resident memory since the last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def memory_over_caches(target: Any, draft: Any, ids: torch.Tensor) -> tuple[float, float]:
    """Megabytes of both caches after 2,000 tokens, and growth of the peak beyond them."""
    draft.spec_generate(target, ids, max_new_tokens=16)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to what is resident now
    before = peak_megabytes()
    draft.spec_generate(target, ids, max_new_tokens=LONG, stop_token_ids=[])
    grown = peak_megabytes() - before
    config, own = target.config, draft.config
    a_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    a_token += 2 * own.num_hidden_layers * own.hidden_size
    caches = a_token * (ids.shape[1] + LONG) * target.dtype.itemsize / 2**20
    return caches, grown - caches


def measure(dtype: str, tokens: int) -> list[dict[str, Any]]:
    """Rows of results for one dtype."""
    target, draft, tokenizer = load_pair("smollm2-135m", "smollm2-135m", "cpu", dtype)
    rows = []
    for temperature in (0.0, 1.0):
        timed = []
        for prompt in PROMPTS:
            timed += time_rounds(target, draft, encode(tokenizer, prompt), tokens, temperature)
        ratio = statistics.median(whole / (forward + own) for whole, forward, own in timed)
        parts = [statistics.median(column) * 1e3 for column in zip(*timed, strict=True)]
        print(
            f"{dtype}, temperature {temperature}: {len(timed)} rounds, round {parts[0]:.1f} ms ="
            f" forward {parts[1]:.1f} + draft {parts[2]:.1f} + rest; ratio {ratio:.3f}"
            f" (at most {MOST_RATIO})"
        )
        rows.append(
            {"what": f"round/(forward+draft), temperature {temperature}", "value": f"{ratio:.4f}"}
        )
    caches, beyond = memory_over_caches(target, draft, encode(tokenizer, PROMPTS[0]))
    print(f"{dtype}, {LONG} tokens: caches {caches:.0f} MB, peak beyond them {beyond:.0f} MB")
    rows.append({"what": f"peak MB beyond caches, {LONG} tokens", "value": f"{beyond:.1f}"})
    return [{"dtype": dtype, **row} for row in rows]


def commit() -> str:
    """The checkout's commit, shortened."""
    return (checkout_commit() or "")[:7]


def machine() -> dict[str, str]:
    """What the numbers depend on."""
    names = [
        line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "cpu": names[0].partition(":")[2].strip() if names else "unknown",
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def append_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Append rows to a CSV file, with a header if it is new."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    """Measure, print, append to the CSV file, and fail if a claim does not hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", action="append", choices=["bfloat16", "float32"])
    parser.add_argument("--tokens", type=int, default=128, help="tokens a sequence")
    parser.add_argument("--out", type=Path, help="CSV file to append to")
    args = parser.parse_args()
    rows = [
        row
        for dtype in args.dtype or ["bfloat16", "float32"]
        for row in measure(dtype, args.tokens)
    ]
    if args.out is not None:
        append_rows(args.out, [{**machine(), **row} for row in rows])
    limits = {"round": MOST_RATIO, "peak": MOST_MEGABYTES}
    broken = [
        row
        for row in rows
        if float(row["value"]) > limits[row["what"].partition("/")[0].split()[0]]
    ]
    if broken:
        raise SystemExit(f"not within the claim: {broken}")


if __name__ == "__main__":
    main()
