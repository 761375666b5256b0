"""Training text, written by the target: a drafter must predict what the target says, not people.

    python generate.py TARGET_FOLDER OUT.pt

Each training prompt is answered greedily, at temperature 0.7 and at 1.0. Answers that fall into a
loop are cut where it starts: loops are easy to draft and would flatter every number.
"""

import argparse
import time
from collections import Counter

import torch
from llama import Llama
from prompts import HELD_OUT_TOPICS, TOPICS, make_prompts
from torch import Tensor
from transformers import AutoTokenizer

END = 2  # <|im_end|>
MAX_PROMPT, MAX_NEW = 80, 240
PREFILL_ROWS = 256
GRAM, REPEATS = 8, 4
Document = tuple[list[int], list[int], bool, float]  # prompt, answer, held out, temperature


class Decoder:
    """Decodes many prompts at once; on a GPU the step is a CUDA graph."""

    def __init__(self, model: Llama, batch_size: int) -> None:
        device = model.embedding.device
        self.model, self.batch_size = model, batch_size
        self.cache = model.new_cache(batch_size, MAX_PROMPT + MAX_NEW)
        self.ids = torch.zeros(batch_size, dtype=torch.long, device=device)
        self.positions = torch.zeros(batch_size, dtype=torch.long, device=device)
        self.temperature = torch.zeros(batch_size, 1, device=device)
        self.step = self._step
        if device.type == "cuda":
            for _ in range(3):
                self._step()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._step()
            self.step = graph.replay

    def _step(self) -> None:
        logits = self.model.step(self.ids, self.positions, self.cache).float()
        uniform = torch.rand_like(logits).clamp(1e-20, 1 - 1e-7)
        gumbel = -torch.log(-torch.log(uniform))
        self.ids.copy_((logits + self.temperature * gumbel).argmax(dim=-1))
        self.positions += 1

    def run(self, prompts: list[list[int]], temperature: Tensor) -> list[list[int]]:
        """Answers to at most a batch of prompts; each ends with END, or after MAX_NEW tokens."""
        device, count = self.ids.device, len(prompts)
        padded = torch.full((self.batch_size, MAX_PROMPT), END, dtype=torch.long)
        lengths = torch.ones(self.batch_size, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            padded[row, : len(prompt)] = torch.tensor(prompt)
            lengths[row] = len(prompt)
        for start in range(0, self.batch_size, PREFILL_ROWS):
            rows = slice(start, start + PREFILL_ROWS)
            self.model.prefill(padded[rows].to(device), self.cache[:, :, rows])
        self.ids.copy_(padded[torch.arange(self.batch_size), lengths - 1])
        self.positions.copy_(lengths - 1)
        self.temperature[:count, 0] = temperature.to(device)
        answers = torch.full((MAX_NEW, self.batch_size), END, dtype=torch.long, device=device)
        for step in range(MAX_NEW):
            self.step()
            answers[step] = self.ids
        rows = answers[:, :count].T.cpu().tolist()
        return [row[: row.index(END) + 1] if END in row else row for row in rows]


def cut_loop(tokens: list[int]) -> list[int]:
    """`tokens` up to the first time an 8-gram comes for the fourth time."""
    seen: Counter[tuple[int, ...]] = Counter()
    for start in range(len(tokens) - GRAM + 1):
        gram = tuple(tokens[start : start + GRAM])
        seen[gram] += 1
        if seen[gram] == REPEATS:
            return tokens[:start]
    return tokens


def requests(tokenizer: AutoTokenizer, limit: int | None) -> list[tuple[list[int], bool, float]]:
    """Prompt ids, whether the topic is held out, and the temperature, for every answer to make."""
    prompts = [(text, False) for _, text in make_prompts(TOPICS)]
    prompts += [(text, True) for _, text in make_prompts(HELD_OUT_TOPICS)]
    wanted = []
    for text, held_out in prompts[:: max(1, len(prompts) // limit)] if limit else prompts:
        chat = [{"role": "user", "content": text}]
        encoded = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)
        for temperature in (0.0, 1.0) if held_out else (0.0, 0.7, 1.0):
            wanted.append((encoded["input_ids"], held_out, temperature))
    return wanted


def main() -> None:
    """Answer every training and held-out prompt and save the token ids."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target")
    parser.add_argument("out")
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--limit", type=int, default=None, help="prompts, for a trial")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    wanted = requests(AutoTokenizer.from_pretrained(args.target), args.limit)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    decoder = Decoder(Llama(args.target, device, dtype), args.batch_size)
    documents: list[Document] = []
    seen: set[tuple[int, ...]] = set()
    started = time.time()
    for start in range(0, len(wanted), args.batch_size):
        batch = wanted[start : start + args.batch_size]
        temperatures = torch.tensor([temperature for _, _, temperature in batch])
        answers = decoder.run([prompt for prompt, _, _ in batch], temperatures)
        for (prompt, held_out, temperature), answer in zip(batch, answers, strict=True):
            kept = cut_loop(answer)
            if len(kept) >= 4 and tuple(kept) not in seen:
                seen.add(tuple(kept))
                documents.append((prompt, kept, held_out, temperature))
    tokens = sum(len(answer) for _, answer, _, _ in documents)
    dropped, seconds = len(wanted) - len(documents), time.time() - started
    print(f"{len(documents)} answers, {tokens} tokens, {dropped} dropped, {seconds:.0f} s")
    torch.save(documents, args.out)


if __name__ == "__main__":
    main()
