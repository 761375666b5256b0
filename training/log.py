"""The log of a run: a JSON object a line, and a picture of it."""

import json
from pathlib import Path
from typing import Any

from flashmap.files import write_figure, write_whole

FILE, PICTURE = "log.jsonl", "log.png"


class Log:
    """Rows of a run, kept in its folder; only the main process writes."""

    def __init__(self, folder: Path, writes: bool) -> None:
        self.path, self.writes = folder / FILE, writes
        if writes:
            folder.mkdir(parents=True, exist_ok=True)

    def add(self, row: dict[str, Any]) -> None:
        """Append a row."""
        if self.writes:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    def rows(self) -> list[dict[str, Any]]:
        """All rows; what follows a line that a kill cut short is left out."""
        rows = []
        if self.path.is_file():
            for line in self.path.read_text(encoding="utf-8").splitlines():
                try:
                    row = json.loads(line)
                    int(row["step"])
                except (ValueError, TypeError, KeyError):
                    break
                rows.append(row)
        return rows

    def forget_after(self, step: int) -> None:
        """Drop rows of steps that will be taken again."""
        if self.writes:
            kept = [row for row in self.rows() if row["step"] <= step]
            text = "".join(json.dumps(row) + "\n" for row in kept)
            write_whole(self.path, text.encode())

    def plot(self) -> None:
        """Draw cross-entropy and acceptance over the steps, beside the log."""
        rows = self.rows()
        if not self.writes or not rows:
            return
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 6), layout="constrained")
        losses, lengths = figure.subplots(2, 1, sharex=True)
        for axes, names in (
            (losses, ("cross_entropy",)),
            (lengths, ("acceptance_length_0", "acceptance_length_1")),
        ):
            for name in names:
                points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
                if points:
                    label = name.replace("_length_", " length at temperature ").replace("_", " ")
                    axes.plot(*zip(*points, strict=True), marker=".", label=label)
            axes.grid(alpha=0.3)
            if axes.lines:
                axes.legend()
        losses.set_ylabel("nats a slot")
        lengths.set_ylabel("tokens a pass, held out")
        lengths.set_xlabel("step")
        write_figure(self.path.with_name(PICTURE), figure, dpi=120)
