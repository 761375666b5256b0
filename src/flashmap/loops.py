"""Loops: text that only repeats itself, which small models fall into. A drafter accepts nearly
everything inside one, which says little about other text.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

LOOP_TOKENS, LOOP_TIMES, LOOP_LONGEST = 8, 4, 64


def ends_in_loop(token_ids: Sequence[int], stop_ids: Iterable[int] = ()) -> bool:
    """Whether the text ends in a repetition: its last 8 tokens stand there 4 times, evenly spaced
    by at most 64.

    A drafter accepts nearly everything inside such a loop, which says little about other text.
    """
    stops = set(stop_ids)
    tokens = list(token_ids)
    while tokens and tokens[-1] in stops:
        tokens.pop()
    for period in range(1, LOOP_LONGEST + 1):
        length = LOOP_TOKENS + (LOOP_TIMES - 1) * period
        if length > len(tokens):
            return False
        tail = tokens[-length:]
        if tail[period:] == tail[:-period]:
            return True
    return False


def cut_loop(tokens: Sequence[int]) -> list[int]:
    """`tokens` up to where their last 8 come for the fourth time, wherever the others stand."""
    seen: Counter[tuple[int, ...]] = Counter()
    for start in range(len(tokens) - LOOP_TOKENS + 1):
        gram = tuple(tokens[start : start + LOOP_TOKENS])
        seen[gram] += 1
        if seen[gram] == LOOP_TIMES:
            return list(tokens[:start])
    return list(tokens)
