"""A corpus on disk, cut into pieces of work: plain text, JSON lines and parquet.

A piece is about a mebibyte that one process reads by itself, so memory does not grow with a file
and nothing but places travels between processes. Where a piece begins depends on the file alone:
any number of processes, in any order, stopped and continued, see the same texts.
"""

import os
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from flashmap.json_lines import parse_line

TEXT, LINES, PARQUET = ".txt", ".jsonl", ".parquet"
KINDS = (TEXT, LINES, PARQUET)
FIELDS = ("messages", "text")  # of a JSON line or a parquet row; the first that is there counts
PIECE = 2**20  # bytes
SLACK = 2**16  # bytes that the end of a piece of text may move to reach the end of a line
SLICES = 16  # of a parquet row group at most: each of them is decoded from the group's start
ROWS = 256  # of a parquet file in memory at once
NEEDS_PYARROW = (
    "reading parquet needs pyarrow, not installed here: pip install 'flashmap-hub[vocab]'"
)

# A text, or the messages of a conversation.
Record = str | list[Any]


@dataclass(frozen=True)
class Piece:
    """A part of a corpus file: bytes `start` to `stop`, or in a parquet file those rows of a row
    `group`."""

    path: Path
    start: int
    stop: int
    group: int = -1


def corpus_files(paths: Iterable[Path]) -> list[Path]:
    """The corpus files that `paths` name, each once; a folder stands for those below it.

    Raises ValueError for what is not there, cannot be read or is of no known kind.
    """
    found: dict[Path, Path] = {}
    for path in paths:
        for file in _below(path) if path.is_dir() else [path]:
            _require_readable(file)
            found.setdefault(file.resolve(), file)
    return list(found.values())


def _below(folder: Path) -> list[Path]:
    def refuse(error: OSError) -> None:
        raise ValueError(f"corpus folder {error.filename} cannot be read: {error.strerror}")

    files = [
        Path(parent, name)
        for parent, _, names in os.walk(folder, onerror=refuse)
        for name in names
        if Path(name).suffix in KINDS
    ]
    if not files:
        raise ValueError(f"corpus folder {folder} holds no {', '.join(KINDS)} file")
    return sorted(files)


def _require_readable(path: Path) -> None:
    if path.suffix not in KINDS:
        raise ValueError(
            f"corpus {path} is not of a kind that is read: {', '.join(KINDS)}; convert or rename it"
        )
    if path.exists() and not path.is_file():  # a pipe would be waited for without end
        raise ValueError(f"corpus {path} is not a regular file; write it to a file first")
    try:
        path.open("rb").close()
    except OSError as error:
        raise ValueError(f"corpus {path} cannot be read: {error.strerror}") from error


def split_file(path: Path) -> list[Piece]:
    """The pieces of a corpus file. Raises ValueError for a parquet file that cannot be used."""
    if path.suffix == PARQUET:
        return _row_pieces(path)
    size = path.stat().st_size
    return [Piece(path, start, min(start + PIECE, size)) for start in range(0, size, PIECE)]


def read_records(piece: Piece) -> Iterator[Record]:
    """The texts and conversations of a piece. Raises ValueError with the place of others."""
    if piece.path.suffix == PARQUET:
        yield from _rows(piece)
        return
    start, content = _read_bytes(piece)
    if piece.path.suffix == TEXT:
        yield _decode(content, piece.path, start)
        return
    for line in content.split(b"\n"):
        if line.strip():
            yield _record(_decode(line, piece.path, start), piece.path, start)
        start += len(line) + 1


def _read_bytes(piece: Piece) -> tuple[int, bytes]:
    """Where the piece really starts, and its bytes: whole lines where that is possible."""
    with piece.path.open("rb") as file:
        size = file.seek(0, 2)
        whole_lines = piece.path.suffix == LINES
        start, stop = (_cut(file, at, size, whole_lines) for at in (piece.start, piece.stop))
        file.seek(start)
        content = file.read(stop - start)
    mark = len(BOM_UTF8) if not start and content.startswith(BOM_UTF8) else 0  # from Windows
    return start + mark, content[mark:]


def _cut(file: IO[bytes], offset: int, size: int, whole_lines: bool) -> int:
    """Where the piece begins that should begin at `offset`: after the line that the byte before is
    part of; in text with endless lines before a space, at the least before a character."""
    if offset <= 0 or offset >= size:
        return offset
    position = file.seek(offset - 1)
    if whole_lines:
        while part := file.readline(SLACK):
            position += len(part)
            if part.endswith(b"\n"):
                break
        return position
    window = file.read(SLACK)
    if (end := window.find(b"\n")) >= 0:
        return position + end + 1
    if (end := window.find(b" ", 1)) >= 0:
        return position + end
    starts = (i for i, byte in enumerate(window[1:]) if byte & 0xC0 != 0x80)
    return offset + next(starts, len(window) - 1)


def _decode(content: bytes, path: Path, start: int) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"corpus {path}:{_line(path, start + error.start)} is not UTF-8 text (byte"
            f" {start + error.start} of the file); convert the file"
        ) from error


def _line(path: Path, offset: int) -> int:
    """Number of the line that holds a byte."""
    with path.open("rb") as file:
        line = 1
        while offset > 0 and (part := file.read(min(offset, PIECE))):
            line += part.count(b"\n")
            offset -= len(part)
    return line


def _record(line: str, path: Path, start: int) -> Record:
    try:
        row = parse_line(line)
    except ValueError as error:
        raise ValueError(f"corpus {path}:{_line(path, start)} is not JSON ({error})") from error
    field = next((name for name in FIELDS if isinstance(row, dict) and name in row), None)
    if field is None or not _is_record(row[field], field):
        raise ValueError(
            f'corpus {path}:{_line(path, start)}: expected {{"text": "..."}} or {{"messages":'
            f' [{{"role": "...", "content": "..."}}]}}, found {line.strip()[:60]}'
        )
    record: Record = row[field]
    return record


def _is_record(value: object, field: str) -> bool:
    if field == "text":
        return isinstance(value, str)
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(turn, dict) and isinstance(turn.get("role"), str) for turn in value)
    )


def _open_parquet(path: Path) -> Any:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise ValueError(f"corpus {path}: {NEEDS_PYARROW}") from error
    try:
        # Pages as they are needed, instead of whole row groups ahead.
        return ParquetFile(path, pre_buffer=False, buffer_size=PIECE)
    except (ArrowException, OSError) as error:
        raise ValueError(f"corpus {path} is not a whole parquet file: {error}") from error


def _column(file: Any, path: Path) -> str:
    names = file.schema_arrow.names
    for field in FIELDS:
        if field in names:
            return field
    raise ValueError(
        f"corpus {path} has no column {' or '.join(FIELDS)}, but {', '.join(names)}; rename the one"
        " that holds the text"
    )


def _row_pieces(path: Path) -> list[Piece]:
    with _open_parquet(path) as file:
        field = _column(file, path)
        pieces = []
        for group in range(file.metadata.num_row_groups):
            about = file.metadata.row_group(group)
            columns = (about.column(i) for i in range(about.num_columns))
            size = sum(
                column.total_uncompressed_size
                for column in columns
                if column.path_in_schema.split(".")[0] == field
            )
            step = -(-about.num_rows // max(1, min(SLICES, size // PIECE)))
            pieces += [
                Piece(path, start, min(start + step, about.num_rows), group)
                for start in range(0, about.num_rows, max(1, step))
            ]
    return pieces


def _rows(piece: Piece) -> Iterator[Record]:
    from pyarrow import ArrowException

    with _open_parquet(piece.path) as file:
        field, row = _column(file, piece.path), 0
        try:
            batches = file.iter_batches(ROWS, row_groups=[piece.group], columns=[field])
            for batch in batches:
                low, high = max(piece.start - row, 0), min(piece.stop - row, len(batch))
                row += len(batch)
                for value in batch.column(0)[low:high].to_pylist() if low < high else ():
                    yield _row_record(value, field, piece)
                if row >= piece.stop:
                    return
        except UnicodeDecodeError as error:
            raise ValueError(f"corpus {piece.path}: column {field} is not UTF-8 text") from error
        except (ArrowException, OSError) as error:
            raise ValueError(f"corpus {piece.path} is not a whole parquet file: {error}") from error


def _row_record(value: Any, field: str, piece: Piece) -> Record:
    if value is None:  # a row without a value is no text
        return ""
    if not _is_record(value, field):
        raise ValueError(
            f"corpus {piece.path}: column {field} holds {str(value)[:60]!r}, expected"
            f" {'text' if field == 'text' else 'a list of messages with role and content'}"
        )
    record: Record = value
    return record
