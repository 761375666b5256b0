"""Ranks a target's tokens by how often they come in a corpus, for drafters that say only the most
frequent ones.

The corpus is read and checked as a whole before a token is counted, so that a bad line near its end
costs seconds and not the run. What has been counted is kept beside the result until that is there;
the same command goes on from it, after a kill at any moment too, to the same bytes.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from flashmap.files import only_writer
from flashmap.manifest import file_sha256
from flashmap.vocabulary import raise_counts, rank_tokens, write_draft_vocab

from .corpus import PIECE, Piece, corpus_files, split_file
from .count import SEGMENT, Workers, check_piece, count_piece, start_workers
from .coverage import Size, coverage_curve, draw_coverage, recommend_size, unseen_share
from .tally import Tally
from .target import Target, read_target

WANTED = 0.995  # share of tokens that a recommended size covers
MOST_PROCESSES = 1024

# Told the stage, what is done and what there is to do.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Vocabulary:
    """A ranking, and what it says about sizes.

    Attributes:
        file: the ranking, draft_vocab.safetensors.
        picture: the curve of coverage; None without matplotlib.
        target: the target as it is recorded.
        vocab_size: ids that are ranked.
        tokens: how many were counted.
        distinct: how many different ones.
        unseen: estimated share of tokens in other such text that this corpus does not hold.
        files: number of corpus files.
        size: their bytes.
        corpus_sha256: digest of the corpus: sha256 of the files' sorted sha256, a line each.
        required: ids that rank first whatever their count.
        coverage: the curve.
        recommended: size that covers the share asked for.
        seconds: that this run took.
    """

    file: Path
    picture: Path | None
    target: str
    vocab_size: int
    tokens: int
    distinct: int
    unseen: float
    files: int
    size: int
    corpus_sha256: str
    required: list[int]
    coverage: list[Size]
    recommended: Size
    seconds: float


def rank_vocabulary(
    target: str,
    corpus: Iterable[Path],
    out: Path,
    *,
    num_processes: int | None = None,
    wanted: float = WANTED,
    progress: Progress = lambda stage, done, total: None,
) -> Vocabulary:
    """Rank the tokens of `target` on the files of `corpus` and write the ranking to `out`.

    `wanted` is the share of tokens that the recommended size covers. Raises ValueError for a
    corpus, a target or a file that cannot be used, and when it is interrupted.
    """
    _require_sound(out, num_processes, wanted)
    about = read_target(target)
    files = corpus_files(corpus)
    with only_writer(out):
        return _rank(about, files, out, num_processes or _cores(), wanted, progress)


def _rank(
    about: Target, files: list[Path], out: Path, processes: int, wanted: float, progress: Progress
) -> Vocabulary:
    started = time.monotonic()
    before = _stats(files)
    digests, tally = _count_corpus(about, files, out, processes, progress)
    if _stats(files) != before:
        raise ValueError(
            "the corpus changed while it was counted: start again, nothing was written"
        )
    if not tally.counts:
        raise ValueError(f"the tokenizer in {about.folder} makes no tokens of this corpus")
    counts = torch.zeros(about.vocab_size, dtype=torch.int64)
    counts[list(tally.counts)] = torch.tensor(list(tally.counts.values()))
    corpus_sha256 = hashlib.sha256("\n".join(sorted(digests)).encode()).hexdigest()
    metadata = {
        "target_model": about.name,
        "target_revision": about.revision or "",
        "target_vocab_hash": about.vocab_hash,
        "corpus_sha256": corpus_sha256,
        "tokens_seen": str(int(counts.sum())),
    }
    write_draft_vocab(out, counts, metadata, about.required)
    ranked = counts[rank_tokens(raise_counts(counts, about.required)[0])]
    recommended, picture = recommend_size(ranked, wanted), out.with_suffix(".png")
    drawn = draw_coverage(ranked, recommended, picture)
    tally.remove()
    return Vocabulary(
        file=out,
        picture=picture if drawn else None,
        target=about.name,
        vocab_size=about.vocab_size,
        tokens=int(counts.sum()),
        distinct=int((counts > 0).sum()),
        unseen=unseen_share(counts),
        files=len(files),
        size=sum(size for size, _ in before),
        corpus_sha256=corpus_sha256,
        required=about.required,
        coverage=coverage_curve(ranked),
        recommended=recommended,
        seconds=time.monotonic() - started,
    )


def _require_sound(out: Path, num_processes: int | None, wanted: float) -> None:
    from safetensors import SafetensorError, safe_open

    if num_processes is not None and not 1 <= num_processes <= MOST_PROCESSES:
        raise ValueError(f"--processes {num_processes}: 1 to {MOST_PROCESSES} can count")
    if not 0.0 < wanted <= 1.0:
        raise ValueError(f"--coverage {wanted}: give a share above 0, up to 1")
    if out.suffix != ".safetensors":
        raise ValueError(f"--out {out}: name a .safetensors file, such as draft_vocab.safetensors")
    if not out.exists():
        return
    found: set[str] = set()
    with suppress(SafetensorError, OSError), safe_open(out, framework="pt") as file:
        found = set(file.keys())
    if found != {"ids", "counts"}:
        raise ValueError(f"--out {out} is there and is no ranking of tokens; name another file")


def _count_corpus(
    target: Target, files: list[Path], out: Path, num_processes: int, progress: Progress
) -> tuple[list[str], Tally]:
    """sha256 of every file, and the counts of all. Raises ValueError for what cannot be counted."""
    pieces = dict(enumerate(piece for file in files for piece in split_file(file)))
    num_processes = min(num_processes, len(pieces) or 1)
    with start_workers(target, num_processes) as workers:
        digests = _hash_and_check(workers, files, pieces, progress)
        depends_on = [target.tokenizer, target.template, digests, PIECE, SEGMENT]
        fingerprint = hashlib.sha256(json.dumps(depends_on).encode()).hexdigest()
        tally = Tally(out.with_name(f".{out.name}.counts.json"), fingerprint)
        rest = {index: piece for index, piece in pieces.items() if index not in tally.done}
        try:
            for index, counts in workers.run(count_piece, rest):
                tally.add(index, counts)
                progress("count", len(tally.done), len(pieces))
        except KeyboardInterrupt:
            raise ValueError(
                f"interrupted with {len(tally.done)} of {len(pieces)} pieces counted; the same"
                " command goes on from there"
            ) from None
        finally:
            tally.save()
    return digests, tally


def _hash_and_check(
    workers: Workers, files: list[Path], pieces: dict[int, Piece], progress: Progress
) -> list[str]:
    """sha256 of every file. Raises ValueError for text that cannot be read and where is none."""
    digests: dict[int, str] = {}
    for index, digest in workers.run(file_sha256, dict(enumerate(files))):
        digests[index] = digest
        progress("hash", len(digests), len(files))
    characters = 0
    for done, (_, found) in enumerate(workers.run(check_piece, pieces), 1):
        characters += found
        progress("check", done, len(pieces))
    if not characters:
        raise ValueError(f"the corpus holds no text: {', '.join(map(str, files[:3]))}")
    return [digests[index] for index in range(len(files))]


def _stats(files: Sequence[Path]) -> list[tuple[int, int]]:
    """Size and time of change of every file."""
    found = [file.stat() for file in files]
    return [(one.st_size, one.st_mtime_ns) for one in found]


def _cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on every system
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
