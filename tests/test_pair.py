"""load_pair: what it loads, what it refuses and how it says so, and that it runs nobody's code."""

import contextlib
import io
import types
from pathlib import Path

import pytest
import torch
from support import pair_folders, toys
from support.pair_folders import (
    BROKEN_PAIRS,
    copy_pair,
    edit_json,
    write_drafter,
    write_pair,
    write_target,
)

import flashmap
from flashmap import references
from flashmap.pair import check_tokenizer, vocabulary_hash


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair(tmp_path_factory.mktemp("pair"))


def refusal(target: object, draft: object, *args: object) -> str:
    """The message that load_pair refuses with."""
    with pytest.raises(ValueError) as caught:
        flashmap.load_pair(str(target), str(draft), *args)  # type: ignore[arg-type]
    return str(caught.value)


def test_loads_a_pair_that_decodes(pair: Path) -> None:
    target, draft, tokenizer = flashmap.load_pair(pair / "target", pair / "draft")
    assert isinstance(draft, flashmap.FlashMapDraftModel)
    assert not target.training and not draft.training
    ids = tokenizer("hello", return_tensors="pt")["input_ids"]
    out = draft.spec_generate(target, ids, max_new_tokens=12, stop_token_ids=[])
    assert toys.text_of(out, ids) == toys.greedy(target, ids, 12)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_auto_dtype_is_what_the_target_is_stored_in(stored: torch.dtype, tmp_path: Path) -> None:
    write_target(tmp_path / "target", stored)
    write_drafter(tmp_path / "draft", torch.bfloat16)
    target, draft, _ = flashmap.load_pair(tmp_path / "target", tmp_path / "draft", "cpu")
    assert (target.dtype, draft.dtype) == (stored, stored)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", torch.float32, torch.bfloat16])
def test_a_dtype_holds_for_both(dtype: "str | torch.dtype", pair: Path) -> None:
    target, draft, _ = flashmap.load_pair(pair / "target", pair / "draft", dtype=dtype)
    wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    assert (target.dtype, draft.dtype) == (wanted, wanted)


def test_sharded_weights_load(pair: Path, tmp_path: Path) -> None:
    target_folder, draft_folder = copy_pair(pair, tmp_path)
    pair_folders.shard(target_folder)
    pair_folders.shard(draft_folder)
    target, _, _ = flashmap.load_pair(target_folder, draft_folder)
    whole, _, _ = flashmap.load_pair(pair / "target", pair / "draft")
    assert all(
        a.equal(b)
        for a, b in zip(target.state_dict().values(), whole.state_dict().values(), strict=True)
    )


def test_a_matching_vocabulary_hash_is_accepted(pair: Path, tmp_path: Path) -> None:
    target_folder, draft_folder = copy_pair(pair, tmp_path)
    expected = vocabulary_hash(pair_folders.tokenizer())
    edit_json(draft_folder / "config.json", target_vocab_hash=expected)
    _, draft, tokenizer = flashmap.load_pair(target_folder, draft_folder)
    assert vocabulary_hash(tokenizer) == draft.config.target_vocab_hash == expected


@pytest.mark.parametrize("case", BROKEN_PAIRS)
def test_a_broken_pair_is_refused_in_one_message(case: str, pair: Path, tmp_path: Path) -> None:
    target, draft = copy_pair(pair, tmp_path)
    break_it, words = BROKEN_PAIRS[case]
    break_it(target, draft)
    message = refusal(target, draft)
    missing = [word for word in words if word not in message]
    assert not missing, f"{message!r} lacks {missing}"


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("cuda", ["cuda", "no GPU"]),
        ("cuda:3", ["cuda:3"]),
        ("cuda:200", ["cuda:200", "no GPU"]),
        ("cuda:256", ["cuda:256", "no GPU"]),
        ("cuda:999", ["cuda:999", "no GPU"]),
        ("cuda:-1", ["cuda:-1"]),
        ("tpu9", ["tpu9"]),
        ("meta", ["meta"]),
    ],
)
def test_a_device_that_is_not_there(
    device: str, words: list[str], pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    message = refusal(pair / "target", pair / "draft", device)
    assert all(word in message for word in words)


@pytest.mark.parametrize("dtype", ["float7", "int8", torch.int32])
def test_a_dtype_that_is_none(dtype: "str | torch.dtype", pair: Path) -> None:
    assert "bfloat16" in refusal(pair / "target", pair / "draft", None, dtype)


@pytest.mark.parametrize(
    "ref", ["", "../gone", "/no/such/folder", "a/b/c", "owner/", "owner/name@", "a b"]
)
def test_neither_a_folder_nor_a_hub_id(ref: str, pair: Path) -> None:
    assert "Hub id" in refusal(ref, pair / "draft")
    assert "Hub id" in refusal(pair / "target", ref)


def test_a_home_that_nobody_has(pair: Path) -> None:
    message = refusal("~nosuchuser/x", pair / "draft")
    assert "'~nosuchuser/x'" in message and "write the folder's path out" in message


def test_a_file_is_no_folder(pair: Path) -> None:
    assert "is a file" in refusal(pair / "target" / "config.json", pair / "draft")


@pytest.mark.parametrize("ref", ["owner/name", "owner/name@v1", "gpt2"])
def test_a_hub_id_while_offline(
    ref: str, pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    message = refusal(pair / "target", ref)
    assert all(word in message for word in [ref.partition("@")[0], "HF_HUB_OFFLINE", "cache"])


def test_the_alias_outside_a_checkout(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(references, "checkout_root", lambda: None)
    message = refusal(pair / "target", "smollm2-135m")
    assert "clone" in message and "Hub id" in message


@pytest.mark.parametrize("role", ["target", "draft"])
def test_code_in_a_folder_is_never_run(
    role: str, pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Somebody, or a script, who says yes to every question.
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    target, draft = copy_pair(pair, tmp_path)
    folder = tmp_path / role
    trace = tmp_path / "it-ran"
    for name in ("configuration_flashmap.py", "modeling_flashmap.py"):
        (folder / name).write_text(f"open({str(trace)!r}, 'w')\n")
    names = {"draft": ("FlashMapConfig", "FlashMapDraftModel"), "target": ("A", "B")}[role]
    auto_map = {
        "AutoConfig": f"configuration_flashmap.{names[0]}",
        "AutoModel": f"modeling_flashmap.{names[1]}",
        "AutoModelForCausalLM": f"modeling_flashmap.{names[1]}",
    }
    edit_json(folder / "config.json", auto_map=auto_map)
    flashmap.load_pair(target, draft)
    assert not trace.exists()
    if role == "target":
        edit_json(folder / "config.json", model_type="something-new")
        message = refusal(target, draft)
        assert "cannot be loaded" in message and "runs no model's own code" in message
        assert "\n" not in message and not trace.exists()


def test_code_of_a_tokenizer_is_never_run(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    target, draft = copy_pair(pair, tmp_path)
    trace = tmp_path / "it-ran"
    (target / "mine.py").write_text(f"open({str(trace)!r}, 'w')\n")
    path = target / "tokenizer_config.json"
    edit_json(path, auto_map={"AutoTokenizer": ["mine.T", "mine.T"]}, tokenizer_class="Mine")
    with contextlib.suppress(ValueError):  # some versions fall back to the tokenizer's data
        flashmap.load_pair(target, draft)
    assert not trace.exists()


def test_rows_of_a_packed_embedding_are_ids(tmp_path: Path) -> None:
    table = types.SimpleNamespace(num_embeddings=pair_folders.ROWS, weight=torch.zeros(7, 3))
    target = types.SimpleNamespace(get_input_embeddings=lambda: table)
    check_tokenizer(pair_folders.tokenizer(), target, object(), tmp_path)  # type: ignore[arg-type]
