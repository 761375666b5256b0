"""What `flashmap release vocab` costs beside the bare tokenizer, and its memory on small and large
corpora.

    python benchmarks/vocab.py [--megabytes 64] [--memory 10 1000] [--out FILE]

Throughput: in every counting process, a piece of the corpus after the other, the tokenizer alone on
text in memory, and everything that is done to a piece (reading, hashing, checking, tokenizing,
counting), in turn, so that both meet the same neighbours. The claim is at least 80 % of the bare
tokenizer. The whole command is set beside as many bare tokenizers as it has processes, too; its
start counts there, and weighs the less the larger the corpus is.

Memory: the sum over all processes of the command of the most that each ever held (`VmHWM`, Linux
only). The claim is that a corpus a hundred times as large takes the same.
"""

import argparse
import csv
import datetime
import hashlib
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import tokenizers

from flashmap.release import count
from flashmap.release.corpus import PIECE, Piece, read_records, split_file
from flashmap.release.count import check_piece, count_piece, segments, start_workers
from flashmap.release.target import read_target
from flashmap.release.vocab import rank_vocabulary

ROOT = Path(__file__).resolve().parents[1]
TARGET = "smollm2-135m"
LEAST_RATIO, MOST_GROWTH = 0.8, 1.1
PARAGRAPHS, WORDS = 3000, 500

# What was measured, the value, and whether the claim about it holds.
Row = tuple[str, float, bool | None]


def paragraphs() -> list[str]:
    """Text with the words and the word frequencies of this repository's prose and code."""
    sources = [*ROOT.glob("*.md"), *ROOT.glob("*/*.py"), *ROOT.glob("training/prompt_data/*")]
    words = re.findall(r"\s*\S+", " ".join(path.read_text(encoding="utf-8") for path in sources))
    chance = random.Random(0)
    return ["".join(chance.choices(words, k=WORDS)) + "\n\n" for _ in range(PARAGRAPHS)]


def write_corpus(path: Path, megabytes: float) -> Path:
    """A file of that size: the same paragraphs again and again, in another order each time."""
    parts, chance, size = paragraphs(), random.Random(0), 0
    with path.open("w", encoding="utf-8") as file:
        while size < megabytes * 1e6:
            chance.shuffle(parts)
            for part in parts:
                file.write(part)
                size += len(part.encode())
                if size >= megabytes * 1e6:
                    break
    return path


def measure_piece(piece: Piece) -> tuple[list[float], list[float]]:
    """Seconds of tokenizing alone and of all the work on a piece, each as wall clock and CPU."""
    worker = count._worker
    assert worker is not None
    parts = [part for record in read_records(piece) for part in segments(worker.text(record, ROOT))]

    def bare() -> None:
        for part in parts:
            assert worker.encode(part)

    def whole() -> None:
        with piece.path.open("rb") as file:
            file.seek(piece.start)
            hashlib.sha256(file.read(piece.stop - piece.start)).hexdigest()
        check_piece(piece)
        count_piece(piece)

    first = piece.start // PIECE % 2  # each goes first as often as second
    taken = {work: seconds(work) for work in ((bare, whole), (whole, bare))[first]}
    return taken[bare], taken[whole]


def seconds(work: Callable[[], None]) -> list[float]:
    """Wall-clock and CPU seconds of some work."""
    began, used = time.perf_counter(), time.process_time()
    work()
    return [time.perf_counter() - began, time.process_time() - used]


def throughput(folder: Path, megabytes: float, processes: int) -> Iterator[Row]:
    """MB/s of a process that only tokenizes and of one that does everything, and their ratio."""
    path = write_corpus(folder / "throughput.txt", megabytes)
    pieces = dict(enumerate(split_file(path)))
    with start_workers(read_target(TARGET), processes) as workers:
        taken = [row for _, row in workers.run(measure_piece, pieces)]
    for kind, name in enumerate(("wall clock", "CPU time")):
        bare, whole = (sum(row[way][kind] for row in taken) for way in (0, 1))
        yield f"bare tokenizer, MB/s a process, {name}", megabytes / bare, None
        yield f"release vocab, MB/s a process, {name}", megabytes / whole, None
        yield f"release vocab / bare tokenizer, {name}", bare / whole, bare / whole >= LEAST_RATIO
    began = time.perf_counter()
    rank_vocabulary(TARGET, [path], path.with_suffix(".safetensors"), num_processes=processes)
    whole = time.perf_counter() - began
    bare = sum(row[0][0] for row in taken) / processes  # wall clock, side by side
    command = f"the whole command with its start, {megabytes:g} MB"
    yield f"{command}: MB/s", megabytes / whole, None
    yield f"{command} / bare tokenizers on the same cores", bare / whole, None


def memory(folder: Path, sizes: list[float], processes: int) -> Iterator[Row]:
    """Megabytes that the command holds at the most, for corpora of these sizes, and its MB/s."""
    peaks = []
    for megabytes in sizes:
        path = write_corpus(folder / "memory.txt", megabytes)
        words = ["release", "vocab", "--target", TARGET, "--processes", str(processes), "--corpus"]
        began = time.perf_counter()
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "flashmap.cli.main",
                *words,
                path,
                "--out",
                path.with_suffix(".safetensors"),
            ],
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        peaks.append(watch(process))
        fits = peaks[-1] <= MOST_GROWTH * peaks[0]
        taken = time.perf_counter() - began
        yield f"release vocab, {megabytes:g} MB: peak memory, MB", peaks[-1], fits
        yield f"release vocab, {megabytes:g} MB: MB/s", megabytes / taken, None


def watch(process: "subprocess.Popen[bytes]") -> float:
    """Sum over the processes of a session of the most memory that each held, in megabytes."""
    highest: dict[int, int] = {}
    while process.poll() is None:
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if os.getsid(int(folder.name)) == process.pid:
                    status = (folder / "status").read_text()
                    highest[int(folder.name)] = int(status.split("VmHWM:")[1].split()[0])
            except (OSError, IndexError):
                continue  # it ended meanwhile
        time.sleep(0.2)
    assert process.returncode == 0
    return sum(highest.values()) / 1000


def main() -> int:
    """Measure, print, write; 1 if a claim does not hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--megabytes", type=float, default=64.0)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--memory", type=float, nargs="*", default=[10.0, 1000.0])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/vocab.csv")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for what, value, holds in (
            *throughput(Path(name), args.megabytes, args.processes),
            *memory(Path(name), args.memory, args.processes),
        ):
            print(
                f"{what}: {value:.3f}{'' if holds is not False else '   NOT AS CLAIMED'}",
                flush=True,
            )
            rows.append((what, value, holds))
    about = provenance(args.processes)
    with args.out.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*about, "what", "value"])
        writer.writerows([*about.values(), what, f"{value:.3f}"] for what, value, _ in rows)
    return int(any(holds is False for _, _, holds in rows))


def provenance(processes: int) -> dict[str, object]:
    """When and on what this was measured."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return {
        "date": datetime.date.today().isoformat(),
        "commit": subprocess.run(git, check=False, capture_output=True, text=True).stdout.strip(),
        "cpu": cpu[1] if cpu else "unknown",
        "processes": processes,
        "tokenizers": tokenizers.__version__,
    }


if __name__ == "__main__":
    sys.exit(main())
