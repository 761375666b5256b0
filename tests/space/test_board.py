"""What the page shows of a race: text by rounds, numbers, plot, verdict; checked as HTML."""

import re
from html.parser import HTMLParser
from typing import Any

import pytest
from support import pair_folders
from support.space_pairs import toy_pair

from board import Board, Words
from race import FLASHMAP, PLAIN, Parting, Settings, Step

TOKENIZER = pair_folders.tokenizer()


def tokens_of(text: str) -> list[int]:
    ids: list[int] = TOKENIZER(text)["input_ids"]
    return ids


class Parsed(HTMLParser):
    """Text, and elements by class with their attributes and text; every element is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.open, self.found = "", [], []  # type: ignore[var-annotated]
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        element = {**dict(attrs), "tag": tag, "text": ""}
        self.open.append(element)
        self.found.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()["tag"] == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        for element in self.open:
            element["text"] += data

    def classed(self, name: str) -> list[dict[str, Any]]:
        return [one for one in self.found if name in (one.get("class") or "").split()]


def board(**settings: Any) -> Board:
    return Board(toy_pair(), Settings(**settings))


@pytest.mark.parametrize("text", ["plain words", "naïve 日本 🙂🙂 x", "a\n\n  b\t<i>", ""])
def test_words_come_whole_and_add_up(text: str) -> None:
    words = Words(TOKENIZER)
    pieces = [words.add(token) for token in tokens_of(text)]
    assert "".join(pieces) == text
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)


def test_bytes_that_are_no_text_do_not_hold_the_rest_back() -> None:
    words = Words(TOKENIZER)
    broken = tokens_of("é")[:1]  # half a character
    text = "".join(words.add(token) for token in [*broken * 6, *tokens_of("end")])
    assert text.endswith("end")


def test_rounds_are_coloured_and_their_bonus_token_is_marked() -> None:
    shown = board()
    rounds = [("A", 0), ("bcd", 2), ("e", 0), ("fg", 2)]
    for text, accepted in rounds:
        shown.add(Step(FLASHMAP, tokens_of(text), accepted, 0.25))
    parsed = Parsed(shown.texts[FLASHMAP])
    spans = parsed.classed("round")
    assert [span["text"] for span in spans] == [text for text, _ in rounds]
    assert [span["data-round"] for span in spans] == ["0", "1", "2", "3"]
    assert [mark["text"] for mark in parsed.classed("bonus")] == ["A", "d", "e"]
    assert len({span["class"] for span in spans}) == 4
    tips = [span["data-tip"] for span in spans]
    assert tips == [
        "First token, from the prompt's own pass, 250 ms",
        "Round 1: 2 drafts accepted + bonus token, 250 ms",
        "Round 2: 0 drafts accepted + bonus token, 250 ms",
        "Round 3: 2 drafts accepted, the end, 250 ms",
    ]
    bars = Parsed(shown.plot()).classed("bar")
    assert [bar["data-tip"] for bar in bars] == tips[1:]
    heights = [re.findall(r"\d+", bar["style"]) for bar in bars]
    assert heights == [["2", "1"], ["0", "1"], ["2", "0"]]
    assert [bar["class"].split()[1] for bar in bars] == [s["class"].split()[1] for s in spans[1:]]
    assert "3, 1, 2" in Parsed(shown.plot()).classed("bars")[0]["aria-label"]


def test_texts_grow_at_their_end_and_nothing_in_them_is_markup() -> None:
    shown, text = board(), "<script>x</script> & 'y' \"z\""
    for side in (PLAIN, FLASHMAP):
        seen = ""
        for token in tokens_of(text):
            shown.add(Step(side, [token], 0, 0.1))
            assert shown.texts[side].startswith(seen)
            seen = shown.texts[side]
        parsed = Parsed(seen)
        assert parsed.text == text
        assert {one["tag"] for one in parsed.found} <= {"span"}


def test_numbers_are_those_of_the_sides_own_clocks() -> None:
    shown = board()
    for _ in range(6):
        shown.add(Step(PLAIN, [40], 0, 0.5))
    shown.add(Step(FLASHMAP, [40], 0, 0.4))
    shown.add(Step(FLASHMAP, [40] * 4, 3, 0.8))
    shown.add(Step(FLASHMAP, [40], 0, 0.8))
    plain, ours = (Parsed(shown.head(side)).text for side in (PLAIN, FLASHMAP))
    assert plain == "Plain decoding2.0 tokens/s6 tokens3.0 s"
    assert ours == "FlashMap3.0 tokens/s6 tokens2 rounds2.50 tokens a round2.0 s"
    assert shown.speedup == pytest.approx(1.5)
    assert Parsed(shown.score()).text == "1.50× the speed of plain decoding"
    result = shown.result()
    assert result["flashmap"]["tokens_per_second"] == pytest.approx(3.0)
    assert result["acceptance_lengths"] == [4, 1] and result["identical"]


def test_a_slower_run_is_called_slower() -> None:
    shown = board()
    assert shown.speedup is None and "–" in shown.score()
    shown.add(Step(PLAIN, [40], 0, 0.5))
    shown.add(Step(FLASHMAP, [40], 0, 1.0))
    assert Parsed(shown.score()).text == "0.50× slower than plain decoding today"
    assert Parsed(shown.score()).classed("slower")


def said(shown: Board, ended_by: str = "") -> tuple[str, str]:
    (line,) = Parsed(shown.verdict(ended_by)).classed("note")
    assert line["role"] == "status"
    return line["class"].split()[1], line["text"]


def raced(plain: str, ours: str, *events: Any, **settings: Any) -> Board:
    shown = board(**settings)
    for side, text in ((PLAIN, plain), (FLASHMAP, ours)):
        shown.add(Step(side, tokens_of(text), 0, 0.1))
    for event in events:
        shown.add(event)
    return shown


def test_verdicts() -> None:
    assert said(raced("abc", "abc")) == ("good", "Both texts are identical: all 3 tokens.")
    kind, text = said(raced("abc", "xyz", temperature=0.8))
    assert kind == "info" and "same distribution" in text
    stopped = "Stopped. Up to there the texts are identical."
    assert said(raced("abcd", "ab"), "Stopped.") == ("info", stopped)
    assert said(raced("abcd", "ax"), "Stopped.")[1].endswith("the texts differ.")
    assert said(raced("abcd", "ax", temperature=1.0), "Stopped.") == ("info", "Stopped.")


@pytest.mark.parametrize(
    ("steps", "kind", "words"), [(2.0, "info", "nearly a tie"), (9.0, "bad", "report it")]
)
def test_texts_that_part_are_explained_or_reported(steps: float, kind: str, words: str) -> None:
    (a,), (b,) = tokens_of("c"), tokens_of("<")
    found = said(raced("abc", "ab<", Parting(2, (a, b), (0.312, 0.3105), steps)))
    assert found[0] == kind
    assert "identical up to token 2. Then the target gives “c” 31.20% and “<” 31.05%" in found[1]
    assert words in found[1]
