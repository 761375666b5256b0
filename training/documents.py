"""Documents: the token ids that a drafter learns from, with what has to be known about each.

A document is a prompt and the answer that follows it. They are kept in files of a few thousand,
token ids end to end, in the fewest bytes that the vocabulary needs.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from flashmap.files import write_whole
from flashmap.loops import cut_loop

FILE = re.compile(r"documents-(\d{5})\.safetensors")
SMALL_VOCABULARY = 2**16
MIN_ANSWER = 2  # an anchor and a token after it


@dataclass(frozen=True)
class Document:
    """A prompt and its answer.

    Attributes:
        prompt: token ids before the answer, the chat template's included.
        answer: token ids that the drafter learns to predict.
        temperature: that the answer was sampled at; -1 for text that the target did not write.
        held_out: whether training must not see it.
    """

    prompt: list[int]
    answer: list[int]
    temperature: float
    held_out: bool


@dataclass(frozen=True)
class Documents:
    """Many documents.

    Attributes:
        tokens: all token ids end to end.
        offsets: where each document starts in `tokens`, and the end of the last, int64 (n + 1).
        prompt_lengths: int64 (n).
        temperatures: float32 (n).
        held_out: bool (n).
    """

    tokens: Tensor
    offsets: Tensor
    prompt_lengths: Tensor
    temperatures: Tensor
    held_out: Tensor

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    @property
    def lengths(self) -> Tensor:
        """Tokens of each document, prompt included, int64 (n)."""
        return self.offsets.diff()

    def answer_counts(self, vocab_size: int) -> Tensor:
        """How often each token comes in the answers of training documents, int64 (V)."""
        lengths = self.lengths
        places = torch.arange(len(self.tokens)) - self.offsets[:-1].repeat_interleave(lengths)
        counted = places >= self.prompt_lengths.repeat_interleave(lengths)
        counted &= ~self.held_out.repeat_interleave(lengths)
        return torch.bincount(self.tokens.to(torch.int32)[counted], minlength=vocab_size)

    def require_known(self, vocab_size: int) -> None:
        """Raise ValueError for token ids that are not below `vocab_size`."""
        highest = int(self.tokens.to(torch.int32).max()) if len(self.tokens) else 0
        if highest >= vocab_size:
            raise ValueError(
                f"the documents hold token id {highest}, the drafter's vocabulary ends before"
                f" {vocab_size}: they were made for another target; name theirs, or make new ones"
                " in another data.folder."
            )

    def select(self, chosen: Tensor) -> "Documents":
        """The documents at these indices or under this mask."""
        indices = chosen.nonzero()[:, 0] if chosen.dtype == torch.bool else chosen
        parts = [self.tokens[self.offsets[i] : self.offsets[i + 1]] for i in indices.tolist()]
        lengths = torch.tensor([0, *map(len, parts)])
        return Documents(
            torch.cat(parts) if parts else self.tokens[:0],
            lengths.cumsum(0),
            self.prompt_lengths[indices],
            self.temperatures[indices],
            self.held_out[indices],
        )

    def to(self, device: torch.device) -> "Documents":
        """The same documents on another device, their tokens as int32 for indexing there."""
        return Documents(
            self.tokens.to(torch.int32).to(device),
            self.offsets.to(device),
            self.prompt_lengths.to(device),
            self.temperatures.to(device),
            self.held_out.to(device),
        )


def pack(documents: Sequence[Document], vocab_size: int) -> Documents:
    """Put documents end to end; token ids take 2 bytes where the vocabulary allows it, else 4."""
    texts = [document.prompt + document.answer for document in documents]
    flat = [token for text in texts for token in text]
    small = vocab_size <= SMALL_VOCABULARY
    return Documents(
        torch.tensor(flat, dtype=torch.int32).to(torch.uint16 if small else torch.int32),
        torch.tensor([0, *map(len, texts)]).cumsum(0),
        torch.tensor([len(document.prompt) for document in documents], dtype=torch.int64),
        torch.tensor([document.temperature for document in documents], dtype=torch.float32),
        torch.tensor([document.held_out for document in documents], dtype=torch.bool),
    )


def document_file(folder: Path, number: int) -> Path:
    """Path of the documents with this number."""
    return folder / f"documents-{number:05d}.safetensors"


def write_documents(path: Path, documents: Documents, about: dict[str, str]) -> None:
    """Write one file, whole or not at all; `about` says how it was made and is compared on
    resuming."""
    tensors = {name: getattr(documents, name) for name in Documents.__dataclass_fields__}
    write_whole(path, save(tensors, metadata=about))


def read_about(path: Path) -> dict[str, str]:
    """How the documents in `path` were made. Raises ValueError for a damaged file."""
    with _opened(path) as file:
        return dict(file.metadata() or {})


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path} is damaged ({error}): remove it, and `flashmap train data` makes it again."
        ) from error


def document_files(folder: Path) -> list[Path]:
    """The files of documents in `folder`, in order. Raises ValueError if there are none."""
    paths = sorted(path for path in folder.glob("*") if FILE.fullmatch(path.name))
    if not paths:
        raise ValueError(
            f"{folder} holds no documents-NNNNN.safetensors: make them with `flashmap train data`,"
            " or name another data.folder in the recipe."
        )
    return paths


def read_documents(*folders: Path) -> Documents:
    """All documents of `folders`, one after the other. Raises ValueError if one has none, or a
    damaged file."""
    files = []
    for path in (path for folder in folders for path in document_files(folder)):
        with _opened(path) as file:
            names = Documents.__dataclass_fields__
            files.append(Documents(*(file.get_tensor(name) for name in names)))
    starts = torch.tensor([0, *(len(file.tokens) for file in files)]).cumsum(0).tolist()
    offsets = [file.offsets[:-1] + start for file, start in zip(files, starts[:-1], strict=True)]
    return Documents(
        torch.cat([file.tokens for file in files]),
        torch.cat([*offsets, torch.tensor([starts[-1]])]),
        torch.cat([file.prompt_lengths for file in files]),
        torch.cat([file.temperatures for file in files]),
        torch.cat([file.held_out for file in files]),
    )


class Filter:
    """Cuts loops and drops what is too short or was there before; counts what it did.

    Loops are easy to draft: left in, they would flatter every number and take the drafter's
    attention from text.
    """

    def __init__(self) -> None:
        self.seen: set[int] = set()
        self.kept = self.looped = self.duplicates = self.short = 0

    def counts(self) -> dict[str, int]:
        """How many documents were kept, looped, there before, too short."""
        names = ("kept", "looped", "duplicates", "short")
        return {name: getattr(self, name) for name in names}

    def keep(self, documents: Iterable[Document]) -> list[Document]:
        """Those worth learning from, their loops cut off."""
        kept = []
        for document in documents:
            answer = cut_loop(document.answer)
            self.looped += len(answer) < len(document.answer)
            if len(answer) < MIN_ANSWER:
                self.short += 1
                continue
            key = hash((tuple(document.prompt), tuple(answer)))
            if key in self.seen:
                self.duplicates += 1
                continue
            self.seen.add(key)
            kept.append(Document(document.prompt, answer, document.temperature, document.held_out))
        self.kept += len(kept)
        return kept
