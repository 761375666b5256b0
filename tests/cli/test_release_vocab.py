"""`release vocab` and `release grids` at the command line: what they print, and bad input."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from support.commands import Run, assert_one_message
from support.pair_folders import tokenizer

from flashmap.schedule import jump_grids

# --- grids


def test_grids(run: Run) -> None:
    arguments = ("release", "grids", "--vocab-size", 49152, "--steps", 3)
    assert json.loads(run(*arguments, "--json").out) == jump_grids(49152, 3)
    lines = run(*arguments, "--mode", "compat").out.splitlines()
    assert lines[:2] == ["1: 0.0 1.0", "2: 0.0 0.8085629343986511 1.0"] and len(lines) == 3


@pytest.mark.parametrize(
    ("vocab_size", "steps", "mode", "words"),
    [
        (1, 2, "exact", ["vocabulary of 1 tokens", "1,000,000"]),
        (1_000_001, 2, "exact", ["vocabulary of 1000001 tokens"]),
        (49152, 0, "exact", ["0 steps", "1 to 64"]),
        (49152, 65, "compat", ["65 steps"]),
        (49152, 2, "rough", ["'rough'", "exact or compat"]),
    ],
)
def test_bad_grids(vocab_size: int, steps: int, mode: str, words: list[str], run: Run) -> None:
    arguments = ("--vocab-size", vocab_size, "--steps", steps, "--mode", mode, "--json")
    assert_one_message(run("release", "grids", *arguments), *words)


# --- vocab


def test_vocab(pair: Path, tmp_path: Path, run: Run) -> None:
    (tmp_path / "a.txt").write_text("hello hello")
    (tmp_path / "b.jsonl").write_text('{"text": "world"}\n')
    out = tmp_path / "draft_vocab.safetensors"
    # Everything after --corpus is part of it, up to the next option.
    arguments = ("release", "vocab", "--target", pair / "target", "--processes", 1, "--corpus")
    ended = run(*arguments, tmp_path / "a.txt", tmp_path / "b.jsonl", "--out", out, "--json")
    document = json.loads(ended.out)
    assert ended.status == 0
    assert list(document) == [
        *("file", "picture", "target", "vocab_size", "tokens", "distinct", "unseen", "files"),
        *("size", "corpus_sha256", "required", "coverage", "recommended", "seconds"),
    ]
    assert (document["tokens"], document["distinct"], document["files"]) == (16, 8, 2)
    assert document["recommended"] == {"size": 264, "coverage": 1.0}
    assert Path(document["file"]) == out and Path(document["picture"]).suffix == ".png"
    with safe_open(out, framework="pt") as file:
        assert file.metadata()["tokens_seen"] == "16"
    text = run(*arguments, tmp_path, "--out", out, "--coverage", 0.5)
    assert text.status == 0 and "16 tokens of 2 files" in text.out
    assert "recommended: draft_vocab_size 264" in text.out and f"curve: {out.stem}" in " ".join(
        line.replace(f"{tmp_path}/", "") for line in text.out.splitlines()
    )


def _write(name: str, content: "str | bytes") -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        path = folder / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return make


def _pipe(folder: Path) -> Path:
    os.mkfifo(folder / "pipe.txt")
    return folder / "pipe.txt"


def _parquet(columns: dict[str, Any]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        arrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.table(columns), folder / "rows.parquet")
        return folder / "rows.parquet"

    return make


def _latin_1(folder: Path) -> Path:
    arrow = pytest.importorskip("pyarrow")
    ends = arrow.array([0, 4], type=arrow.int32()).buffers()[1]
    text = arrow.Array.from_buffers(arrow.string(), 1, [None, ends, arrow.py_buffer(b"caf\xe9")])
    return _parquet({"text": text})(folder)


BAD_CORPORA: dict[str, tuple[Callable[[Path], Path], list[str]]] = {
    "missing": (lambda f: f / "gone.txt", ["gone.txt", "No such file"]),
    "unknown kind": (_write("a.csv", "x"), ["a.csv", ".txt, .jsonl, .parquet"]),
    "no regular file": (_pipe, ["pipe.txt", "regular file"]),
    "folder without a corpus": (lambda f: f, ["holds no .txt"]),
    "empty": (_write("a.txt", ""), ["holds no text", "a.txt"]),
    "blank": (_write("a.txt", " \n\n"), ["holds no text"]),
    "no rows": (_write("a.jsonl", "\n"), ["holds no text"]),
    "not UTF-8": (_write("a.txt", b"one\ntwo \xff\n"), ["a.txt:2", "UTF-8", "byte 8"]),
    "not UTF-8 in a line": (_write("a.jsonl", b'{"text": "a"}\n{"\xff'), ["a.jsonl:2", "UTF-8"]),
    "not JSON": (_write("a.jsonl", '{"text": "a"}\n{"text"\n'), ["a.jsonl:2", "not JSON"]),
    "half a character": (_write("a.jsonl", '{"text": "\\ud83d"}\n'), ["a.jsonl:1", "\\ud83d"]),
    "no text": (_write("a.jsonl", '\n{"prompt": "a"}\n'), ["a.jsonl:2", "messages", "prompt"]),
    "text is a number": (_write("a.jsonl", '{"text": 3}\n'), ["a.jsonl:1"]),
    "messages are text": (_write("a.jsonl", '{"messages": "hi"}\n'), ["a.jsonl:1"]),
    "message without role": (_write("a.jsonl", '{"messages": [{"content": "x"}]}'), ["a.jsonl:1"]),
    "not parquet": (_write("a.parquet", "PAR0"), ["a.parquet", "not a whole parquet file"]),
    "no column": (_parquet({"body": ["x"], "id": [1]}), ["no column messages or text", "body, id"]),
    "column that is not UTF-8": (_latin_1, ["rows.parquet", "column text is not UTF-8"]),
    "column of numbers": (_parquet({"text": [1, 2]}), ["column text holds '1'"]),
}


@pytest.mark.parametrize("case", BAD_CORPORA)
def test_a_bad_corpus(case: str, pair: Path, tmp_path: Path, run: Run) -> None:
    make, words = BAD_CORPORA[case]
    (tmp_path / "corpus").mkdir()
    out = tmp_path / "out.safetensors"
    arguments = ("--target", pair / "target", "--corpus", make(tmp_path / "corpus"), "--out", out)
    assert_one_message(run("release", "vocab", *arguments, "--processes", 1, "--json"), *words)
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]


def test_a_closed_folder(
    pair: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not by its mode: root reads every folder.
    (tmp_path / "closed").mkdir()
    (tmp_path / "a.txt").write_text("x")
    scandir = os.scandir

    def refuse(path: Any) -> Any:
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    arguments = ("--target", pair / "target", "--corpus", tmp_path)
    ended = run("release", "vocab", *arguments, "--out", tmp_path / "o.safetensors")
    assert_one_message(ended, "closed", "Permission denied")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--processes", 0], ["--processes 0"]),
        (["--processes", 10**30], [f"--processes {10**30}", "1024"]),
        (["--coverage", 0], ["--coverage 0"]),
        (["--coverage", 1.5], ["--coverage 1.5"]),
        (["--out", "vocab.json"], ["vocab.json", ".safetensors"]),
        (["--target", "no/such/folder"], ["target", "no/such/folder"]),
    ],
)
def test_bad_options(
    flags: list[object], words: list[str], pair: Path, tmp_path: Path, run: Run
) -> None:
    (tmp_path / "a.txt").write_text("x")
    sound = ["--target", pair / "target", "--corpus", tmp_path / "a.txt"]
    out = ["--out", tmp_path / "o.safetensors"]
    assert_one_message(run("release", "vocab", *sound, *out, *flags), *words)


def test_weights_are_never_replaced(pair: Path, tmp_path: Path, run: Run) -> None:
    (tmp_path / "a.txt").write_text("x")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes((pair / "draft/model.safetensors").read_bytes())
    before = weights.read_bytes()
    arguments = ("--target", pair / "target", "--corpus", tmp_path / "a.txt", "--out", weights)
    assert_one_message(run("release", "vocab", *arguments), "model.safetensors", "another file")
    assert weights.read_bytes() == before


def test_a_tokenizer_of_another_model(pair: Path, tmp_path: Path, run: Run) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_bytes((pair / "target/config.json").read_bytes())
    tokenizer(400).save_pretrained(target)
    (tmp_path / "a.txt").write_text("x")
    arguments = ("--target", target, "--corpus", tmp_path / "a.txt", "--out", "o.safetensors")
    assert_one_message(run("release", "vocab", *arguments), "ids up to 399", "264 rows")
