"""Pairs as the Space holds them, and drafters that misbehave."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pair import Names, Pair

from . import pair_folders, toys


def toy_pair(draft: Any = None, **changes: Any) -> Pair:
    """A tiny target with a byte-level tokenizer, and a drafter for it."""
    target = toys.llama(vocab_size=pair_folders.ROWS, **changes)
    draft = draft or toys.drafter(vocab_size=pair_folders.ROWS)
    return Pair(Names("toy/draft", "toy/target"), target, draft, pair_folders.tokenizer())


class Watched:
    """A drafter that takes its time, fails where it is told to, and notes how a stream ended.

    `rounds` counts rounds that were asked for, `closed` streams that were closed or ran out.
    """

    def __init__(self, seconds: float = 0.0, fail_at: int | None = None) -> None:
        self._draft = toys.drafter(vocab_size=pair_folders.ROWS)
        self.config = self._draft.config
        self.seconds, self.fail_at = seconds, fail_at
        self.error: Exception = RuntimeError("the wires are crossed")
        self.rounds, self.closed = 0, 0

    def stream_generate(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """The drafter's own stream, watched."""
        inner = self._draft.stream_generate(*args, **kwargs)
        return self._watch(inner)

    def _watch(self, inner: Any) -> Iterator[Any]:
        try:
            for number, one in enumerate(inner):
                self.rounds += 1
                if number == self.fail_at:
                    raise self.error
                time.sleep(self.seconds)
                yield one
        finally:
            inner.close()
            self.closed += 1


@contextmanager
def served(pair: Pair) -> Iterator[str]:
    """The page for `pair` on a free port of this machine; gives its address."""
    from app import LINKS, STYLE, THEME, Page

    blocks = Page(pair).blocks
    _, address, _ = blocks.launch(
        prevent_thread_lock=True, quiet=True, ssr_mode=False, server_name="127.0.0.1",
        theme=THEME, css_paths=STYLE, footer_links=LINKS,
    )  # fmt: skip
    try:
        yield address
    finally:
        blocks.close(verbose=False)
