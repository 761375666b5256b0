"""The commands on a tiny pair: what they print, where, and how they end."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from support.commands import Run, assert_one_message, refs

import flashmap
from flashmap.cli import doctor as doctor_module

COMMANDS = [
    "", "demo", "generate", "bench", "doctor",
    "release", "release build", "release check", "release card",
    "release vocab", "release grids", "release convert",
]  # fmt: skip
# Flags that scripts rely on; others come with later issues and must not half-exist.
FLAGS = {
    "generate": "max-new-tokens temperature top-k top-p min-p num-steps num-draws "
    "num-candidates adaptive no-adaptive seed device dtype raw json target draft help",
    "bench": "prompts temperature max-new-tokens repeats num-steps num-draws num-candidates "
    "adaptive no-adaptive dtype device seed json target draft help",
    "doctor": "json help",
    "demo": "json max-new-tokens help",
    "release build": "out tag repo-id max-shard-size json help",
    "release check": "target acceptance prompts transformers json help",
    "release card": "picture no-picture json help",
    "release vocab": "target corpus out processes coverage json help",
    "release grids": "vocab-size steps mode json help",
    "release convert": "out target revision license json help",
}


# --- help


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command: str, run: Run) -> None:
    ended = run(*command.split(), "--help")
    assert ended.status == 0 and "Usage" in ended.out
    if command not in ("", "release"):
        assert f"Example: flashmap {command}" in " ".join(ended.out.split())


@pytest.mark.parametrize("command", FLAGS)
def test_flags_are_the_agreed_ones(command: str, run: Run) -> None:
    text = run(*command.split(), "--help").out
    found = {
        word.strip(",.") for word in text.split("Options:")[1].split() if word.startswith("--")
    }
    example = set(text.split("Example:")[1].split())
    assert found - (example - {f"--{flag}" for flag in FLAGS[command].split()}) == {
        f"--{flag}" for flag in FLAGS[command].split()
    }


def test_help_is_fast_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['flashmap', '--help']\n"
        "from flashmap.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit: pass\n"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'heavy'\n"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert (
        time.perf_counter() - start < 10
    )  # far below the seconds that torch takes, on any machine


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["generate"],
        ["generate", "hi", "--top-k", "3"],
        ["generate", "hi", "--target", "a", "--draft", "b", "--num-draws", "many"],
        ["bench", "--repeats", "x"],
        ["release", "push"],
        ["release", "kernels", "me/ops", "--dry-run", "--version", "0"],
        ["release", "kernels", "me/ops", "--dry-run", "--version", "10000"],
    ],
)
def test_wrong_usage_ends_with_2(arguments: list[str], run: Run) -> None:
    ended = run(*arguments)
    assert ended.status == 2 and ended.out == "" and "Traceback" not in ended.err


# --- generate


def test_generate_json_is_one_document_with_the_agreed_keys(pair: Path, run: Run) -> None:
    ended = run("generate", "hello", *refs(pair), "--max-new-tokens", 20, "--json", "--seed", 5)
    assert ended.status == 0
    document = json.loads(ended.out)
    assert list(document) == [
        *("prompt", "text", "token_ids", "num_new_tokens", "acceptance_lengths"),
        *("acceptance_length", "seconds", "tokens_per_second", "seed", "target", "draft"),
        "kernels",
    ]
    assert document["num_new_tokens"] == len(document["token_ids"])
    assert document["seed"] == 5 and document["kernels"] == "reference"
    assert document["tokens_per_second"] == pytest.approx(
        len(document["token_ids"]) / document["seconds"]
    )
    lengths = document["acceptance_lengths"]
    assert document["acceptance_length"] == pytest.approx(sum(lengths) / len(lengths))


@pytest.mark.parametrize("raw", [False, True])
def test_generate_gives_the_tokens_of_plain_greedy_decoding(
    raw: bool, pair: Path, run: Run
) -> None:
    target, _, tokenizer = flashmap.load_pair(pair / "target", pair / "draft")
    text = "hello" if raw else "<|user|>hello<|assistant|>"
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    expected = target.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24
    )
    flags = ["--raw"] if raw else []
    document = json.loads(
        run("generate", "hello", *refs(pair), "--max-new-tokens", 24, "--json", *flags).out
    )
    assert document["token_ids"] == expected[0, ids.shape[1] :].tolist()
    assert document["text"] == tokenizer.decode(document["token_ids"], skip_special_tokens=True)


def test_generate_prints_the_text_alone_on_stdout(pair: Path, run: Run) -> None:
    document = json.loads(run("generate", "hi", *refs(pair), "--max-new-tokens", 9, "--json").out)
    ended = run("generate", "hi", *refs(pair), "--max-new-tokens", 9)
    assert ended.out == document["text"] + "\n"
    assert "tokens/s" in ended.err


def test_a_seed_repeats_a_sample(pair: Path, run: Run) -> None:
    flags = ["--temperature", 1.0, "--max-new-tokens", 16, "--json"]
    first, again, other = (
        json.loads(run("generate", "hi", *refs(pair), *flags, "--seed", seed).out)["token_ids"]
        for seed in (3, 3, 4)
    )
    assert first == again != other


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        (["--top-p", 0.9], {"temperature": 1.0, "top_p": 0.9}),
        (["--top-k", 5, "--min-p", 0.1], {"temperature": 1.0, "top_k": 5, "min_p": 0.1}),
        (["--top-p", 0.9, "--temperature", 0.4], {"temperature": 0.4, "top_p": 0.9}),
    ],
)
def test_what_narrows_down_samples(
    flags: list[object], settings: dict[str, float], pair: Path, run: Run
) -> None:
    command = ["generate", "hi", *refs(pair), *flags, "--max-new-tokens", 16, "--seed", 7, "--json"]
    first, again = (json.loads(run(*command).out)["token_ids"] for _ in range(2))
    target, draft, tokenizer = flashmap.load_pair(pair / "target", pair / "draft")
    ids = tokenizer("<|user|>hi<|assistant|>", return_tensors="pt")["input_ids"]
    out = draft.spec_generate(target, ids, max_new_tokens=16, seed=7, **settings)
    assert first == again == out.sequences[0, ids.shape[1] :].tolist()


def test_generate_streams_to_a_terminal(pair: Path) -> None:
    pty = pytest.importorskip("pty", reason="needs pseudo-terminals")
    document = ["generate", "hi", *map(str, refs(pair)), "--max-new-tokens", "12"]
    code = (
        f"import sys; sys.argv = ['flashmap', *{document!r}]; from flashmap.cli.main import "
        f"main; main()"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    parent, child = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=child, stderr=subprocess.PIPE, env=env
    )
    os.close(child)
    shown = b""
    try:
        while chunk := os.read(parent, 4096):
            shown += chunk
    except OSError:  # the other end closed
        pass
    os.close(parent)
    assert process.wait(timeout=60) == 0, process.stderr.read() if process.stderr else ""
    target, draft, tokenizer = flashmap.load_pair(pair / "target", pair / "draft")
    ids = tokenizer("<|user|>hi<|assistant|>", return_tensors="pt")["input_ids"]
    out = draft.spec_generate(target, ids, max_new_tokens=12)
    expected = tokenizer.decode(out.sequences[0, ids.shape[1] :], skip_special_tokens=True)
    assert shown.decode(errors="replace").split() == expected.split()


# --- bench


def test_bench_json(pair: Path, tmp_path: Path, run: Run) -> None:
    prompts = tmp_path / "prompts.jsonl"
    rows = [
        {"prompt": "a b", "domain": "x"},
        {"prompt": "c", "domain": "y"},
        {"prompt": "d", "domain": "x"},
    ]
    prompts.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    ended = run(
        "bench", *refs(pair), "--prompts", prompts, "--max-new-tokens", 20, "--repeats", 2, "--json"
    )
    assert ended.status == 0
    document = json.loads(ended.out)
    assert list(document) == ["protocol", "rows", "overall"]
    keys = (
        "domain prompts tokens rounds acceptance_length tokens_per_second "
        "plain_tokens_per_second speedup identical"
    )
    assert [row["domain"] for row in document["rows"]] == ["x", "y"]
    for row in [*document["rows"], document["overall"]]:
        assert set(keys.split()) | {"looped", "acceptance_length_without_looped"} == row.keys()
        assert row["identical"] == row["prompts"]  # float32: exact
        assert row["speedup"] == pytest.approx(
            row["tokens_per_second"] / row["plain_tokens_per_second"]
        )
    assert document["overall"]["prompts"] == 3
    assert document["overall"]["tokens"] == sum(row["tokens"] for row in document["rows"])
    protocol = document["protocol"]
    agreed = {
        "prompts",
        "template",
        "temperature",
        "max_new_tokens",
        "dtype",
        "device",
        "versions",
        "commit",
    }
    assert agreed <= protocol.keys()
    assert protocol["dtype"] == "float32" and "warm_up" in protocol and "plain" in protocol


def test_bench_sampled_has_no_identical(pair: Path, tmp_path: Path, run: Run) -> None:
    (tmp_path / "p.txt").write_text("one\ntwo\n")
    flags = ["--temperature", 0.9, "--max-new-tokens", 8, "--json"]
    document = json.loads(run("bench", *refs(pair), "--prompts", tmp_path / "p.txt", *flags).out)
    assert document["overall"]["identical"] is None


def test_bench_prints_protocol_and_table(pair: Path, tmp_path: Path, run: Run) -> None:
    (tmp_path / "p.txt").write_text("one\ntwo\n")
    ended = run("bench", *refs(pair), "--prompts", tmp_path / "p.txt", "--max-new-tokens", 8)
    assert ended.status == 0
    words = ["temperature: 0.0", "warm_up:", "plain tokens/s", "identical", "without looped"]
    assert [word for word in words if word not in ended.out] == []


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("gone.txt", None, ["gone.txt"]),
        ("empty.txt", "\n \n", ["empty.txt", "no prompt"]),
        ("bad.jsonl", '{"prompt": "a"}\n{"prompt"\n', ["bad.jsonl:2"]),
        ("bad.jsonl", '{"question": "a"}\n', ["bad.jsonl:1", "prompt"]),
        ("bad.jsonl", '{"prompt": 3}\n', ["bad.jsonl:1"]),
        ("bad.jsonl", '{"prompt": "\\udc00"}\n', ["bad.jsonl:1", "\\udc00"]),
        ("bad.jsonl", "[1]\n", ["bad.jsonl:1"]),
        ("bytes.txt", b"\xff\xfe\x00", ["bytes.txt"]),
    ],
)
def test_bad_prompts_files(
    name: str, content: "str | bytes | None", words: list[str], pair: Path, tmp_path: Path, run: Run
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert_one_message(run("bench", *refs(pair), "--prompts", path), *words)


# --- doctor


def test_doctor(run: Run) -> None:
    ended = run("doctor", "--json")
    report = json.loads(ended.out)
    assert ended.status == 0
    assert report["packages"]["torch"] == torch.__version__
    picked = report["kernels"]["picked"]
    assert {"rms_norm", "block_attention", "write_context"} < picked.keys()
    if report["kernels"]["device"] == "cpu":
        assert set(picked.values()) == {"eager: the device is a CPU"}
    assert report["engines"].keys() == {"vllm", "sglang"}
    assert not any(engine["supported"] for engine in report["engines"].values())
    text = run("doctor").out
    assert all(word in text for word in ["torch", "  block_attention", "engine vllm", "device:"])


@pytest.mark.parametrize(
    ("name", "version", "supported", "words"),
    [
        ("vllm", "0.32.1", True, "plugin was run on a CPU with it"),
        ("vllm", "0.33.0", True, "compared by its signatures"),
        ("vllm", "0.3", False, "plugin serves 0.31"),
        ("sglang", "0.5.23", True, "plugin was compared by its signatures with it"),
        ("sglang", "0.5.2", False, "plugin serves 0.5.20, 0.5.21"),
    ],
)
def test_doctor_on_engines(
    name: str,
    version: str,
    supported: bool,
    words: str,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        doctor_module, "_version", lambda wanted: version if wanted == name else None
    )
    engine = json.loads(run("doctor", "--json").out)["engines"][name]
    assert engine["version"] == version and engine["supported"] is supported
    assert re.search(words, engine["why"])


def test_doctor_finds_the_other_distribution(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        doctor_module, "_version", lambda name: "0.1.0" if name == "flashmap" else None
    )
    ended = run("doctor", "--json")
    (problem,) = json.loads(ended.out)["problems"]
    assert ended.status == 1 == run("doctor").status
    assert "flashmap 0.1.0" in problem and "flashmap-hub" in problem


# --- release


def test_release_build_and_check(pair: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out"
    command = ["release", "build", pair / "draft", "--out", out, "--repo-id", "me/it", "--tag"]
    built = run(*command, "v1")
    assert built.status == 0 and "built" in built.out and str(out) in built.out
    assert "unchanged" in run(*command, "v1").out
    document = json.loads(run(*command, "v2", "--max-shard-size", "20KB", "--json").out)
    assert list(document) == ["folder", "changed", "files", "digest"]
    assert document["folder"] == str(out) and document["changed"] is True
    files = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert document["files"].keys() == files and "model.safetensors.index.json" in files
    checked = run("release", "check", out, "--json")
    findings = json.loads(checked.out)
    assert checked.status == 0
    assert all(list(row) == ["check", "status", "found", "expected", "fix"] for row in findings)
    assert {row["status"] for row in findings} == {"ok"} and len(findings) > 30
    with (out / "LICENSE").open("a") as file:
        file.write("and more")
    checked = run("release", "check", out)
    assert checked.status == 1 and "failed  record" in checked.out
    assert "1 failed, 3 skipped" in checked.out and "skipped load" in checked.out
    assert_one_message(run("release", "build", pair / "draft", "--out", out), "LICENSE", out)


def test_release_check_asks_for_what_it_needs(tmp_path: Path, run: Run) -> None:
    assert_one_message(run("release", "check", tmp_path / "gone"), "gone")
    assert_one_message(run("release", "check", tmp_path, "--acceptance"), "--target")
    assert_one_message(run("release", "check", tmp_path, "--prompts", 0), "--prompts 0")
    assert_one_message(run("release", "check", tmp_path, "--prompts", 3), "--acceptance")


def test_release_card(pair: Path, tmp_path: Path, run: Run) -> None:
    folder = tmp_path / "draft"
    shutil.copytree(pair / "draft", folder)
    assert run("release", "card", folder).out == f"{folder / 'README.md'}: README.md written\n"
    document = json.loads(run("release", "card", folder, "--no-picture", "--json").out)
    assert document == {"card": str(folder / "README.md"), "changed": []}
    assert_one_message(run("release", "card", tmp_path / "gone"), "gone")
