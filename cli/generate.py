"""`flashmap generate`: continue one prompt, streaming to a terminal."""

import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import (
    Adaptive,
    Device,
    Draft,
    Dtype,
    Json,
    MaxNewTokens,
    MinP,
    NumCandidates,
    NumDraws,
    NumSteps,
    Target,
    TopK,
    TopP,
    check_numbers,
)
from .output import print_json, results_on_stdout

if TYPE_CHECKING:
    from .decoding import Decoded

KERNELS = "reference"  # the loop runs plain-torch operations; Triton's are the fused step's


def generate(
    prompt: Annotated[
        str, typer.Argument(help="The text to answer (or, with --raw, to continue).")
    ],
    target: Target,
    draft: Draft,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Annotated[
        float | None,
        typer.Option(
            help="0 decodes greedily; above 0 samples [default: 0, or 1 if top-k, top-p or min-p "
            "is given].",
            show_default=False,
        ),
    ] = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    num_steps: NumSteps = None,
    num_draws: NumDraws = 1,
    num_candidates: NumCandidates = 1,
    adaptive: Adaptive = False,
    seed: Annotated[
        int | None,
        typer.Option(help="Makes sampling repeatable [default: random].", show_default=False),
    ] = None,
    device: Device = None,
    dtype: Dtype = "auto",
    raw: Annotated[
        bool, typer.Option("--raw", help="No chat template: continue the prompt.")
    ] = False,
    json: Json = False,
) -> None:
    """Generate text with a target and its drafter: the target's own words, in fewer passes."""
    if temperature is None:
        temperature = 0.0 if top_k is top_p is min_p is None else 1.0
    check_numbers(max_new_tokens, temperature)
    if not prompt.strip():
        raise ValueError("the prompt is empty; give at least one word")
    with results_on_stdout():
        from transformers import TextStreamer

        from flashmap.pair import load_pair
        from flashmap.prompts import encode

        from .decoding import decode_with_drafter

        target_model, draft_model, tokenizer = load_pair(target, draft, device, dtype)
        input_ids = encode(tokenizer, prompt, raw=raw)
    live = sys.stdout.isatty() and not json
    streamer: Any = None
    if live:
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    with nullcontext() if live else results_on_stdout():
        result = decode_with_drafter(
            target_model,
            draft_model,
            input_ids,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            num_steps=num_steps,
            num_draws=num_draws,
            num_candidates=num_candidates,
            adaptive=adaptive,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            streamer=streamer,
        )
    text = tokenizer.decode(result.token_ids, skip_special_tokens=True)
    if json:
        print_json(
            {
                "prompt": prompt,
                "text": text,
                "token_ids": result.token_ids,
                "num_new_tokens": len(result.token_ids),
                "acceptance_lengths": result.acceptance_lengths,
                "acceptance_length": result.acceptance_length,
                "seconds": result.seconds,
                "tokens_per_second": result.tokens_per_second,
                "seed": result.seed,
                "target": target,
                "draft": draft,
                "kernels": KERNELS,
            }
        )
        return
    if not live:
        print(text)
    print(_summary(result), file=sys.stderr)


def _summary(result: "Decoded") -> str:
    return (
        f"{len(result.token_ids)} tokens in {result.seconds:.2f} s, "
        f"{result.tokens_per_second:.1f} tokens/s, "
        f"{result.acceptance_length:.2f} tokens a verification pass, seed {result.seed}"
    )
