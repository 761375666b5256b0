"""What the Space's page costs: tokens a second of a race with the page around it and without.

    .venv-space/bin/python benchmarks/space_overhead.py [--out FILE.csv]

The same race of the embedded pair, once as a bare loop, once served by the page's own server on
this machine to a client in another process, in turns of who begins. Tokens a second are of both
sides together by the wall clock, from the first token to the last: what the page and its server do
in between counts. The claim is a loss of at most 5 %. A browser's own work is the visitor's.

Beside it, the share of the wall clock that passes between the sides' turns: what the page does then
shows there on a busy machine too, where rates of two runs cannot be compared.
"""

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "space"))
from decode_cpu import append_rows, machine

from pair import EMBEDDED, load
from race import Settings, Step, encode, race, warm_up

MOST_LOSS = 0.05
PROMPT = "Write a short e-mail that asks a colleague for the slides of yesterday's meeting."
CLIENT = """
import sys
from gradio_client import Client
page = Client(sys.argv[1], verbose=False)
for line in sys.stdin:
    page.predict(*eval(line), api_name="/race")
    print("done", flush=True)
"""


class Clock:
    """Stands around `race.race` and notes the wall clock between its first event and its last."""

    def __init__(self, race: Any) -> None:
        self.race = race
        self.tokens, self.seconds, self.between = 0, 0.0, 0.0

    def __call__(self, *args: Any) -> Any:
        """The race, watched."""
        began, self.tokens, in_turns = 0.0, 0, 0.0
        for event in self.race(*args):
            if not began:
                began = time.perf_counter()
            elif isinstance(event, Step):
                self.tokens += len(event.tokens)
                in_turns += event.seconds
            self.seconds = time.perf_counter() - began
            self.between = 1 - in_turns / self.seconds if in_turns else 0.0
            yield event

    @property
    def rate(self) -> float:
        """Tokens a second of the last race."""
        return self.tokens / self.seconds


def measure(repeats: int, tokens: int) -> dict[str, Any]:
    """Median rates with and without the page, and the median loss of a pair of races."""
    import app

    pair = load(EMBEDDED)
    ids, settings = encode(pair, PROMPT), Settings(max_new_tokens=tokens)
    warm_up(pair, ids)
    clock = app.race = Clock(race)
    blocks = app.Page(pair).blocks
    _, address, _ = blocks.launch(prevent_thread_lock=True, quiet=True, ssr_mode=False)
    command = [sys.executable, "-c", CLIENT, address]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as client:
        assert client.stdin is not None and client.stdout is not None

        def served(tokens: int = tokens) -> float:
            print((PROMPT, 1, 1, 0.0, tokens, 0), file=client.stdin, flush=True)
            assert client.stdout.readline() == "done\n"
            between.append(clock.between)
            return clock.rate

        def bare() -> float:
            for _ in clock(pair, ids, settings):
                pass
            return clock.rate

        between: list[float] = []
        served(16)
        rates: dict[Any, list[float]] = {served: [], bare: []}
        for repeat in range(repeats):
            for run in (served, bare) if repeat % 2 else (bare, served):
                rates[run].append(run())
        client.stdin.close()
    blocks.close(verbose=False)
    losses = [1 - a / b for a, b in zip(rates[served], rates[bare], strict=True)]
    return {
        "races": repeats,
        "tokens": tokens,
        "bare_tokens_per_second": f"{statistics.median(rates[bare]):.2f}",
        "page_tokens_per_second": f"{statistics.median(rates[served]):.2f}",
        "loss": f"{statistics.median(losses):.4f}",
        "between_turns": f"{statistics.median(between[1:]):.4f}",
    }


def main() -> None:
    """Measure, print, append to the CSV file, and fail if the claim does not hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96, help="new tokens of each side")
    parser.add_argument("--out", type=Path, help="CSV file to append to")
    args = parser.parse_args()
    try:
        import gradio
    except ImportError as error:
        print(f"skipped: {error}. Run it with .venv-space/bin/python (made by `make space`).")
        return
    row = measure(args.repeats, args.tokens)
    for name, value in row.items():
        print(f"{name}: {value}")
    if args.out is not None:
        append_rows(args.out, [{**machine(), "gradio": gradio.__version__, **row}])
    if float(row["loss"]) > MOST_LOSS:
        raise SystemExit(f"the page costs {float(row['loss']):.1%}, more than {MOST_LOSS:.0%}")


if __name__ == "__main__":
    main()
