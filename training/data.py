"""Makes a drafter's training documents: requests, and the target's own answers to them.

A drafter is right when it says what its target says, so people's text teaches it little. Requests
come from templates and from the target itself, which makes up users' messages when it is given the
start of one (Magpie, arXiv:2406.08464). Everything is kept under `data.folder` stage by stage; a
run that was killed goes on with the first file that is missing.
"""

import dataclasses
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashmap.files import only_writer, write_whole
from flashmap.loops import cut_loop
from flashmap.modeling.target_flashmap import num_embedding_rows
from flashmap.prompts import MARK, encode_many, read_prompts

from .checkpoints import seed_of
from .documents import Document, Filter, document_file, pack, read_about, write_documents
from .generation import Decoder, end_tokens, make_decoder
from .prompts import is_held_out, make_prompts
from .recipe import Recipe
from .user_data import read_user_documents

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

RECIPE = "recipe.json"  # what a folder of documents was made by
BATCHES_A_FILE = 4
PASSAGE_TOKENS = 160
OWN_PROMPT_MIN_P = 0.02  # keeps the target's made-up requests readable
OWN_PROMPT_MIN_TOKENS, OPENING_TOKENS, GRAM, GRAM_TIMES = 4, 24, 4, 3
PROMPT_WIDTH = 64  # prompts are padded to multiples of it

Progress = Callable[[str, int, int], None]  # stage, done, of how many


@dataclasses.dataclass(frozen=True)
class Request:
    """A user's message to be answered, its domain, and at which temperature."""

    text: str
    domain: str
    held_out: bool
    temperature: float


Encoded = tuple[Request, list[int]]  # a request and its token ids


class DataMaker:
    """Carries out the data part of a recipe.

    Args:
        recipe: what to make.
        target: the model that answers.
        tokenizer: the target's.
        progress: is told how far each stage is.
    """

    def __init__(
        self,
        recipe: Recipe,
        target: "PreTrainedModel",
        tokenizer: "PreTrainedTokenizerBase",
        progress: Progress = lambda stage, done, total: None,
    ) -> None:
        self.recipe, self.data, self.progress = recipe, recipe.data, progress
        self.target, self.tokenizer = target, tokenizer
        self.folder = Path(recipe.data.folder)
        self.vocab_size = num_embedding_rows(target)
        self.decoder: Decoder | None = None

    def run(self) -> None:
        """Make what is missing. Raises ValueError where the folder holds other documents, or
        another process is at it."""
        with only_writer(self.folder / RECIPE):
            self._run()

    def _run(self) -> None:
        self._require_same_recipe()
        if self.data.files:
            self._user_files()
            return
        requests = [Request(**row) for row in self._stage("requests", self._requests)]
        groups = list(self._groups(requests))
        if not groups:
            raise ValueError(
                f"none of {len(requests)} requests has at most data.max_prompt_tokens ="
                f" {self.data.max_prompt_tokens} tokens with the chat template: allow more."
            )
        for number, (width, group) in enumerate(groups):
            path = document_file(self.folder, number)
            if not path.is_file():
                self._answer_file(path, number, width, group, len(requests))

    def _groups(self, requests: list[Request]) -> Iterator[tuple[int, list[Encoded]]]:
        """The requests of each file, shorter prompts first, and the width their prompts are padded
        to."""
        widths: dict[int, list[Encoded]] = {}
        texts = [request.text for request in requests]
        for request, ids in zip(requests, encode_many(self.tokenizer, texts), strict=True):
            if len(ids) <= self.data.max_prompt_tokens:
                width = -(-len(ids) // PROMPT_WIDTH) * PROMPT_WIDTH
                widths.setdefault(width, []).append((request, ids))
        size = self.data.batch_size * BATCHES_A_FILE
        for width in sorted(widths):
            rows = widths[width]
            for start in range(0, len(rows), size):
                yield width, rows[start : start + size]

    # Stages before the answers

    def _require_same_recipe(self) -> None:
        """The folder's recipe is written once; another one must not add to its documents."""
        path = self.folder / RECIPE
        asked = {
            "target": self.recipe.target,
            "seed": self.recipe.seed,
            "data": {
                name: value
                for name, value in dataclasses.asdict(self.data).items()
                if name not in ("folder", "other_folders")
            },
            # They decide which requests are left out, and where texts are cut.
            "evaluation.prompts": self.recipe.evaluation.prompts,
            "run.max_length": self.recipe.run.max_length if self.data.files else None,
        }
        content = json.dumps(asked, indent=2, sort_keys=True, default=list).encode()
        if path.is_file() and path.read_bytes() != content:
            raise ValueError(
                f"{self.folder} holds documents of another recipe ({path}): name another"
                " data.folder, or remove that one."
            )
        write_whole(path, content)

    def _stage(self, name: str, make: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
        """Rows of `name`.jsonl, made if the file is not there."""
        path = self.folder / f"{name}.jsonl"
        if not path.is_file():
            text = "".join(json.dumps(row) + "\n" for row in make())
            write_whole(path, text.encode())
        try:
            return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        except ValueError as error:
            raise ValueError(
                f"{path} is damaged ({error}): remove it, and it is made again."
            ) from error

    def _requests(self) -> list[dict[str, Any]]:
        data, seed = self.data, self.recipe.seed
        passages = [row["text"] for row in self._stage("passages", self._passages)]
        own = [row["text"] for row in self._stage("own_prompts", self._own_prompts)]
        found = [
            (prompt.text, prompt.domain, prompt.held_out)
            for prompt in (
                make_prompts(data.num_prompts, seed, data.held_out_share, passages)
                if data.num_prompts
                else []
            )
        ]
        found += [(text, "own", is_held_out(text, data.held_out_share)) for text in own]
        asked = self._evaluation_prompts()
        found = [row for row in found if _bare(row[0]) not in asked]
        rng = random.Random(seed)
        rng.shuffle(found)
        temperatures, shares = zip(*data.temperatures.items(), strict=True)
        totals = [sum(shares[: i + 1]) / sum(shares) for i in range(len(shares))]
        rows = []
        for text, domain, held_out in found:
            chance = rng.random()
            index = next((i for i, total in enumerate(totals) if chance < total), len(totals) - 1)
            rows.append(Request(text, domain, held_out, float(temperatures[index])))
        return [dataclasses.asdict(row) for row in rows]

    def _evaluation_prompts(self) -> set[str]:
        """What the drafter will be measured on, which it must not have seen."""
        path = self.recipe.evaluation.prompts
        return {_bare(prompt.text) for prompt in read_prompts(Path(path))} if path else set()

    def _passages(self) -> list[dict[str, Any]]:
        """Paragraphs by the target, to be summarised later."""
        if not self.data.num_passages:
            return []
        wanted = make_prompts(self.data.num_passages, self.recipe.seed + 1, 0.0)
        texts = [f"Write one paragraph about {prompt.topic}." for prompt in wanted]
        texts = list(dict.fromkeys(texts))
        rows: list[dict[str, Any]] = []
        encoded = encode_many(self.tokenizer, texts)
        answers = self._answers(encoded, [0.7] * len(texts), "passages")
        for answer in answers:
            text = self._text(cut_loop(answer)[:PASSAGE_TOKENS]).strip()
            end = max(text.rfind(mark) for mark in ".!?")
            if end > 80 and "\n" not in text[:end]:
                rows.append({"text": text[: end + 1]})
        return rows

    def _own_prompts(self) -> list[dict[str, Any]]:
        """Users' messages that the target makes up when it is given the start of one."""
        wanted = self.data.num_own_prompts
        if not wanted:
            return []
        start = self._message_start()
        kept: dict[tuple[int, ...], str] = {}
        count = 0
        while len(kept) < wanted and count < 4 * wanted + 4 * self.data.batch_size:
            size = self.data.batch_size
            answers = self._decoder(len(start)).run(
                [start] * size,
                [1.0] * size,
                seed_of(self.recipe.seed, 1, count),
                OWN_PROMPT_MIN_P,
                self.data.max_prompt_tokens // 2 + 1,
            )
            count += size
            for answer in answers:
                if self._is_request(answer):
                    kept.setdefault(tuple(answer[:OPENING_TOKENS]), self._text(answer).strip())
            self.progress("own prompts", min(len(kept), wanted), wanted)
        texts = [text for text in dict.fromkeys(kept.values()) if text]
        return [{"text": text} for text in texts[:wanted]]

    def _is_request(self, answer: list[int]) -> bool:
        if not OWN_PROMPT_MIN_TOKENS <= len(answer) <= self.data.max_prompt_tokens // 2:
            return False
        grams = Counter(tuple(answer[i : i + GRAM]) for i in range(len(answer) - GRAM + 1))
        ended = answer[-1] in end_tokens(self.target)
        return ended and max(grams.values()) <= GRAM_TIMES

    def _message_start(self) -> list[int]:
        """Token ids of a conversation up to where the user's message begins."""
        tokenizer: Any = self.tokenizer
        if not tokenizer.chat_template:
            raise ValueError(
                "data.num_own_prompts needs a target with a chat template, and this one has none:"
                " set it to 0."
            )
        chat = [{"role": "user", "content": MARK}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        ids: list[int] = tokenizer(text.split(MARK)[0], add_special_tokens=False)["input_ids"]
        return ids

    # Answers

    def _decoder(self, width: int) -> Decoder:
        """A decoder of prompts up to `width` tokens; the one before it makes room."""
        width = -(-width // PROMPT_WIDTH) * PROMPT_WIDTH
        if self.decoder is None or self.decoder.max_prompt != width:
            self.decoder = None
            data = self.data
            self.decoder = make_decoder(self.target, data.batch_size, width, data.max_new_tokens)
        return self.decoder

    def _answers(
        self, prompts: Sequence[list[int]], temperatures: Sequence[float], stage: str
    ) -> Iterator[list[int]]:
        size, width = self.data.batch_size, max(map(len, prompts))
        for start in range(0, len(prompts), size):
            part = slice(start, start + size)
            seed = seed_of(self.recipe.seed, len(stage), start)
            yield from self._decoder(width).run(prompts[part], temperatures[part], seed)
            self.progress(stage, min(start + size, len(prompts)), len(prompts))

    def _answer_file(
        self, path: Path, number: int, width: int, group: list[Encoded], total: int
    ) -> None:
        began, size = time.monotonic(), self.data.batch_size
        documents: list[Document] = []
        first = number * size * BATCHES_A_FILE
        for start in range(0, len(group), size):
            part = group[start : start + size]
            seed = seed_of(self.recipe.seed, 0, first + start)
            temperatures = [request.temperature for request, _ in part]
            answers = self._decoder(width).run([ids for _, ids in part], temperatures, seed)
            documents += [
                Document(ids, answer, request.temperature, request.held_out)
                for (request, ids), answer in zip(part, answers, strict=True)
            ]
            self.progress("answers", min(first + start + size, total), total)
        sieve = Filter()
        packed = pack(sieve.keep(documents), self.vocab_size)
        seconds = time.monotonic() - began
        counts = {name: str(value) for name, value in sieve.counts().items()}
        write_documents(path, packed, counts | {"seconds": f"{seconds:.1f}"})

    def _user_files(self) -> None:
        """Documents of the user's own files, a file of documents each."""
        for number, name in enumerate(self.data.files):
            path = document_file(self.folder, number)
            if not path.is_file():
                sieve = Filter()
                found = read_user_documents(
                    Path(name), self.tokenizer, self.recipe.run.max_length, self.data.held_out_share
                )
                kept = sieve.keep(found)
                counts = {name: str(value) for name, value in sieve.counts().items()}
                write_documents(path, pack(kept, self.vocab_size), counts)
            self.progress("files", number + 1, len(self.data.files))

    def _text(self, tokens: list[int]) -> str:
        tokenizer: Any = self.tokenizer
        text: str = tokenizer.decode(tokens, skip_special_tokens=True)
        return text


def _bare(text: str) -> str:
    """Letters and digits only, to compare requests."""
    return "".join(character for character in text.lower() if character.isalnum())


def made_for(folder: Path) -> str | None:
    """The target that the documents of `folder` were made for, if that is written down."""
    try:
        target: str = json.loads((folder / RECIPE).read_text(encoding="utf-8"))["target"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return target


def file_counts(folder: Path) -> dict[str, float]:
    """Sums of what the files of `folder` say about how they were made."""
    total: dict[str, float] = {}
    for path in sorted(folder.glob("documents-*.safetensors")):
        for name, value in read_about(path).items():
            total[name] = total.get(name, 0.0) + float(value)
    return total
