"""Documents: packed, written whole or not at all, read back, sifted; and those of a user's text."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save
from support import pair_folders, toys

from flashmap.training.data import DataMaker
from flashmap.training.documents import (
    Document,
    Documents,
    Filter,
    document_file,
    pack,
    read_about,
    read_documents,
    write_documents,
)
from flashmap.training.recipe import DataRecipe, Recipe, RunRecipe
from flashmap.training.user_data import OWN_TEXT, read_user_documents

TOKENIZER = pair_folders.tokenizer()

ROWS = [
    Document([1, 2], [3, 4, 5], 0.0, False),
    Document([60000], [7, 8], 0.7, True),
    Document([9, 9, 9], [1, 2, 3, 4], -1.0, False),
]


def rows_of(documents: Documents) -> list[Document]:
    rows = []
    for index in range(len(documents)):
        start, end = documents.offsets[index : index + 2].tolist()
        middle = start + int(documents.prompt_lengths[index])
        tokens = documents.tokens.tolist()
        rows.append(
            Document(
                tokens[start:middle],
                tokens[middle:end],
                round(float(documents.temperatures[index]), 6),
                bool(documents.held_out[index]),
            )
        )
    return rows


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(65536, torch.uint16), (65537, torch.int32), (200_000, torch.int32)]
)
def test_documents_come_back_as_they_were(
    vocab_size: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    rows = [*ROWS, Document([vocab_size - 1], [0, vocab_size - 1], 1.0, False)]
    documents = pack(rows, vocab_size)
    assert documents.tokens.dtype == dtype
    assert rows_of(documents) == rows
    path = document_file(tmp_path, 0)
    write_documents(path, documents, {"kept": "4"})
    assert load_file(path)["tokens"].dtype == dtype
    assert rows_of(read_documents(tmp_path)) == rows
    assert read_about(path) == {"kept": "4"}
    assert documents.lengths.tolist() == [5, 3, 7, 3]
    on_device = documents.to(torch.device("cpu"))
    assert on_device.tokens.dtype == torch.int32 and rows_of(on_device) == rows


def test_files_are_read_in_order_and_end_to_end(tmp_path: Path) -> None:
    for number, row in reversed(list(enumerate(ROWS))):
        write_documents(document_file(tmp_path, number), pack([row], 65536), {})
    write_documents(document_file(tmp_path, 3), pack([], 65536), {})
    write_documents(document_file(tmp_path, 4), pack(ROWS, 65536), {})
    assert rows_of(read_documents(tmp_path)) == ROWS + ROWS


def test_folders_are_read_one_after_the_other(tmp_path: Path) -> None:
    for name, rows in (("first", ROWS[:2]), ("second", ROWS[1:])):
        (tmp_path / name).mkdir()
        write_documents(document_file(tmp_path / name, 0), pack(rows, 65536), {})
    assert rows_of(read_documents(tmp_path / "first", tmp_path / "second")) == ROWS[:2] + ROWS[1:]
    with pytest.raises(ValueError, match="third holds no documents"):
        read_documents(tmp_path / "first", tmp_path / "third")


def test_some_can_be_selected() -> None:
    documents = pack(ROWS, 65536)
    assert rows_of(documents.select(torch.tensor([2, 0, 0]))) == [ROWS[2], ROWS[0], ROWS[0]]
    assert rows_of(documents.select(documents.held_out)) == [ROWS[1]]
    assert rows_of(documents.select(~documents.held_out)) == [ROWS[0], ROWS[2]]
    none = documents.select(torch.zeros(3, dtype=torch.bool))
    assert len(none) == 0 and none.offsets.tolist() == [0]


def test_a_folder_without_documents_says_how_to_make_them(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "gone"):
        with pytest.raises(ValueError) as caught:
            read_documents(folder)
        message = str(caught.value)
        assert str(folder) in message
        assert "flashmap train data" in message and "data.folder" in message


@pytest.mark.parametrize("content", [b"", b"half of it", save({"a": torch.zeros(1)})])
def test_a_damaged_file_is_named(content: bytes, tmp_path: Path) -> None:
    path = document_file(tmp_path, 0)
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is damaged") as caught:
        read_documents(tmp_path)
    assert str(path) in str(caught.value) and "remove it" in str(caught.value)


def test_tokens_beyond_a_vocabulary_are_refused() -> None:
    documents = pack([Document([1, 2], [7, 3], 0.0, False)], 65536)
    documents.require_known(8)
    pack([], 65536).require_known(1)
    with pytest.raises(ValueError, match=r"token id 7, .* ends before 7\b.*another target"):
        documents.require_known(7)


def test_what_a_kill_left_behind_is_ignored(tmp_path: Path) -> None:
    left = tmp_path / ".documents-00001.safetensors.part"
    left.write_bytes(b"half of it")
    (tmp_path / "documents-00002.safetensors.part").write_bytes(b"half of it")
    with pytest.raises(ValueError, match="holds no documents"):
        read_documents(tmp_path)
    write_documents(document_file(tmp_path, 0), pack(ROWS, 65536), {})
    assert len(read_documents(tmp_path)) == 3
    write_documents(document_file(tmp_path, 1), pack(ROWS, 65536), {})
    assert not left.exists() and len(read_documents(tmp_path)) == 6


def test_a_file_is_there_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = document_file(tmp_path, 0)
    write_documents(path, pack(ROWS[:1], 65536), {})
    before = path.read_bytes()

    def killed(self: Path, other: Path) -> Path:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            write_documents(path, pack(ROWS, 65536), {})
        with pytest.raises(KeyboardInterrupt):
            write_documents(document_file(tmp_path, 1), pack(ROWS, 65536), {})
    assert path.read_bytes() == before
    assert rows_of(read_documents(tmp_path)) == ROWS[:1]


# --- the filter


def document(answer: list[int], prompt: list[int] | None = None) -> Document:
    return Document(prompt or [1], answer, 0.0, False)


def kept_answer(answer: list[int]) -> list[int]:
    (found,) = Filter().keep([document(answer)])
    return found.answer


def test_a_loop_is_cut_where_its_eight_tokens_come_for_the_fourth_time() -> None:
    gram, text = [11, 12, 13, 14, 15, 16, 17, 18], list(range(20, 40))
    assert kept_answer(text + gram * 3) == text + gram * 3
    # The gram ends a period of 8, so its last tokens and the first of the next are grams as well:
    # the first to come for the fourth time is the gram itself.
    assert kept_answer(text + gram * 4 + text) == text + gram * 3
    assert kept_answer(text + gram * 9) == text + gram * 3
    apart = text + gram + [1, 2] + gram + [3] + gram + [4, 5, 6] + gram + [7]
    assert kept_answer(apart) == apart[: -len(gram) - 1]
    # One token over and over: eleven of them hold the gram four times.
    assert kept_answer(text + [5] * 10) == text + [5] * 10
    assert kept_answer(text + [5] * 11) == text + [5] * 3


def test_the_filter_counts_what_it_did() -> None:
    sieve = Filter()
    loop = list(range(10)) + [5] * 30
    rows = [
        document([1, 2, 3]),
        document([1, 2, 3]),  # again
        document([1, 2, 3], [2]),  # after another prompt it is not the same
        document([1]),
        document([]),
        document(loop),
        document(loop + [5] * 8),  # the same, once its loop is cut
    ]
    kept = sieve.keep(iter(rows))
    assert [row.answer for row in kept] == [[1, 2, 3], [1, 2, 3], loop[:13]]
    assert sieve.counts() == {"kept": 3, "looped": 2, "duplicates": 2, "short": 2}
    assert sieve.keep([document([1, 2, 3]), document([4, 5])]) == [document([4, 5])]
    assert sieve.counts() == {"kept": 4, "looped": 2, "duplicates": 3, "short": 2}


def test_what_a_document_is_known_by_stays() -> None:
    row = Document([1, 2], [3, 4], 0.7, True)
    assert Filter().keep([row]) == [row]


# --- a user's own text


def read(path: Path, max_length: int = 64, share: float = 0.0) -> list[Document]:
    return list(read_user_documents(path, TOKENIZER, max_length, share))


def ids(text: str) -> list[int]:
    found: list[int] = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    return found


def lines(path: Path, *rows: Any) -> Path:
    texts = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return path


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_the_last_message_of_a_conversation_is_the_answer(tmp_path: Path) -> None:
    messages = [said("user", "Hi"), said("assistant", "Yo"), said("user", "Why?")]
    path = lines(tmp_path / "a.jsonl", {"messages": [*messages, said("assistant", "Because.")]})
    (found,) = read(path)
    before = "<|user|>Hi<|assistant|>Yo<|user|>Why?<|assistant|>"
    assert TOKENIZER.decode(found.prompt) == before and found.prompt == ids(before)
    assert found.answer == ids("Because.")
    assert (found.temperature, found.held_out) == (OWN_TEXT, False)


def test_a_long_conversation_is_cut(tmp_path: Path) -> None:
    messages = [said("user", "Hi"), said("assistant", "abcdefghij")]
    path = lines(tmp_path / "a.jsonl", {"messages": messages}, {"messages": messages})
    found = read(path, max_length=9)
    assert [len(row.prompt + row.answer) for row in found] == [9, 9]
    assert Filter().keep(read(path, max_length=4)) == [], "nothing is left to learn"


def test_lines_of_text_are_documents(tmp_path: Path) -> None:
    first = lines(tmp_path / "a.jsonl", {"text": "Bees hum."}, "", {"text": "Cats purr."})
    second = lines(tmp_path / "a.txt", "  Bees hum. ", "", "Cats purr.")
    expected = [(ids(text)[:1], ids(text)[1:]) for text in ("Bees hum.", "Cats purr.")]
    for path in (first, second):
        assert [(row.prompt, row.answer) for row in read(path)] == expected


def test_a_long_text_becomes_several_documents(tmp_path: Path) -> None:
    text = "abcdefghijklmnopqrstuvwxyz"
    found = read(lines(tmp_path / "a.txt", text), max_length=8)
    assert [TOKENIZER.decode(row.prompt + row.answer) for row in found] == [
        "abcdefgh", "ijklmnop", "qrstuvwx",
    ]  # fmt: skip
    assert all(len(row.prompt) == 1 for row in found), "two letters are too short to learn from"


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("{", ["JSON"]),
        ("3", ["messages", "text"]),
        ({"prompt": "Hi"}, ["messages", "text"]),
        ({"text": 3}, ["text is int"]),
        ({"text": None}, ["text is NoneType"]),
        ({"text": "\ud83d"}, ["\\ud83d"]),
        ({"messages": []}, ["ends with the assistant"]),
        ({"messages": "Hi"}, ["ends with the assistant"]),
        ({"messages": [said("user", "Hi")]}, ["ends with the assistant"]),
        ({"messages": ["Hi"]}, ["ends with the assistant"]),
        ({"messages": ["Hi", said("assistant", "Yo")]}, ["messages"]),
        ({"messages": [said("user", "Hi"), {"role": "assistant"}]}, []),
    ],
)
def test_a_bad_line_is_named(row: Any, words: list[str], tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"text": "fine so far"}, "", row)
    with pytest.raises(ValueError) as caught:
        read(path)
    assert f"{path}:3" in str(caught.value)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.files: .*gone\.txt cannot be read"):
        read(tmp_path / "gone.txt")
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\n")
    with pytest.raises(ValueError, match=r"a\.txt"):
        read(tmp_path / "a.txt")


def test_a_bottomless_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"a\.jsonl:1 is not JSON"):
        read(tmp_path / "a.jsonl")


def test_a_mark_of_byte_order_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfabcdefgh\r\n")
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "abcdefgh"}\r\n')
    for name in ("a.txt", "a.jsonl"):
        (found,) = read(tmp_path / name)
        assert TOKENIZER.decode(found.prompt + found.answer) == "abcdefgh"


def test_a_conversation_needs_a_chat_template(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"messages": [said("assistant", "Yo")]})
    bare = pair_folders.tokenizer(template=None)
    with pytest.raises(ValueError, match=r"a\.jsonl:1: .*chat template"):
        list(read_user_documents(path, bare, 64, 0.0))


def test_what_is_held_out_depends_on_the_line_alone(tmp_path: Path) -> None:
    texts = [f"This is line number {number:02}." for number in range(60)]
    found = read(lines(tmp_path / "a.txt", *texts), 64, 0.5)
    sides = {text: row.held_out for text, row in zip(texts, found, strict=True)}
    assert 15 < sum(sides.values()) < 45
    backwards = read(lines(tmp_path / "b.txt", *reversed(texts)), 64, 0.5)
    assert [row.held_out for row in backwards] == [sides[text] for text in reversed(texts)]
    # Every part of a long line is on its side, and a larger share holds out more of the same.
    parts = read(tmp_path / "a.txt", 8, 0.5)
    count = len(parts) // len(texts)
    assert count > 1 and len(parts) == count * len(texts)
    assert [row.held_out for row in parts[::count]] == list(sides.values())
    assert sum(row.held_out for row in parts) == count * sum(sides.values())
    more = read(tmp_path / "a.txt", 64, 0.8)
    assert all(row.held_out for row, side in zip(more, sides.values(), strict=True) if side)
    assert not any(row.held_out for row in read(tmp_path / "a.txt", 64, 0.0))


def test_the_files_of_a_recipe_become_documents(tmp_path: Path) -> None:
    one = lines(tmp_path / "a.txt", "Bees hum.", "Cats purr.", "Bees hum.")
    two = lines(tmp_path / "b.jsonl", {"text": "Dogs bark."})
    recipe = Recipe(
        "toy",
        data=DataRecipe(folder=str(tmp_path / "data"), files=(str(one), str(two))),
        run=RunRecipe(max_length=64),
    )
    target = toys.llama(vocab_size=pair_folders.ROWS)
    for _ in range(2):
        DataMaker(recipe, target, TOKENIZER).run()
    found = rows_of(read_documents(tmp_path / "data"))
    assert [TOKENIZER.decode(row.prompt + row.answer) for row in found] == [
        "Bees hum.", "Cats purr.", "Dogs bark.",
    ]  # fmt: skip
    assert {row.temperature for row in found} == {OWN_TEXT}
    assert read_about(document_file(tmp_path / "data", 0))["duplicates"] == "1"
