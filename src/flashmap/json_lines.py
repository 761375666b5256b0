"""Lines of JSON that hold texts: prompts, conversations, a corpus."""

import json
import re
from typing import Any

# How JSON spells half of a pair of surrogates; two that belong together are one character.
HALF = re.compile(r"\\u[dD][89a-fA-F]")


def parse_line(line: str) -> Any:
    """The JSON value in ``line``. Raises ValueError if there is none, or if it has a character that
    no text has, and so no tokenizer takes."""
    try:
        value = json.loads(line)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if HALF.search(line):
        require_text(json.dumps(value, ensure_ascii=False))
    return value


def require_text(text: str) -> None:
    """Raise ValueError for half of a pair of surrogates, which JSON can spell, and which stands for
    a byte that was no UTF-8 in an argument of a command."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{text[error.start]!a} is no character of a text") from error
