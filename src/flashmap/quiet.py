"""Keeps transformers quiet where our own messages and bars say what matters."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet(*, bars: bool = False) -> Iterator[None]:
    """Keep transformers from logging what it misses or guesses; with `bars` its progress bars stay
    on a terminal, and are never written to anything else."""
    from transformers.utils import logging

    verbosity, shown = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    if not (bars and sys.stderr.isatty()):
        logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()
