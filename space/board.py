"""What the page shows of a race: texts coloured by round, numbers, the plot and the verdict.

HTML and plain numbers only, so that it can be tested without a browser. A text grows at its end
and nowhere else: then only its end travels to the browser.
"""

import html
from collections.abc import Sequence
from typing import Any

from pair import Pair
from race import FLASHMAP, PLAIN, Event, Parting, Settings, Side, Step

COLOURS = 6  # of rounds, in turn; style.css has them
UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class Words:
    """Turns tokens into text as they come; a character that takes several comes with its last."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # Tokens of the piece before and of the one that is not finished: how a token is written
        # depends on its neighbour, not on the whole text.
        self._before: list[int] = []
        self._open: list[int] = []

    def add(self, token: int) -> str:
        """What `token` adds to the text."""
        self._open.append(token)
        before = self._write(self._before)
        text = self._write(self._before + self._open)
        if text.endswith(UNFINISHED) and len(self._open) < 4:  # UTF-8 takes four bytes at most
            return ""
        self._before, self._open = self._open, []
        return text[len(before) :]

    def _write(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


class Board:
    """The state of the page during one race."""

    def __init__(self, pair: Pair, settings: Settings) -> None:
        self._pair, self._settings = pair, settings
        self.sides = {PLAIN: Side(), FLASHMAP: Side()}
        self.texts = {PLAIN: "", FLASHMAP: ""}
        self._words = {side: Words(pair.tokenizer) for side in self.sides}
        self._bars: list[str] = []
        self._parting: Parting | None = None

    def add(self, event: Event) -> None:
        """Take in what happened."""
        if isinstance(event, Parting):
            self._parting = event
            return
        side = self.sides[event.side]
        side.add(event)
        pieces = [html.escape(self._words[event.side].add(token)) for token in event.tokens]
        if event.side == PLAIN:
            self.texts[PLAIN] += "".join(pieces)
            return
        number = len(side.steps) - 1
        kind = f"c{number % COLOURS}" if number else "first"
        tip = html.escape(describe(number, event))
        drafted, bonus = "".join(pieces[: event.accepted]), "".join(pieces[event.accepted :])
        marked = f'<span class="bonus">{bonus}</span>' if bonus else ""
        self.texts[FLASHMAP] += (
            f'<span class="round {kind}" data-round="{number}" data-tip="{tip}">'
            f"{drafted}{marked}</span>"
        )
        if number:
            heights = f"--drafts:{event.accepted};--bonus:{len(event.tokens) - event.accepted}"
            self._bars.append(f'<i class="bar {kind}" style="{heights}" data-tip="{tip}"></i>')

    def head(self, side: str) -> str:
        """A side's name and its numbers so far."""
        state = self.sides[side]
        if not state.tokens:
            return heading(side)
        numbers = [("tokens/s", f"{state.rate:.1f}"), ("tokens", str(len(state.tokens)))]
        if side == FLASHMAP:
            numbers.append(("rounds", str(len(state.rounds))))
            numbers.append(("tokens a round", f"{state.acceptance_length:.2f}"))
        numbers.append(("s", f"{state.seconds:.1f}"))
        return heading(side, numbers)

    def score(self) -> str:
        """How many times as fast FlashMap is."""
        speedup = self.speedup
        if speedup is None:
            return score("idle")
        if speedup < 1:
            return score("slower", f"{speedup:.2f}×", "slower than plain decoding today")
        return score("faster", f"{speedup:.2f}×", "the speed of plain decoding")

    def plot(self) -> str:
        """Tokens of every round as bars, drafts below and the bonus token on top."""
        counts = [len(step.tokens) for step in self.sides[FLASHMAP].rounds]
        return plot(self._bars, counts, self._pair.block_size + 1)

    def verdict(self, ended_by: str = "") -> str:
        """The last line: whether both texts are identical, and why not if they are not."""
        texts = [side.tokens for side in self.sides.values()]
        count = min(map(len, texts))
        if ended_by:
            same = texts[0][:count] == texts[1][:count]
            so_far = f" Up to there the texts {'are identical' if same else 'differ'}."
            return note("info", ended_by + (so_far if self._settings.temperature == 0 else ""))
        if texts[0] == texts[1]:
            return note("good", f"Both texts are identical: all {count} tokens.")
        if self._parting is None:
            return note(
                "info",
                "Sampling: both texts are draws from the same distribution, so they differ. At"
                " temperature 0 they can be compared.",
            )
        return self._parted(self._parting)

    def _parted(self, parting: Parting) -> str:
        words = [self._pair.tokenizer.decode([token]) for token in parting.tokens]
        given = " and ".join(
            f"“{word}” {chance:.2%}"
            for word, chance in zip(words, parting.probabilities, strict=True)
        )
        found = (
            f"The texts are identical up to token {parting.place}. Then the target gives {given}"
        )
        if parting.is_near_tie:
            return note(
                "info",
                f"{found}: nearly a tie, and in {self._pair.dtype} one pass over several tokens"
                " rounds differently from a pass over one.",
            )
        return note(
            "bad", f"{found}: more than rounding explains. Please report it with the prompt."
        )

    @property
    def speedup(self) -> float | None:
        """Ratio of both rates; None before both have one."""
        plain, ours = self.sides[PLAIN].rate, self.sides[FLASHMAP].rate
        return ours / plain if plain and ours else None

    def result(self) -> dict[str, Any]:
        """The numbers and texts, for programs."""
        sides = {
            name: {
                "text": self._pair.tokenizer.decode(side.tokens, skip_special_tokens=True),
                "token_ids": side.tokens,
                "seconds": side.seconds,
                "tokens_per_second": side.rate,
            }
            for name, side in self.sides.items()
        }
        ours = self.sides[FLASHMAP]
        return {
            **sides,
            "acceptance_lengths": [len(step.tokens) for step in ours.rounds],
            "acceptance_length": ours.acceptance_length,
            "speedup": self.speedup,
            "identical": ours.tokens == self.sides[PLAIN].tokens,
            "seed": self._settings.seed,
        }


def describe(number: int, step: Step) -> str:
    """A round in words, for the hover."""
    took = f"{step.seconds * 1e3:.0f} ms"
    if number == 0:
        return f"First token, from the prompt's own pass, {took}"
    drafts = f"{step.accepted} draft{'' if step.accepted == 1 else 's'} accepted"
    bonus = " + bonus token" if len(step.tokens) > step.accepted else ", the end"
    return f"Round {number}: {drafts}{bonus}, {took}"


TITLES = {PLAIN: "Plain decoding", FLASHMAP: "FlashMap"}


def heading(side: str, numbers: Sequence[tuple[str, str]] = (("tokens/s", "–"),)) -> str:
    """The head of a pane: its first number large, the others in a line."""
    (unit, rate), *others = numbers
    small = "".join(f"<span><b>{value}</b> {name}</span>" for name, value in others)
    return (
        f'<div class="head {side}"><h2>{TITLES[side]}</h2>'
        f'<p class="rate"><b>{rate}</b> {unit}</p><p class="numbers">{small}</p></div>'
    )


def score(kind: str, number: str = "–", said: str = "FlashMap against plain decoding") -> str:
    """The one large number; `kind` is "idle", "faster" or "slower"."""
    return f'<p class="score {kind}"><b>{number}</b> {said}</p>'


def plot(bars: list[str], counts: list[int], top: int) -> str:
    """Bars in a frame whose height is `top` tokens, with a line at their mean."""
    mean = sum(counts) / len(counts) if counts else 0.0
    said = f"Tokens of each round: {', '.join(map(str, counts)) or 'none yet'}"
    line = (
        f'<span class="mean" style="--at:{mean:.3f}"><em>{mean:.2f}</em></span>' if counts else ""
    )
    return (
        '<figure class="plot"><figcaption>Tokens a round'
        f"<small>of at most {top}; their mean is the acceptance length</small></figcaption>"
        f'<div class="bars" style="--top:{top}" role="img" aria-label="{said}">'
        f'{"".join(bars)}<span class="one"></span>{line}</div></figure>'
    )


def note(kind: str, text: str) -> str:
    """A line about the whole race: "good", "info" or "bad"."""
    return f'<p class="note {kind}" role="status">{html.escape(text)}</p>'
