"""Documents of a user's own text: conversations or plain text, instead of generated answers."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashmap.json_lines import parse_line

from .documents import MIN_ANSWER, Document
from .prompts import is_held_out

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OWN_TEXT = -1.0  # the temperature of text that the target did not write


def read_user_documents(
    path: Path, tokenizer: "PreTrainedTokenizerBase", max_length: int, held_out_share: float
) -> Iterator[Document]:
    """Documents of a file: .jsonl with `messages` (a conversation that ends with the assistant) or
    `text` a line; any other name: plain text, a document a line.

    Text longer than `max_length` tokens becomes several documents. What is held out depends on the
    line's text alone. Raises ValueError naming the line that cannot be used.
    """
    try:
        lines = path.open(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"data.files: {path} cannot be read: {error}") from error
    with lines:
        for number, line in enumerate(_decoded(lines, path), 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            row = _row(line, where) if path.suffix == ".jsonl" else {"text": line.strip()}
            held_out = is_held_out(line.strip(), held_out_share)
            yield from _documents(row, tokenizer, max_length, held_out, where)


def _decoded(lines: Iterable[str], path: Path) -> Iterator[str]:
    try:
        yield from lines
    except UnicodeDecodeError as error:
        raise ValueError(f"data.files: {path} is not UTF-8 text ({error})") from error


def _row(line: str, where: str) -> dict[str, Any]:
    try:
        row = parse_line(line)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON ({error})") from error
    if not isinstance(row, dict) or not ({"messages", "text"} & row.keys()):
        raise ValueError(f'{where}: expected {{"messages": [...]}} or {{"text": "..."}}')
    return row


def _documents(
    row: dict[str, Any], tokenizer: Any, max_length: int, held_out: bool, where: str
) -> Iterator[Document]:
    if "messages" in row:
        prompt, answer = _conversation(row["messages"], tokenizer, where)
        yield Document(prompt, answer[: max(0, max_length - len(prompt))], OWN_TEXT, held_out)
        return
    if not isinstance(row["text"], str):
        raise ValueError(f"{where}: text is {type(row['text']).__name__}, expected a string")
    ids = tokenizer(row["text"])["input_ids"]
    for start in range(0, len(ids), max_length):
        part = ids[start : start + max_length]
        if len(part) > MIN_ANSWER:
            yield Document(part[:1], part[1:], OWN_TEXT, held_out)


def _conversation(messages: Any, tokenizer: Any, where: str) -> tuple[list[int], list[int]]:
    """Token ids up to the assistant's last message, and of that message with its end."""
    turns = messages if isinstance(messages, list) else []
    whole = all(
        isinstance(turn, dict)
        and all(isinstance(turn.get(key), str) for key in ("role", "content"))
        for turn in turns
    )
    if not turns or not whole or turns[-1]["role"] != "assistant":
        raise ValueError(
            f'{where}: messages must be a list of {{"role": "...", "content": "..."}} that ends'
            " with the assistant's"
        )
    if not tokenizer.chat_template:
        raise ValueError(f"{where}: messages need a chat template, and the target has none")
    before = tokenizer.apply_chat_template(
        messages[:-1], tokenize=False, add_generation_prompt=True
    )
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    if not text.startswith(before):
        raise ValueError(f"{where}: the chat template does not continue the conversation")
    prompt = tokenizer(before, add_special_tokens=False)["input_ids"]
    answer = tokenizer(text[len(before) :].rstrip("\n"), add_special_tokens=False)["input_ids"]
    return prompt, answer
