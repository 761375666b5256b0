"""Corpora cut into pieces: every text once, whatever the cut and the kind of file."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from flashmap.release import corpus
from flashmap.release.corpus import corpus_files, read_records, split_file
from flashmap.release.count import check_piece, segments

LETTERS = "aé漢😀 "


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "PIECE", 64)
    monkeypatch.setattr(corpus, "SLACK", 48)


def some_text(seed: int, lines: int, longest: int) -> str:
    chance = random.Random(seed)
    return "\n".join(
        "".join(chance.choices(LETTERS, k=chance.randrange(longest))) for _ in range(lines)
    )


def records(path: Path) -> list[Any]:
    return [record for piece in split_file(path) for record in read_records(piece)]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("lines", "longest"), [(60, 12), (12, 60), (3, 900), (1, 2000)])
def test_text_is_read_once_in_order(seed: int, lines: int, longest: int, tmp_path: Path) -> None:
    text = some_text(seed, lines, longest)
    path = tmp_path / "a.txt"
    path.write_text(text, encoding="utf-8", newline="")
    parts = records(path)
    assert "".join(parts) == text
    assert all(len(part.encode()) <= 64 + 2 * 48 for part in parts)


def test_text_is_cut_after_lines_else_before_spaces(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("x" * 70 + "\n" + "y" * 30 + " " + "y" * 50 + " " + "z" * 20)
    assert records(path) == ["x" * 70 + "\n", "y" * 30 + " " + "y" * 50, " " + "z" * 20]


@pytest.mark.parametrize("seed", range(8))
def test_every_line_of_json_is_read_once(seed: int, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = []
    for text in some_text(seed, 40, 90).split("\n"):
        rows.append({"text": text})
        rows.append({"messages": [{"role": "user", "content": text}], "id": len(rows)})
    path = tmp_path / "a.jsonl"
    lines = [json.dumps(row, ensure_ascii=bool(i % 2)) for i, row in enumerate(rows)]
    path.write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    assert records(path) == [row.get("text", row.get("messages")) for row in rows]


@pytest.mark.parametrize("rows_a_group", [1, 7, 1000])
def test_every_row_of_parquet_is_read_once(
    rows_a_group: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(corpus, "ROWS", 5)
    texts = some_text(0, 100, 40).split("\n")
    chats = [[{"role": "user", "content": text}] for text in texts]
    texts[3:5] = [None, ""]  # type: ignore[list-item]
    for field, values in {"text": texts, "messages": chats}.items():
        path = tmp_path / f"{field}.parquet"
        table = arrow.table({"id": list(range(100)), field: values})
        parquet.write_table(table, path, row_group_size=rows_a_group)
        assert records(path) == [value or "" for value in values]
        if rows_a_group == 1000:
            assert 1 < len(split_file(path)) <= corpus.SLICES


def test_a_damaged_parquet_file_is_refused(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    values = [str(i) * 50 for i in range(500)]
    parquet.write_table(arrow.table({"text": values}), path, compression="zstd")
    content = bytearray(path.read_bytes())
    content[8:120] = bytes(112)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.parquet is not a whole parquet file"):
        records(path)


def test_a_folder_stands_for_the_corpus_files_below_it_each_once(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("b.txt", "deep/a.jsonl", "deep/README.md"):
        (tmp_path / name).write_text("x")
    found = corpus_files([tmp_path / "deep/a.jsonl", tmp_path, tmp_path / "b.txt"])
    assert found == [tmp_path / "deep/a.jsonl", tmp_path / "b.txt"]


@pytest.mark.parametrize("seed", range(8))
def test_segments_join_to_the_text(seed: int) -> None:
    text = some_text(seed, 30, 80) + "\n\n\n"
    parts = list(segments(text, 50))
    assert "".join(parts) == text and all(len(part) <= 53 for part in parts)
    assert list(segments("one\n\ntwo three", 6)) == ["one\n\n", "two", " three"]


def test_a_check_finds_text_and_its_absence(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": " \\n"}\n{"text": " ab "}\n')
    (tmp_path / "b.jsonl").write_text('{"messages": [{"role": "user", "content": "abc"}]}\n')
    for name, characters in {"a.jsonl": 2, "b.jsonl": 3}.items():
        assert sum(map(check_piece, split_file(tmp_path / name))) == characters


def test_a_mark_of_byte_order_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfabc\r\n")
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "abc"}\r\n{"text": 3}')
    assert records(tmp_path / "a.txt") == ["abc\r\n"]
    with pytest.raises(ValueError, match=r"a\.jsonl:2: expected"):
        records(tmp_path / "a.jsonl")
