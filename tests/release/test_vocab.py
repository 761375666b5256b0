"""Ranking a target's tokens: counts against the bytes of the corpus, whatever interrupts the run.

The tiny target's tokenizer has no merges: a token a byte, so the truth can be counted without it.
"""

import hashlib
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from support.pair_folders import ROWS, SPECIAL, edit_json, tokenizer, write_target

from flashmap.release import corpus, count, coverage, tally
from flashmap.release.target import read_target
from flashmap.release.vocab import rank_vocabulary
from flashmap.vocabulary import write_draft_vocab

IDS = tokenizer().get_vocab()
# How a byte-level tokenizer spells bytes: printable ones stand for themselves.
PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
REST = [byte for byte in range(256) if byte not in PRINTABLE]
SPELLED = {byte: chr(byte) for byte in PRINTABLE} | {b: chr(256 + i) for i, b in enumerate(REST)}
STOP = IDS[SPECIAL[0]]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("vocab") / "target")


def token_counts(text: str, specials: "Counter[str] | None" = None) -> torch.Tensor:
    """How often each id comes in bytes of text, and in special tokens."""
    counts = torch.zeros(ROWS, dtype=torch.int64)
    for byte, number in Counter(text.encode()).items():
        counts[IDS[SPELLED[byte]]] += number
    for token, number in (specials or Counter()).items():
        counts[IDS[token]] += number
    return counts


def read(path: Path) -> tuple[torch.Tensor, torch.Tensor, dict[str, str]]:
    with safe_open(path, framework="pt") as file:
        return file.get_tensor("ids"), file.get_tensor("counts"), dict(file.metadata())


def true_counts(path: Path) -> torch.Tensor:
    """Counts by id, before the required ones were raised."""
    ids, ranked, metadata = read(path)
    counts = torch.zeros_like(ranked)
    counts[ids] = ranked
    for token, number in json.loads(metadata["raised"]).items():
        counts[int(token)] = number
    return counts


TEXT = "The quick brown fox é漢😀\n\njumps over 13 lazy dogs.\n" * 40


def test_counts_are_those_of_the_bytes_in_every_kind_of_file(target: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    chats = [
        [{"role": "user", "content": f"hi {i}"}, {"role": "assistant", "content": "yes<|end|>"}]
        for i in range(50)
    ]
    rows = [{"messages": chat} for chat in chats] + [{"text": TEXT}]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, rows)))
    wanted = token_counts(TEXT * 2 + "".join(f"hi {i}yes" for i in range(50)))
    wanted += token_counts("", Counter(dict.fromkeys(SPECIAL, 50)))
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        pass
    else:
        parquet.write_table(pyarrow.table({"messages": chats}), tmp_path / "c.parquet")
        wanted += token_counts("".join(f"hi {i}yes" for i in range(50)))
        wanted += token_counts("", Counter(dict.fromkeys(SPECIAL, 50)))
    out = tmp_path / "out.safetensors"
    stages = []
    found = rank_vocabulary(
        str(target), [tmp_path], out, num_processes=2, progress=lambda *row: stages.append(row)
    )
    assert true_counts(out).equal(wanted)
    assert found.tokens == int(wanted.sum()) == int(read(out)[2]["tokens_seen"])
    assert found.distinct == int((wanted > 0).sum())
    assert {stage for stage, done, total in stages if done == total} == {"hash", "check", "count"}
    assert not list(tmp_path.glob(".*"))


def test_the_ranking_is_a_permutation_by_count_then_id(target: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    out = tmp_path / "out.safetensors"
    found = rank_vocabulary(str(target), [tmp_path / "a.txt"], out, num_processes=1)
    ids, counts, metadata = read(out)
    assert ids.dtype == counts.dtype == torch.int64
    assert sorted(ids.tolist()) == list(range(ROWS))
    pairs = list(zip((-counts).tolist(), ids.tolist(), strict=True))
    assert pairs == sorted(pairs)
    # The end token and the template's came nowhere in that text and rank with the first.
    assert found.required == sorted({STOP, IDS["<|user|>"], IDS["<|assistant|>"]})
    assert set(found.required) < set(ids[: len(found.required) + 1].tolist())
    assert json.loads(metadata["raised"]) == {str(token): 0 for token in found.required}
    digest = hashlib.sha256(TEXT.encode()).hexdigest()
    assert metadata["corpus_sha256"] == hashlib.sha256(digest.encode()).hexdigest()
    assert metadata["target_model"] == "target" and metadata["d2t"].startswith("offset")
    assert metadata["target_vocab_hash"] == read_target(str(target)).vocab_hash


def test_end_tokens_of_every_file_are_required(target: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((target / name).read_bytes())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    edit_json(tmp_path / "config.json", eos_token_id=11)
    assert {STOP, 7, 9, 11} <= set(read_target(str(tmp_path)).required)


def test_the_same_counts_give_the_same_bytes(tmp_path: Path) -> None:
    about = {letter: letter for letter in "zyxabc"}  # whose order the library shuffles every time
    paths = [tmp_path / f"{i}.safetensors" for i in range(8)]
    for path in paths:
        write_draft_vocab(path, torch.arange(9) % 3, about, [5, 0])
    assert len({path.read_bytes() for path in paths}) == 1
    ids, counts, metadata = read(paths[0])
    assert ids.tolist() == [0, 2, 5, 8, 1, 4, 7, 3, 6]
    assert counts.tolist() == [2, 2, 2, 2, 1, 1, 1, 0, 0]
    assert json.loads(metadata["raised"]) == {"0": 0, "5": 2} and metadata["z"] == "z"


PIECES = 30


@pytest.fixture
def pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A corpus of many pieces, smaller than usual."""
    monkeypatch.setattr(corpus, "PIECE", 2**14)
    path = tmp_path / "pieces.txt"
    text = TEXT * (PIECES * 2**14 // len(TEXT.encode()))
    path.write_text(text, encoding="utf-8")
    assert len(corpus.split_file(path)) == PIECES
    return path


# Slow enough to be stopped, and what is counted is written down at once.
RANK = """
import signal, sys, time
from pathlib import Path
from flashmap.release import corpus, tally
from flashmap.release.vocab import rank_vocabulary
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it
    tally.SAVE_SECONDS, corpus.PIECE = 0.0, 2**14
    rank_vocabulary(
        sys.argv[1], [Path(sys.argv[2])], Path(sys.argv[3]), num_processes=2,
        progress=lambda *row: time.sleep(0.2 * (row[0] == "count")),
    )
"""


def start(target: Path, path: Path, out: Path) -> "subprocess.Popen[str]":
    script = out.with_name("rank.py")
    script.write_text(RANK)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.Popen(
        [sys.executable, script, target, path, out],
        env=env,
        text=True,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def wait_for_state(process: "subprocess.Popen[str]", state: Path) -> dict[str, Any]:
    while not state.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    value: dict[str, Any] = json.loads(state.read_text())
    return value


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_stopped_run_goes_on_to_the_same_bytes(
    number: signal.Signals, pieces: Path, target: Path, tmp_path: Path
) -> None:
    out, state = tmp_path / "out.safetensors", tmp_path / ".out.safetensors.counts.json"
    process = start(target, pieces, out)
    wait_for_state(process, state)
    os.killpg(process.pid, number) if number == signal.SIGINT else process.kill()
    error = process.communicate(timeout=60)[1]
    assert not out.exists()
    done = len(json.loads(state.read_text())["done"])
    assert 0 < done < PIECES
    if number == signal.SIGINT:
        assert f"interrupted with {done} of {PIECES} pieces" in error.splitlines()[-1]
    assert_nobody_is_left(process.pid)
    steps: list[int] = []
    rank_vocabulary(
        str(target),
        [pieces],
        out,
        num_processes=2,
        progress=lambda stage, done, total: steps.append(done) if stage == "count" else None,
    )
    assert steps[0] == done + 1  # not from the start
    whole = tmp_path / "whole.safetensors"
    rank_vocabulary(str(target), [pieces], whole, num_processes=1)
    assert out.read_bytes() == whole.read_bytes()
    assert true_counts(out).equal(token_counts(pieces.read_text(encoding="utf-8")))
    assert not state.exists()


def assert_nobody_is_left(session: int) -> None:
    """Within a few seconds no process of that session runs: whoever counted has ended too."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        found = subprocess.run(
            ["ps", "-o", "stat=", "-s", str(session)], check=False, capture_output=True, text=True
        ).stdout.split()
        if all(state.startswith("Z") for state in found):
            return
        time.sleep(0.05)
    pytest.fail(f"processes of session {session} are left")


def test_a_mended_corpus_is_counted_from_the_start(target: Path, tmp_path: Path) -> None:
    path, out = tmp_path / "a.txt", tmp_path / "out.safetensors"
    path.write_text("abc")
    saved = tally.Tally(tmp_path / ".out.safetensors.counts.json", "of another corpus")
    saved.add(0, {5: 1000})
    saved.save()
    rank_vocabulary(str(target), [path], out, num_processes=1)
    assert true_counts(out).equal(token_counts("abc"))


@pytest.mark.parametrize("state", ["", "{}", "[1]", '{"fingerprint": 1, "done": 3}', "\udce9"])
def test_a_damaged_state_is_not_used(state: str, tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_bytes(state.encode("utf-8", "surrogateescape"))
    assert tally.Tally(path, "x").done == set()


def test_a_corpus_that_changes_meanwhile_is_refused(target: Path, tmp_path: Path) -> None:
    path, out = tmp_path / "a.txt", tmp_path / "out.safetensors"
    path.write_text("abc")

    def change(stage: str, done: int, total: int) -> None:
        if stage == "count":
            path.write_text("abcd")

    with pytest.raises(ValueError, match="changed while it was counted"):
        rank_vocabulary(str(target), [path], out, num_processes=1, progress=change)
    assert not out.exists()


def test_a_second_run_with_the_same_result_is_told_to_wait(target: Path, tmp_path: Path) -> None:
    path, out = tmp_path / "a.txt", tmp_path / "out.safetensors"
    path.write_text("abc")
    refused = []

    def another(stage: str, done: int, total: int) -> None:
        with pytest.raises(ValueError, match=r"another process is making .*out\.safetensors"):
            rank_vocabulary(str(target), [path], out, num_processes=1)
        refused.append(stage)

    rank_vocabulary(str(target), [path], out, num_processes=1, progress=another)
    assert "count" in refused and true_counts(out).equal(token_counts("abc"))
    assert {file.name for file in tmp_path.glob(".*")} == set()


def test_a_lost_process_is_told(pieces: Path, target: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"

    def kill(stage: str, done: int, total: int) -> None:
        if (stage, done) == ("count", 1):
            for child in multiprocessing.active_children():
                child.kill()

    with pytest.raises(ValueError, match=r"ended from outside.*--processes"):
        rank_vocabulary(str(target), [pieces], out, num_processes=1, progress=kill)
    state = json.loads((tmp_path / ".out.safetensors.counts.json").read_text())
    assert 0 < len(state["done"]) < PIECES


def test_a_template_that_refuses_is_told(target: Path) -> None:
    strict = replace(read_target(str(target)), template="{{ raise_exception('no tools') }}")
    with pytest.raises(ValueError, match=r"a\.jsonl: .*template refuses.*'tool'.*no tools"):
        count._Worker(strict).text([{"role": "tool", "content": "x"}], Path("a.jsonl"))


def test_a_target_without_a_template_is_told(target: Path) -> None:
    bare = replace(read_target(str(target)), template=None)
    with pytest.raises(ValueError, match=r"a\.jsonl: .*chat_template"):
        count._Worker(bare).text([{"role": "user", "content": "x"}], Path("a.jsonl"))


def test_a_template_finds_the_special_tokens(target: Path) -> None:
    ending = replace(read_target(str(target)), template="{{ messages[0].content + eos_token }}")
    text = count._Worker(ending).text([{"role": "user", "content": "x"}], Path("a.jsonl"))
    assert text == "x" + SPECIAL[0]


def test_settings_of_the_tokenizer_do_not_change_counts(target: Path) -> None:
    core = tokenizer().backend_tokenizer
    core.enable_truncation(3)
    core.enable_padding(length=50)
    worker = count._Worker(replace(read_target(str(target)), tokenizer=core.to_str()))
    assert worker.encode("hello <|user|>") == [*(IDS[c] for c in "helloĠ"), IDS["<|user|>"]]


@contextmanager
def full_disk(room: int) -> Iterator[None]:
    """The system refuses to write any file beyond `room` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    write_draft_vocab(out, torch.arange(100), {})
    before = out.read_bytes()
    with full_disk(1000), pytest.raises(ValueError, match=r"out\.safetensors cannot be written"):
        write_draft_vocab(out, torch.arange(100).flip(0), {})
    assert out.read_bytes() == before and list(tmp_path.iterdir()) == [out]


def test_a_disk_that_fills_up_stops_the_run_and_it_goes_on(target: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    out = tmp_path / "out.safetensors"

    def rank() -> None:
        rank_vocabulary(str(target), [tmp_path / "a.txt"], out, num_processes=1)

    with full_disk(100), pytest.raises(ValueError, match=r"counts\.json cannot be written"):
        rank()
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    with full_disk(2000), pytest.raises(ValueError, match=r"out\.safetensors cannot be written"):
        rank()
    assert (tmp_path / ".out.safetensors.counts.json").exists() and not out.exists()
    rank()
    assert true_counts(out).equal(token_counts(TEXT))


# --- coverage


def test_coverage_and_recommendation() -> None:
    counts = torch.zeros(5000, dtype=torch.int64)
    counts[:1500] = torch.tensor([10] * 500 + [2] * 500 + [1] * 500)
    curve = {row.size: row.coverage for row in coverage.coverage_curve(counts)}
    assert curve == pytest.approx({1024: 6024 / 6500, 2048: 1.0, 4096: 1.0, 5000: 1.0})
    assert coverage.recommend_size(counts, 0.9).size == 1024
    assert coverage.recommend_size(counts, 6024 / 6500).size == 1024
    assert coverage.recommend_size(counts, 0.95).size == 2048
    assert coverage.recommend_size(counts, 1.0).size == 2048
    assert coverage.recommend_size(counts[:1500], 1.0).size == 1500  # no more than there are
    assert coverage.unseen_share(counts) == pytest.approx(500 / 6500)


def test_the_picture_is_drawn_or_said_to_be_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    counts = torch.arange(3000, 0, -1)
    size = coverage.recommend_size(counts, 0.9)
    assert coverage.draw_coverage(counts, size, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG\r\n")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert not coverage.draw_coverage(counts, size, tmp_path / "other.png")
    assert not (tmp_path / "other.png").exists()


def test_parquet_without_pyarrow_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"flashmap-hub\[vocab\]"):
        corpus.split_file(tmp_path / "a.parquet")
