"""`flashmap demo`: the whole story on a real model, in about a minute.

Builds a release folder of the embedded drafter, checks it, and hands it to a process that has no
flashmap. There AutoModel loads it with its own remote code, and the embedded target writes the same
texts twice: alone and with the drafter. Two claims are shown apart. Speed, in the dtype people use,
where two nearly tied tokens may round either way. Exactness, in float32, where every token has to
be the same: if one is not, the demo fails.
"""

import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import Json
from .output import print_json, results_on_stdout

if TYPE_CHECKING:
    from flashmap.release.build import Build

PROMPTS = (
    "List five tips for better sleep.",
    "Write a Python function that adds two numbers.",
    "What is photosynthesis?",
)
FOLDER = "smollm2-135m-flashmap"
# Rounding steps between two logits that rounding may still swap: bfloat16 logits of this target are
# that far from float32 (benchmarks/near_ties.py).
NEAR_TIE = 4.0


def demo(
    max_new_tokens: Annotated[int, typer.Option(help="Tokens a prompt.")] = 64,
    json: Json = False,
) -> None:
    """Build, check and load the embedded drafter, and decode with it beside plain decoding."""
    if max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens {max_new_tokens}: ask for at least 1 token")
    story = _Story(quiet=json)
    with results_on_stdout():
        target, folder, checks = _prepare(story)
    results = _decode(story, target, folder, max_new_tokens)
    summary = [
        _summarise(dtype, results) for dtype in dict.fromkeys(row["dtype"] for row in results)
    ]
    exact = [row for row in results if row["dtype"] == "float32"]
    if json:
        document = {
            "target": str(target),
            "folder": str(folder),
            "checks": checks,
            "results": results,
            "summary": summary,
        }
        print_json(document)
    else:
        story.end(summary, folder, ties=any(_near_tie(row) for row in results))
    broken = [row["prompt"] for row in exact if not row["same"]]
    if broken:
        raise ValueError(
            f"in float32, {len(broken)} of {len(exact)} texts differ from plain decoding, the "
            f"first for {broken[0]!r}. "
            "Decoding must not change a token: please report this with the output of `flashmap "
            "doctor`"
        )


def _prepare(story: "_Story") -> tuple[Path, Path, int]:
    """The target's folder, the checked release folder, and how many checks passed."""
    from flashmap.embedded import cache_folder, embedded_target
    from flashmap.references import EMBEDDED, drafter_folder
    from flashmap.release.check import FAILED, check_release
    from flashmap.release.errors import ReleaseError

    source = drafter_folder(EMBEDDED)
    target = embedded_target()
    story.step("target", f"SmolLM2-135M-Instruct, {target}")
    with story.busy("building the release folder"):
        built = _build(source, cache_folder() / "demo" / FOLDER)
    size = sum(built.files.values()) / 1e6
    story.step("build", f"{len(built.files)} files, {size:.1f} MB, {built.folder}")
    with story.busy("checking it"):
        findings = check_release(built.folder)
    for finding in findings:
        if finding.status == FAILED:
            raise ReleaseError(finding.check, finding.found, finding.expected, finding.fix)
    story.step("check", f"{len(findings)} of {len(findings)} passed, from file names to logits")
    return target, built.folder, len(findings)


def _build(source: Path, folder: Path) -> "Build":
    """The release folder in the cache, which is the demo's own: a damaged one is made anew."""
    from flashmap.release.build import build_release
    from flashmap.release.errors import ReleaseError

    try:
        return build_release(source, folder)
    except ReleaseError as error:
        if error.check != "out" or isinstance(error.__cause__, OSError):  # the disk is to blame
            raise
    if folder.is_dir() and not folder.is_symlink():
        shutil.rmtree(folder)
    else:
        folder.unlink()
    return build_release(source, folder)


def _decode(
    story: "_Story", target: Path, folder: Path, max_new_tokens: int
) -> list[dict[str, Any]]:
    from flashmap.release.fresh import run_fresh

    script = Path(__file__).resolve().with_name("demo_script.py")
    results = []
    with story.busy("loading in a fresh process"):
        for event in run_fresh(script, [str(target), str(folder), str(max_new_tokens), *PROMPTS]):
            if event["event"] == "loaded":
                story.step(
                    "load",
                    f"AutoModel, trust_remote_code, transformers {event['transformers']}, on "
                    f"{event['device']}, in a "
                    "process that has no flashmap",
                )
            elif event["event"] == "decoded":
                results.append(event)
                story.sample(event)
    if not results:
        raise ValueError("the fresh process ended without a result; run `flashmap doctor`")
    return results


def _summarise(dtype: str, results: list[dict[str, Any]]) -> dict[str, Any]:
    rows = [row for row in results if row["dtype"] == dtype]
    lengths = [length for row in rows for length in row["acceptance_lengths"]]
    rate = sum(row["tokens"] for row in rows) / sum(row["seconds"] for row in rows)
    plain_rate = sum(row["plain_tokens"] for row in rows) / sum(
        row["plain_seconds"] for row in rows
    )
    return {
        "dtype": dtype,
        "texts": len(rows),
        "same": sum(row["same"] for row in rows),
        "acceptance_length": sum(lengths) / max(len(lengths), 1),
        "tokens_per_second": rate,
        "plain_tokens_per_second": plain_rate,
        "speedup": rate / plain_rate,
    }


@dataclass
class _Story:
    """Tells what happens: in colour on a terminal, in plain lines elsewhere, not at all with
    --json."""

    quiet: bool

    def __post_init__(self) -> None:
        import sys

        from rich.console import Console

        # Bound now: what libraries print later is sent elsewhere by way of sys.stdout.
        self._console = Console(file=sys.stdout, quiet=self.quiet, highlight=False, soft_wrap=True)
        # Dtypes and prompts that had their heading and their text.
        self._shown: set[str] = set()

    def busy(self, what: str) -> Any:
        """A spinner on a terminal's stderr while something takes long."""
        from rich.console import Console

        console = Console(stderr=True, quiet=not self._console.is_terminal)
        return console.status(what)

    def step(self, name: str, text: str) -> None:
        """One finished step."""
        self._console.print(f"[bold cyan]{name:<8}[/]", end="")
        self._console.print(text, markup=False)

    def sample(self, row: dict[str, Any]) -> None:
        """One prompt: its text the first time it comes, and the numbers of both ways."""
        from rich.padding import Padding
        from rich.text import Text

        if row["dtype"] not in self._shown:
            self._console.print(f"\n[bold]{_title(row['dtype'])}[/]")
        self._console.print(Text(f"\n> {row['prompt']}", style="bold"))
        if row["prompt"] not in self._shown:
            text = Text(row["text"].strip())
            self._console.print(Padding(text, (0, 0, 0, 2), expand=False), soft_wrap=False)
        self._shown |= {row["dtype"], row["prompt"]}
        plain_rate, rate = (
            row["plain_tokens"] / row["plain_seconds"],
            row["tokens"] / row["seconds"],
        )
        lengths = row["acceptance_lengths"]
        self._console.print(
            f"  [dim]plain {plain_rate:.1f} tokens/s, FlashMap {rate:.1f} tokens/s "
            f"({rate / plain_rate:.2f}x), "
            f"{sum(lengths) / max(len(lengths), 1):.2f} tokens a pass;[/] {_verdict(row)}"
        )

    def end(self, summary: list[dict[str, Any]], folder: Path, *, ties: bool) -> None:
        """The table of both dtypes, and where to go from here."""
        from rich.table import Table

        table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
        for header in (
            "dtype",
            "plain tok/s",
            "FlashMap tok/s",
            "speedup",
            "acceptance",
            "same words",
        ):
            table.add_column(header, justify="left" if header == "dtype" else "right")
        for row in summary:
            table.add_row(
                row["dtype"],
                f"{row['plain_tokens_per_second']:.1f}",
                f"{row['tokens_per_second']:.1f}",
                f"{row['speedup']:.2f}x",
                f"{row['acceptance_length']:.2f}",
                f"{row['same']} of {row['texts']}",
            )
        self._console.print()
        self._console.print(table)
        self._console.print()
        if ties:
            self._console.print(
                "Where two tokens are within rounding of each other, one pass over several tokens "
                "may pick the\nother one. Both are what the target says; float32, with far finer "
                "steps, tells them apart.\n"
            )
        self._console.print("Load the folder yourself:", style="bold")
        self._console.print(
            f"  AutoModel.from_pretrained({str(folder)!r}, trust_remote_code=True)", markup=False
        )
        self._console.print("Next:", style="bold")
        self._console.print(
            '  flashmap generate "Why is the sky blue?" --target smollm2-135m --draft smollm2-135m',
            markup=False,
        )


def _title(dtype: str) -> str:
    if dtype == "float32":
        return "Exactness: the same in float32, where every token must be the one of plain decoding"
    return f"Speed: greedy decoding in {dtype}"


def _verdict(row: dict[str, Any]) -> str:
    if row["same"]:
        return f"[green]the same words, all {row['tokens']} tokens[/]"
    colour, reason = "red", "then another token: please report this"
    if row["gap"] is not None:
        steps = max(1, math.ceil(row["gap"]))
        reason = (
            f"where the target's two best tokens are within {steps} rounding "
            f"step{'s' if steps > 1 else ''}"
        )
        if row["gap"] > NEAR_TIE:
            reason = (
                f"where the target's two best tokens are {row['gap']:.2f} rounding steps apart: "
                f"please report this"
            )
        if _near_tie(row):
            colour = "yellow"
    return f"[{colour}]the same words up to token {row['parts_at'] + 1}, {reason}[/]"


def _near_tie(row: dict[str, Any]) -> bool:
    """Whether rounding explains that the row's texts part; in float32 it is not accepted."""
    gap = row["gap"]
    return gap is not None and gap <= NEAR_TIE and row["dtype"] != "float32"
