"""What a folder of training documents holds: numbers, and a picture of the lengths."""

import json
from pathlib import Path
from typing import Any

import torch

from flashmap.files import write_figure, write_whole
from flashmap.vocabulary import FILE, write_draft_vocab

from .data import file_counts
from .documents import read_documents

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
PICTURE, NUMBERS = "lengths.png", "report.json"


def report_data(folder: Path, target: str, vocab_size: int) -> dict[str, Any]:
    """Describe the documents of `folder`: numbers in report.json, a picture in lengths.png, and the
    target's tokens ranked by how often its answers use them in draft_vocab.safetensors."""
    documents = read_documents(folder)
    if not len(documents):
        raise ValueError(
            f"{folder} holds files without a document: every answer was too short or there before;"
            " remove it, and give other data."
        )
    counted = documents.answer_counts(vocab_size)
    about = {"target_model": target, "tokens_seen": str(int(counted.sum()))}
    write_draft_vocab(folder / FILE, counted, about | {"corpus": "training answers"})
    counts = file_counts(folder)
    answers = (documents.lengths - documents.prompt_lengths).double()
    made = counts["kept"] + counts["duplicates"] + counts["short"]
    temperatures, numbers = documents.temperatures.unique(return_counts=True)
    found = {
        "folder": str(folder),
        "documents": len(documents),
        "held_out": int(documents.held_out.sum()),
        "tokens": int(documents.lengths.sum()),
        "answer_tokens": int(answers.sum()),
        "answer_tokens_mean": float(answers.mean()),
        "answer_tokens_quantiles": {
            f"{share:g}": float(value)
            for share, value in zip(
                QUANTILES, answers.quantile(torch.tensor(QUANTILES).double()), strict=True
            )
        },
        "looped_share": counts["looped"] / made if made else 0.0,
        "duplicates": int(counts["duplicates"]),
        "too_short": int(counts["short"]),
        "temperatures": {
            f"{temperature:g}": int(number)
            for temperature, number in zip(temperatures, numbers, strict=True)
        },
        "seconds": counts.get("seconds", 0.0),
        "distinct_tokens": int((counted > 0).sum()),
        "picture": str(folder / PICTURE),
    }
    write_whole(folder / NUMBERS, (json.dumps(found, indent=2) + "\n").encode())
    _draw(answers, folder / PICTURE)
    return found


def _draw(answers: torch.Tensor, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.hist(answers.tolist(), bins=50)
    axes.set_xlabel("tokens of an answer")
    axes.set_ylabel("documents")
    write_figure(path, figure, dpi=120)
