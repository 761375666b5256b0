"""Counts the tokens of a corpus in several processes.

Every process has the target's tokenizer, reads pieces by itself and sends back how often each token
came. A text is handed to the tokenizer in segments of a few thousand characters, one at a time: the
processes share the cores, so the tokenizer's own threads would only get in each other's way.
"""

import multiprocessing
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer

from .corpus import Piece, Record, read_records
from .target import Target

SEGMENT = 2**14  # characters
AHEAD = 4  # pieces a process that wait for it

Item = TypeVar("Item")
Result = TypeVar("Result")


class Workers:
    """Processes that work on a corpus for a target."""

    def __init__(self, target: Target, num_processes: int) -> None:
        self._pool = ProcessPoolExecutor(
            num_processes,
            # Forked processes would inherit the threads of torch and of the tokenizer, stopped.
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_start,
            initargs=(target,),
        )
        self._most_waiting = AHEAD * num_processes

    def run(
        self, function: Callable[[Item], Result], items: Mapping[int, Item]
    ) -> Iterator[tuple[int, Result]]:
        """`function` of every item, by key, as they finish. Raises what it raises, and ValueError
        if a process dies."""
        waiting: dict[Future[Result], int] = {}
        rest = iter(items.items())
        try:
            while True:
                for key, item in rest:
                    waiting[self._pool.submit(function, item)] = key
                    if len(waiting) >= self._most_waiting:
                        break
                if not waiting:
                    return
                for done in wait(waiting, return_when=FIRST_COMPLETED).done:
                    yield waiting.pop(done), done.result()
        except BrokenProcessPool as error:
            raise ValueError(
                "a counting process was ended from outside, often for lack of memory; give fewer"
                " --processes"
            ) from error

    def close(self) -> None:
        """End the processes; what they have not begun is not done."""
        self._pool.shutdown(cancel_futures=True)


@contextmanager
def start_workers(target: Target, num_processes: int) -> Iterator[Workers]:
    """Workers that end with the block."""
    workers = Workers(target, num_processes)
    try:
        yield workers
    finally:
        workers.close()


def check_piece(piece: Piece) -> int:
    """Characters of text in a piece, blanks aside. Raises ValueError for what cannot be read."""
    return sum(len(text.strip()) for record in read_records(piece) for text in _spoken(record))


def _spoken(record: Record) -> Sequence[str]:
    """The texts of a record as they stand in it."""
    if isinstance(record, str):
        return [record]
    return [turn["content"] for turn in record if isinstance(turn.get("content"), str)]


def count_piece(piece: Piece) -> Counter[int]:
    """How often each token comes in a piece. Raises ValueError for a conversation that the target's
    template refuses."""
    assert _worker is not None
    counts: Counter[int] = Counter()
    for record in read_records(piece):
        for segment in segments(_worker.text(record, piece.path)):
            counts.update(_worker.encode(segment))
    return counts


def segments(text: str, length: int = SEGMENT) -> Iterator[str]:
    """`text` in parts of about `length` characters, cut after lines or else before spaces."""
    start = 0
    while len(text) - start > length:
        end = text.rfind("\n", start, start + length) + 1
        while end > start and text[end : end + 1] == "\n":  # blank lines stay with what precedes
            end += 1
        if end <= start:
            end = text.rfind(" ", start + 1, start + length)
        if end <= start:
            end = start + length
        yield text[start:end]
        start = end
    yield text[start:]


class _Worker:
    """What a process keeps between pieces: the tokenizer, and the template once it is needed."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.tokenizer = Tokenizer.from_str(target.tokenizer)
        # Settings that files of tokenizers carry along; either would falsify the counts.
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()

    @cached_property
    def chat(self) -> Any:
        """What fills in the chat template; made when the first conversation comes."""
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast(
            tokenizer_object=self.tokenizer,
            chat_template=self.target.template,
            **self.target.specials,
        )

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without those that the tokenizer would put around it."""
        ids: list[int] = self.tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def text(self, record: Record, path: Path) -> str:
        """A record as the target reads it: conversations through its chat template."""
        if isinstance(record, str):
            return record
        try:
            text: str = self.chat.apply_chat_template(record, tokenize=False)
        except Exception as error:  # noqa: BLE001 - a template may raise anything
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(
                f"corpus {path}: the target's chat template refuses the conversation that begins"
                f" {str(record[0])[:80]}: {reason}"
            ) from None
        return text


_worker: _Worker | None = None


def _start(target: Target) -> None:
    """Prepare a process. It leaves interruptions to the one that started it, and ends with it."""
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker = _Worker(target)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
