"""Prompts: a file of them, and how one becomes token ids."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .json_lines import parse_line, require_text

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

ALL = "all"  # the domain of prompts that state none
MARK = "\ue000"  # stands for a user's message in a chat template


@dataclass(frozen=True)
class Prompt:
    """A line of a prompts file."""

    text: str
    domain: str


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts of a file: JSON lines with ``prompt`` and maybe ``domain`` if its name ends in
    .jsonl, else one a line.

    Raises ValueError for a file that is missing, holds no prompt or a line that is none.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"prompts file {path} cannot be read: {error}") from error
    parse = _json_prompt if path.suffix == ".jsonl" else _line_prompt
    prompts = [
        parse(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()
    ]
    if not prompts:
        raise ValueError(f"prompts file {path} holds no prompt; write one a line")
    return prompts


def _line_prompt(line: str, where: str) -> Prompt:
    return Prompt(line.strip(), ALL)


def _json_prompt(line: str, where: str) -> Prompt:
    try:
        row = parse_line(line)
        prompt, domain = row["prompt"], row.get("domain", ALL)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f'{where}: expected a JSON object such as {{"prompt": "...", "domain": "..."}}'
            f" ({error})"
        ) from error
    if not isinstance(prompt, str) or not prompt.strip() or not isinstance(domain, str):
        raise ValueError(
            f"{where}: prompt must be a non-empty string and domain a string, found "
            f"{line.strip()[:80]}"
        )
    return Prompt(prompt, domain)


def encode(tokenizer: "PreTrainedTokenizerBase", prompt: str, *, raw: bool) -> "Tensor":
    """Token ids (1, P) of ``prompt``: as one user turn of the chat template, or as it is with
    ``raw``.

    Raises ValueError for a prompt without text, and where there is no template to use.
    """
    if not prompt.strip():
        raise ValueError("the prompt is empty; give at least one word")
    try:
        require_text(prompt)
    except ValueError as error:
        raise ValueError(f"the prompt is not UTF-8 text: {error}") from error
    if raw:
        ids: Tensor = tokenizer(prompt, return_tensors="pt")["input_ids"]
        return ids
    if not tokenizer.chat_template:
        raise ValueError(
            "the target's tokenizer has no chat template; use --raw to continue the bare prompt"
        )
    turns = [{"role": "user", "content": prompt}]
    encoded: Any = tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    chat_ids: Tensor = encoded["input_ids"]
    return chat_ids


def encode_many(tokenizer: "PreTrainedTokenizerBase", prompts: Sequence[str]) -> list[list[int]]:
    """`encode` of many prompts, with the chat template where there is one; much faster.

    The template is filled in once and the prompts are put in its place, where that gives the same.
    """
    raw = not tokenizer.chat_template
    if not prompts:
        return []
    fast: Any = tokenizer
    if raw:
        texts = list(prompts)
    else:
        turns = [{"role": "user", "content": MARK}]
        shell = fast.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        texts = [shell.replace(MARK, prompt) for prompt in prompts]
    encoded: list[list[int]] = fast(texts, add_special_tokens=raw)["input_ids"]
    for index in {0, len(prompts) // 2, len(prompts) - 1}:
        if encoded[index] != encode(tokenizer, prompts[index], raw=raw)[0].tolist():
            return [encode(tokenizer, prompt, raw=raw)[0].tolist() for prompt in prompts]
    return encoded


def pad_left(
    prompts: Sequence[Sequence[int]], device: "torch.device | str" = "cpu"
) -> "tuple[Tensor, Tensor]":
    """Token ids (B, P) of prompts padded on the left, and their attention mask."""
    import torch

    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    places = torch.arange(longest)
    starts = torch.tensor([longest - len(prompt) for prompt in prompts])
    return ids.to(device), (places >= starts.unsqueeze(1)).long().to(device)
