"""The options that several commands share, said once: same name, same meaning, same help."""

from typing import Annotated, Any

import typer


def count(text: int | str) -> int | str:
    """A number of draws or candidates, which may be "auto". Wrong ones are an error of usage; the
    range is decoding's to check."""
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is neither a whole number nor auto.") from error


# What decoding takes at the least above 0: colder ones leave float32's range. Said here again, so
# that a refusal need not import torch; a test compares the two.
COLDEST = 1e-30

Target = Annotated[
    str, typer.Option(help="Target: a folder, a Hub id (owner/name@revision), or smollm2-135m.")
]
Draft = Annotated[
    str, typer.Option(help="Drafter: a folder, a Hub id (owner/name@revision), or smollm2-135m.")
]
MaxNewTokens = Annotated[int, typer.Option(help="Tokens to generate at most.")]
Temperature = Annotated[float, typer.Option(help="0 decodes greedily; above 0 samples.")]
NumSteps = Annotated[
    int | None, typer.Option(help="Jumps a draft [default: the drafter's own].", show_default=False)
]
NumDraws = Annotated[
    Any,
    typer.Option(
        parser=count,
        metavar="N|auto",
        help="Noise draws a block, whose mixture is the proposal; auto: several while they pay.",
    ),
]
NumCandidates = Annotated[
    Any,
    typer.Option(
        parser=count,
        metavar="N|auto",
        help="At temperature 0: verify a tree of N blocks' worth of drafts; auto: what pays.",
    ),
]
Adaptive = Annotated[
    bool,
    typer.Option(
        "--adaptive/--no-adaptive",
        help="Verify fewer drafts, or none, where the drafter is seldom right.",
    ),
]
TopK = Annotated[
    int | None,
    typer.Option(help="Sample from so many of the likeliest tokens.", show_default=False),
]
TopP = Annotated[
    float | None,
    typer.Option(help="Sample from the likeliest that have this probability.", show_default=False),
]
MinP = Annotated[
    float | None,
    typer.Option(
        help="Sample from those at least this share as likely as the likeliest.", show_default=False
    ),
]
Device = Annotated[
    str | None,
    typer.Option(help="cpu, cuda or cuda:N [default: a GPU if any].", show_default=False),
]
Dtype = Annotated[
    str,
    typer.Option(
        help="auto, float32, bfloat16 or float16. auto: bfloat16 on a GPU, else as stored. float32 "
        "repeats plain greedy decoding token by token; bfloat16 is faster."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]


def check_numbers(max_new_tokens: int, temperature: float) -> None:
    """Raise ValueError for numbers that decoding will refuse, before models are loaded for
    nothing."""
    if max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens {max_new_tokens}: ask for at least 1 token")
    if not 0.0 <= temperature < float("inf"):
        raise ValueError(
            f"--temperature {temperature}: give 0 for greedy decoding, or a number above 0"
        )
    if 0.0 < temperature < COLDEST:
        raise ValueError(
            f"--temperature {temperature}: the smallest above 0 is {COLDEST}; give 0 for greedy "
            f"decoding"
        )
