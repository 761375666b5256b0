"""Where bfloat16 greedy decoding parts from plain decoding, and how near the ties there are.

    python benchmarks/near_ties.py [--prompts 24] [--out benchmarks/results/near_ties.csv]

A verification pass sums in another order than a pass over one token, so in bfloat16 their logits
differ by rounding, and where the plain run's two best logits are close the other one may win. For
each prompt whose texts part, this prints the gap of those two logits, and beside it how far the
plain run's logits are from float32 at that token: its own rounding error. Both are in steps of one
bfloat16 spacing at the best logit. A gap of more than twice that error would not be rounding, and
fails the benchmark.
"""

import argparse
import copy
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from decode_cpu import append_rows, encode, machine

from flashmap import load_pair

TOPICS = ("tides", "penguins", "honey", "kites", "compost", "mushrooms", "insurance", "glaciers")
TEMPLATES = ("Explain {} in simple terms.", "List five facts about {}.", "Write a poem about {}.")


def plain(target: Any, ids: torch.Tensor, tokens: int) -> tuple[list[int], torch.Tensor]:
    """New tokens of the target alone, and the logits (n, V) they were chosen from."""
    out = target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return out.sequences[0, ids.shape[1] :].tolist(), torch.cat(out.logits)


def parting(
    logits: torch.Tensor, exact: Any, ids: torch.Tensor, tokens: list[int]
) -> tuple[float, float]:
    """Gap of the two best of `logits` (V) after `tokens`, and their error against `exact`.

    Both in bfloat16 spacings at the best logit; `exact` is the target in float32.
    """
    prefix = torch.cat((ids, torch.tensor([tokens], dtype=ids.dtype, device=ids.device)), dim=1)
    with torch.no_grad():
        error = (logits.float() - exact(prefix).logits[0, -1]).abs().max()
    best, second = logits.float().topk(2).values
    spacing = torch.finfo(torch.bfloat16).eps * 2.0 ** float(best.abs().log2().floor())
    return float(best - second) / spacing, float(error) / spacing


def main() -> None:
    """Decode every prompt both ways and tell where and how narrowly they part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=len(TOPICS) * len(TEMPLATES))
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, help="CSV file to append to")
    args = parser.parse_args()
    target, draft, tokenizer = load_pair("smollm2-135m", "smollm2-135m", dtype="bfloat16")
    exact = copy.deepcopy(target).float()
    prompts = [template.format(topic) for topic in TOPICS for template in TEMPLATES]
    prompts = prompts[: args.prompts]
    gaps, excess = [], 0.0
    for prompt in prompts:
        ids = encode(tokenizer, prompt).to(target.device)
        expected, logits = plain(target, ids, args.tokens)
        out = draft.spec_generate(target, ids, max_new_tokens=args.tokens)
        found = out.sequences[0, ids.shape[1] :].tolist()
        pairs = enumerate(zip(expected, found, strict=False))
        at = next((index for index, (a, b) in pairs if a != b), None)
        if at is not None:
            gap, error = parting(logits[at], exact, ids, expected[:at])
            gaps.append(gap)
            excess = max(excess, gap / (2.0 * error))
            print(f"token {at + 1:3}: gap {gap:.0f}, error {error:.1f} steps: {prompt}", flush=True)
    same, narrow = len(prompts) - len(gaps), sum(gap <= 1.0 for gap in gaps)
    print(
        f"{same} of {len(prompts)} texts are the same; {narrow} of {len(gaps)} part within one step"
    )
    print(f"histogram of the gaps: {sorted(Counter(gaps).items())}")
    if args.out is not None:
        row = {"texts": len(prompts), "same": same, "parted_within_one_step": narrow}
        row = {**machine(), **row, "largest_gap": max(gaps, default=0.0)}
        append_rows(args.out, [row])
    if excess > 1.0:
        raise SystemExit("a text parts by more than twice the rounding error of plain decoding")


if __name__ == "__main__":
    main()
