"""Bad input through the command line: one message, exit 1, no traceback."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.commands import Run, assert_one_message, refs
from support.pair_folders import BROKEN_PAIRS, copy_pair, edit_json

from flashmap.cli import options
from flashmap.modeling import arguments_flashmap


@pytest.mark.parametrize("case", BROKEN_PAIRS)
def test_a_broken_pair(case: str, pair: Path, tmp_path: Path, run: Run) -> None:
    copy = copy_pair(pair, tmp_path)
    break_it, words = BROKEN_PAIRS[case]
    break_it(*copy)
    assert_one_message(run("generate", "hi", *refs(tmp_path), "--json"), *words)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--max-new-tokens", 0], ["max-new-tokens", "0"]),
        (["--max-new-tokens", -3], ["max-new-tokens", "-3"]),
        (["--temperature", -0.5], ["temperature", "-0.5"]),
        (["--temperature", "nan"], ["temperature"]),
        (["--temperature", "inf"], ["temperature"]),
        (["--temperature", "1e-40"], ["--temperature", "1e-40", "1e-30"]),
        (["--num-steps", 9], ["num_steps=9", "1, 2, 3, 4"]),
        (["--num-steps", -1], ["num_steps=-1"]),
        (["--num-draws", 10**30], [f"num_draws={10**30}", "4096"]),
        (["--num-candidates", 10**30], [f"num_candidates={10**30}", "4096"]),
        (["--device", "cuda"], ["cuda", "no GPU"]),
        (["--device", "cuda:999"], ["cuda:999", "no GPU"]),
        (["--device", "toaster"], ["toaster"]),
        (["--dtype", "float7"], ["float7", "bfloat16"]),
    ],
)
@pytest.mark.parametrize("command", ["generate", "bench"])
def test_bad_numbers_and_names(
    command: str,
    flags: list[object],
    words: list[str],
    pair: Path,
    tmp_path: Path,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "prompts.txt").write_text("hi\n")
    subject = ["hi"] if command == "generate" else ["--prompts", tmp_path / "prompts.txt"]
    assert_one_message(run(command, *subject, *refs(pair), *flags, "--json"), *words)


def test_the_coldest_temperature_is_the_one_of_decoding() -> None:
    assert options.COLDEST == arguments_flashmap.COLDEST


@pytest.mark.parametrize("prompt", ["", "   ", "\n"])
def test_an_empty_prompt(prompt: str, pair: Path, run: Run) -> None:
    assert_one_message(run("generate", prompt, *refs(pair)), "prompt is empty")


def test_a_prompt_that_is_no_text(pair: Path, run: Run) -> None:
    prompt = os.fsdecode(b"caf\xe9")
    assert_one_message(run("generate", prompt, *refs(pair)), "not UTF-8", r"\udce9")


def test_prompt_ids_out_of_range(pair: Path, tmp_path: Path, run: Run) -> None:
    target, draft = copy_pair(pair, tmp_path)
    # A tokenizer whose highest id is one that no embedding row has.
    path = target / "tokenizer.json"
    vocabulary = json.loads(path.read_text())
    letter = next(name for name in vocabulary["model"]["vocab"] if name == "h")
    vocabulary["model"]["vocab"][letter] = 9999
    path.write_text(json.dumps(vocabulary))
    assert_one_message(run("generate", "hh", "--target", target, "--draft", draft), "9999")


def test_no_chat_template(pair: Path, tmp_path: Path, run: Run) -> None:
    target, _ = copy_pair(pair, tmp_path)
    (target / "chat_template.jinja").unlink(missing_ok=True)
    edit_json(target / "tokenizer_config.json", chat_template=None)
    assert_one_message(run("generate", "hi", *refs(tmp_path)), "--raw")
    assert run("generate", "hi", *refs(tmp_path), "--raw", "--max-new-tokens", 2).status == 0


def test_no_traceback_in_a_real_process(tmp_path: Path) -> None:
    code = "from flashmap.cli.main import main; main()"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    arguments = [
        "generate",
        "hi",
        "--target",
        str(tmp_path / "gone"),
        "--draft",
        str(tmp_path / "gone"),
    ]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=env
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1 and str(tmp_path / "gone") in done.stderr
