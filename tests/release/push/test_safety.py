"""What must not be published stops a push before anything is sent, and the file is named."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from flashmap.release.errors import ReleaseError
from flashmap.release.safety import publishable


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "out"
    (root / "eval").mkdir(parents=True)
    (root / "README.md").write_text("Log in with a token (hf_...), then sk-ip to the end.\n")
    (root / "eval" / "golden.json").write_text("[1]")
    save_file({"x": torch.zeros(4)}, root / "model.safetensors")
    return root


def test_a_sound_folder_goes_out_whole(folder: Path) -> None:
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "x.pyc").write_bytes(b"\0")
    (folder / ".gitattributes").write_text("")
    (folder / "LICENSE").symlink_to("README.md")
    files = publishable(folder)
    assert files.keys() == {"README.md", "LICENSE", "eval/golden.json", "model.safetensors"}


TOKENS = {
    "hf_" + "aB3" * 11 + "x": "Hugging Face",
    "AKIA" + "Q" * 16: "AWS",
    "ghp_" + "z9" * 18: "GitHub",
    "github_pat_" + "a1" * 35: "GitHub",
    "sk-" + "a1" * 20: "API key",
    "-----BEGIN OPENSSH PRIVATE KEY-----": "private key",
}


@pytest.mark.parametrize("token", TOKENS)
@pytest.mark.parametrize("where", ["README.md", "eval/log.txt", "middle of a large file"])
def test_secrets(token: str, where: str, folder: Path) -> None:
    text = f"key = {token}\n"
    if where.startswith("middle"):
        where, text = "eval/large.txt", "." * (4 * 2**20 - 12) + f" {text}" + "." * 99
    (folder / where).write_text(text)
    with pytest.raises(ReleaseError) as caught:
        publishable(folder)
    assert caught.value.check == "secret"
    assert where in caught.value.found and TOKENS[token] in caught.value.found
    assert token not in str(caught.value)


def test_a_secret_in_the_header_of_weights(folder: Path) -> None:
    metadata = {"format": "pt", "made_by": "hf_" + "a" * 34}
    save_file({"x": torch.zeros(4)}, folder / "model.safetensors", metadata=metadata)
    with pytest.raises(ReleaseError, match="Hugging Face token"):
        publishable(folder)


def torch_archive(folder: Path) -> None:
    torch.save({"x": torch.zeros(2)}, folder / "optimizer.dat")


UNSAFE: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "pickle by name": (
        lambda f: (f / "pytorch_model.bin").write_bytes(b"x"),
        "pickle",
        "model.bin",
    ),
    "pickle by content": (
        lambda f: (f / "notes.json").write_bytes(pickle.dumps([1])),
        "pickle",
        "notes.json",
    ),
    "torch archive": (torch_archive, "pickle", "optimizer.dat"),
    "link to outside": (
        lambda f: (f / "passwords").symlink_to("/etc/passwd"),
        "symlink",
        "/etc/passwd",
    ),
    "link to a folder outside": (lambda f: (f / "home").symlink_to("../.."), "symlink", "home"),
    "link to a folder inside": (lambda f: (f / "again").symlink_to("eval"), "stray", "again"),
    "broken link": (lambda f: (f / "gone").symlink_to("nowhere"), "stray", "gone"),
    "pipe": (lambda f: os.mkfifo(f / "pipe"), "stray", "pipe"),
    "hidden file": (lambda f: (f / ".env").write_text("A=1"), "stray", ".env"),
    "hidden folder": (
        lambda f: [(f / ".git").mkdir(), (f / ".git" / "config").write_text("")],
        "stray",
        ".git",
    ),
}


@pytest.mark.parametrize("kind", UNSAFE)
def test_what_is_refused(kind: str, folder: Path) -> None:
    break_it, check, name = UNSAFE[kind]
    break_it(folder)
    with pytest.raises(ReleaseError) as caught:
        publishable(folder)
    assert caught.value.check == check and name in caught.value.found
    assert "nothing was sent" in caught.value.fix


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(ReleaseError, match="no files"):
        publishable(tmp_path)
