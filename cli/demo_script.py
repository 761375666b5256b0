"""The part of `flashmap demo` that a stranger could have written: AutoModel, a release folder, and
a target.

Runs in a process that has no flashmap, by path. Every prompt is decoded by the target alone and
with the drafter, in the dtype the target is stored in (what one would use) and in float32 (where
rounding cannot hide a difference). Prints JSON objects, one a line.
"""

import json
import math
import sys
import time
from typing import Any

import torch
import transformers
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

WARM_UP_TOKENS = 12


def report(event: str, **fields: Any) -> None:
    """Print one JSON line that the parent process reads."""
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()


def main(target_folder: str, draft_folder: str, max_new_tokens: int, prompts: list[str]) -> None:
    """Load both folders and decode every prompt in each dtype."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer: Any = AutoTokenizer.from_pretrained(target_folder, trust_remote_code=False)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        target_folder, dtype="auto", trust_remote_code=False
    )
    target = loaded.to(device).eval()
    draft: Any = AutoModel.from_pretrained(draft_folder, trust_remote_code=True, dtype=target.dtype)
    draft = draft.to(device).eval()
    # Only the ids of special tokens stay: both sides decode greedily, without penalties.
    own = target.generation_config
    bare: Any = GenerationConfig  # untyped in some versions
    target.generation_config = bare(eos_token_id=own.eos_token_id, pad_token_id=own.pad_token_id)
    report(
        "loaded",
        device=device,
        transformers=transformers.__version__,
        module=type(draft).__module__,
        flashmap_hidden="flashmap" not in sys.modules,
        block_size=draft.config.block_size,
    )
    for dtype in dict.fromkeys((target.dtype, torch.float32)):
        target, draft = target.to(dtype), draft.to(dtype)
        for index, prompt in enumerate(prompts):
            ids = tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}],
                add_generation_prompt=True,
                return_tensors="pt",
                return_dict=True,
            )["input_ids"].to(device)
            if index == 0:
                plain(target, ids, WARM_UP_TOKENS)
                draft.spec_generate(target, ids, max_new_tokens=WARM_UP_TOKENS)
            compare(target, draft, tokenizer, ids, prompt, max_new_tokens)


def plain(target: Any, ids: torch.Tensor, max_new_tokens: int) -> list[int]:
    """New tokens of the target alone, greedy."""
    out = target.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False
    )
    tokens: list[int] = out[0, ids.shape[1] :].tolist()
    return tokens


def compare(
    target: Any, draft: Any, tokenizer: Any, ids: torch.Tensor, prompt: str, max_new_tokens: int
) -> None:
    """Decode one prompt both ways and report it."""
    start = time.perf_counter()
    expected = plain(target, ids, max_new_tokens)
    plain_seconds = time.perf_counter() - start
    start = time.perf_counter()
    out = draft.spec_generate(target, ids, max_new_tokens=max_new_tokens)
    tokens = out.sequences[0, ids.shape[1] :].tolist()  # waits for the device
    seconds = time.perf_counter() - start
    pairs = zip(expected, tokens, strict=False)
    shorter = min(len(expected), len(tokens))
    parts_at = next((index for index, (a, b) in enumerate(pairs) if a != b), shorter)
    same = expected == tokens
    report(
        "decoded",
        dtype=str(target.dtype).removeprefix("torch."),
        prompt=prompt,
        text=tokenizer.decode(tokens, skip_special_tokens=True),
        tokens=len(tokens),
        plain_tokens=len(expected),
        seconds=seconds,
        plain_seconds=plain_seconds,
        acceptance_lengths=out.acceptance_lengths,
        same=same,
        parts_at=None if same else parts_at,
        gap=None if same else tie_gap(target, ids, expected[:parts_at]),
    )


@torch.no_grad()
def tie_gap(target: Any, ids: torch.Tensor, tokens: list[int]) -> float:
    """How far the target's two best tokens after ``tokens`` are apart, in rounding steps of its
    dtype.

    One step is the spacing of the dtype's numbers at the larger of the two logits, whatever its
    sign. Within a few of them, another order of the same sums may pick the other token.
    """
    prefix = torch.cat((ids, torch.tensor([tokens], dtype=ids.dtype, device=ids.device)), dim=1)
    best, second = target(prefix).logits[0, -1].topk(2).values
    info = torch.finfo(best.dtype)
    first, other = float(best), float(second)
    # Numbers nearer to 0 than the smallest normal one are spaced as they are there.
    size = max(abs(first), abs(other), info.tiny)
    return (first - other) / (info.eps * 2.0 ** math.floor(math.log2(size)))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:])
