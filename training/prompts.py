"""Prompts that the target answers, so that a drafter can be trained on the target's own words.

A drafter meets whatever its users type, so what counts here is breadth: of subjects, and of the
ways in which people open a request. Everything is put together out of hand-written parts in
prompt_data/: templates with {slots}, lists of what goes into the slots, passages to summarize, and
code to explain or mend. A prompt then may get a polite frame, a closing wish, or a careless hand.

Whole topics are kept out of training, not single prompts: a prompt that differs from a trained one
by a comma would measure memory.
"""

import hashlib
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

DOMAINS = ("chat", "writing", "code", "arithmetic", "facts", "summaries")

_DATA = Path(__file__).parent / "prompt_data"
_SLOT = re.compile(r"\{([a-z]+)(?:_\d)?\}")
# Between two sentences; a single capital letter or a title before the full stop is an abbreviation.
_SENTENCE_END = re.compile(
    r"(?<=[a-z][.!?])(?<!Mr\.)(?<!Mrs\.)(?<!Ms\.)(?<!Dr\.)(?<!St\.) (?=[A-Z])"
)
# A passage and a topic are told apart by this many words; more would only make a topic long.
_TOPIC_WORDS = 8
# So many repeats in a row mean that a domain has next to nothing new left.
_MAX_REPEATS = 2000
_MIN_SENTENCES = 3

# How often a prompt gets each kind of change. Most stay as the template has them.
_REQUEST_SHARE = 0.35
_OPENER_SHARE = 0.12
_CLOSER_SHARE = 0.3
_SLOPPY_SHARE = 0.12
_CUT_SHARE = 0.35


@dataclass(frozen=True)
class Prompt:
    """One request to the target.

    ``text`` is what the user says, ``domain`` one of DOMAINS, ``topic`` what it is about (the unit
    of hold-out), and ``held_out`` whether the topic is kept for evaluation.
    """

    text: str
    domain: str
    topic: str
    held_out: bool


@dataclass(frozen=True)
class _Snippet:
    language: str
    title: str
    code: str


@dataclass(frozen=True)
class _Bank:
    """The hand-written parts."""

    templates: Mapping[str, Sequence[tuple[str, str]]]  # domain -> (kind, template)
    keys: Mapping[str, Sequence[str]]  # slot -> what a prompt can be about
    style: Mapping[str, Sequence[str]]  # slot -> how it is asked, or scenery
    numbers: Mapping[str, Sequence[int]]  # slot -> lowest, highest, decimals
    snippets: Mapping[str, Sequence[_Snippet]]  # slot -> code
    frames: Mapping[str, Sequence[str]]
    closers: Mapping[str, Sequence[str]]
    passages: Sequence[str]  # may hold slots


def _read_toml(name: str) -> dict[str, Any]:
    return tomllib.loads((_DATA / name).read_text(encoding="utf-8"))


def _split_passages(text: str) -> list[str]:
    """Passages of a text in which blank lines separate them, each as one line."""
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n", text) if part.strip()]


@cache
def _load_bank() -> _Bank:
    slots, code = _read_toml("slots.toml"), _read_toml("code.toml")
    topics = (_DATA / "topics.txt").read_text(encoding="utf-8").splitlines()
    return _Bank(
        templates={
            domain: [(kind, text) for kind, texts in kinds.items() for text in texts]
            for domain, kinds in _read_toml("templates.toml").items()
        },
        keys={"topic": [line for line in topics if line], **slots["keys"], **code["tasks"]},
        style=slots["style"],
        numbers=slots["numbers"],
        snippets={
            slot: [
                _Snippet(language, title, text.strip("\n"))
                for language, rows in code[slot].items()
                for title, text in rows.items()
            ]
            for slot in ("snippet", "bug")
        },
        frames=slots["frames"],
        closers=slots["closers"],
        passages=_split_passages((_DATA / "passages.txt").read_text(encoding="utf-8")),
    )


def is_held_out(text: str, share: float) -> bool:
    """Whether a topic, or a text without one, falls into the held-out share: by itself alone, the
    same everywhere."""
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def _first_words(text: str) -> str:
    return " ".join(text.split()[:_TOPIC_WORDS])


def _upper_first(text: str) -> str:
    return text[:1].upper() + text[1:]


class _Writer:
    """Writes one prompt after another, out of one stream of random numbers."""

    def __init__(self, bank: _Bank, rng: Random, share: float, passages: Sequence[str]) -> None:
        self._bank, self._rng, self._share = bank, rng, share
        # The caller's passages come as they are: a brace in them is no slot.
        self._passages = [(text, True) for text in bank.passages]
        self._passages += [(text.strip(), False) for text in passages if text.strip()]

    def write(self, domain: str) -> Prompt | None:
        """A prompt of the domain; None if it would mix held-out topics with others."""
        kind, template = self._rng.choice(self._bank.templates[domain])
        text, abouts, first = self._fill(template)
        if domain == "arithmetic":
            # Numbers have no subject, so the kind of problem and its noun or first number stand in.
            abouts = [f"{kind}: {about}" for about in abouts or [first or template]]
        topic = abouts[0] if abouts else template
        sides = [is_held_out(about, self._share) for about in abouts or [topic]]
        if any(side != sides[0] for side in sides):
            return None
        return Prompt(self._frame(text, template, kind, domain), domain, topic, sides[0])

    def _fill(self, template: str) -> tuple[str, list[str], str | None]:
        """The filled template, what it is about, and the value of its first slot.

        A slot that occurs twice gets one value; {slot_2} gets another than {slot}. Values are not
        looked at again, so that braces in code stay.
        """
        values: dict[str, str] = {}
        abouts: list[str] = []
        for match in _SLOT.finditer(template):
            slot, base = match.group(), match.group(1)
            if slot in values:
                continue
            value, about = self._draw(base)
            while value in values.values():
                value, about = self._draw(base)
            values[slot] = value
            if about is not None:
                abouts.append(about)
        text = _SLOT.sub(lambda match: values[match.group()], template)
        if template.startswith("{"):
            text = _upper_first(text)
        return text, abouts, next(iter(values.values()), None)

    def _draw(self, slot: str) -> tuple[str, str | None]:
        """A value for a slot, and the topic that it brings, if any."""
        bank, rng = self._bank, self._rng
        if slot in bank.keys:
            value = rng.choice(bank.keys[slot])
            return value, value
        if slot in bank.style:
            return rng.choice(bank.style[slot]), None
        if slot in bank.snippets:
            snippet = rng.choice(bank.snippets[slot])
            mark = rng.choice([snippet.language, snippet.language, ""])
            return f"```{mark}\n{snippet.code}\n```", snippet.title
        if slot == "passage":
            return self._draw_passage()
        return self._draw_number(*bank.numbers[slot]), None

    def _draw_passage(self) -> tuple[str, str]:
        """A passage, some of them without their last sentences, and its first words."""
        raw, has_slots = self._rng.choice(self._passages)
        text = self._fill(raw)[0] if has_slots else raw
        sentences = _SENTENCE_END.split(text)
        if len(sentences) > _MIN_SENTENCES and self._rng.random() < _CUT_SHARE:
            text = " ".join(sentences[: self._rng.randrange(_MIN_SENTENCES, len(sentences))])
        return text, _first_words(raw)

    def _draw_number(self, low: int, high: int, decimals: int = 0) -> str:
        number = self._rng.randrange(low, high + 1)
        return f"{number / 10**decimals:.{decimals}f}" if decimals else str(number)

    def _frame(self, text: str, template: str, kind: str, domain: str) -> str:
        """The text with some of what people put around a request, or with their carelessness."""
        rng, frames = self._rng, self._bank.frames
        stands_alone = kind in frames["plain"]
        if text.split(maxsplit=1)[0] in frames["imperatives"]:
            if rng.random() < _REQUEST_SHARE:
                text = self._request(text)
        # What starts with a slot may start with a passage, a number or a proper noun.
        elif not stands_alone and template[0] != "{" and rng.random() < _OPENER_SHARE:
            text = self._open(text)
        if "\n" in text:
            return text
        # A template that sets a limit itself would contradict a second one.
        is_limited = any(f"{{{slot}}}" in template for slot in frames["limits"])
        can_close = text[-1] in ".?!" and not (is_limited or stands_alone)
        if can_close and rng.random() < _CLOSER_SHARE:
            text = f"{text} {rng.choice(self._bank.closers[domain])}"
        if rng.random() < _SLOPPY_SHARE:
            text = text.lower().rstrip(".?! ")
            if rng.random() < 0.5:
                text = text.replace("'", "")
        return text

    def _open(self, text: str) -> str:
        """The text after a greeting or the like; its first letter small if no sentence ended."""
        opener = self._rng.choice(self._bank.frames["openers"])
        word = text.split(maxsplit=1)[0]
        stays = word == "I" or word.startswith("I'") or (word.isupper() and len(word) > 1)
        if opener[-2] not in ".!" and not stays:
            text = text[0].lower() + text[1:]
        return opener + text

    def _request(self, text: str) -> str:
        """An imperative as a polite request: "Write ..." as "Could you write ...?"."""
        frame = self._rng.choice(self._bank.frames["requests"])
        text = text[0].lower() + text[1:]
        head, dot, rest = text.partition(".")
        # A colon or a quotation mark may bring a foreign sentence, whose full stop is not ours.
        is_one_sentence = dot == "." and rest[:1] in ("", " ") and not re.search(r'[:"\n]', head)
        if frame.endswith("?") and not is_one_sentence:
            return f"Please {text}"
        if frame.endswith("?"):
            return frame.replace("...", head) + rest
        return frame.replace("...", text)


def _check(count: int, held_out_share: float) -> None:
    if count < 1:
        raise ValueError(f"count is {count}; ask for at least one prompt")
    if not 0 <= held_out_share < 1:
        raise ValueError(
            f"held_out_share is {held_out_share}; give a share of all topics, at least 0 and below"
            " 1, such as 0.02"
        )


def _write_domain(writer: _Writer, domain: str, count: int) -> list[Prompt]:
    """So many distinct prompts of one domain."""
    found: dict[str, Prompt] = {}
    repeats = 0
    while len(found) < count:
        prompt = writer.write(domain)
        if prompt is not None and prompt.text not in found:
            found[prompt.text] = prompt
            repeats = 0
            continue
        repeats += 1
        if repeats == _MAX_REPEATS:
            raise ValueError(
                f"{count} distinct prompts were asked for in the domain {domain!r}, and"
                f" {len(found)} were found; ask for fewer, or add templates, slot values or"
                " passages"
            )
    return list(found.values())


def make_prompts(
    count: int, seed: int, held_out_share: float = 0.02, passages: Sequence[str] = ()
) -> list[Prompt]:
    """Exactly ``count`` prompts with distinct texts, evenly over the domains, in a random order.

    Args:
        count: number of prompts.
        seed: same arguments give the same prompts, on every platform.
        held_out_share: share of all topics (0 to 1) whose prompts are marked as held out. Which
            topics these are depends on their text only, not on seed or count.
        passages: more texts to summarize, beside the built-in ones; used as they are.

    Raises:
        ValueError: count is below 1, the share is outside [0, 1), or a domain cannot give that
            many distinct prompts.
    """
    _check(count, held_out_share)
    bank = _load_bank()
    prompts: list[Prompt] = []
    for index, domain in enumerate(DOMAINS):
        # A stream for each domain: more templates in one leave the others as they were.
        writer = _Writer(bank, Random(f"{seed} {domain}"), held_out_share, passages)
        share = count // len(DOMAINS) + (index < count % len(DOMAINS))
        prompts += _write_domain(writer, domain, share)
    Random(f"{seed} order").shuffle(prompts)
    return prompts
