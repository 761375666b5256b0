"""Checks that need the target: does the drafter belong to it, and does it reach the acceptance that
its card states?"""

from typing import Any

from flashmap.checkpoint import CONFIG
from flashmap.pair import load_pair
from flashmap.prompts import encode
from flashmap.vocabulary import FILE as DRAFT_VOCAB

from ..acceptance import greedy_setting, measure_again
from ..checking import ReleaseFolder, check
from ..contents import EVAL
from ..errors import ReleaseError
from ..measurements import read_measurements
from ..weights import read_tensors

NEEDS = ("configuration", "weights")


@check("target-match", needs=NEEDS, asked=lambda wanted: wanted.target is not None)
def target_match(release: ReleaseFolder) -> str:
    """Sizes, depth, tokenizer; and every token that ends or frames an answer can be drafted."""
    target, _, tokenizer = _pair(release, None)
    depth = target.config.get_text_config().num_hidden_layers
    stated = release.raw_config.get("num_target_layers")
    if stated != depth:
        raise _unlike(f"num_target_layers {stated}", f"{depth}, as the target has", CONFIG)
    size = release.raw_config.get("draft_vocab_size") or release.config.vocab_size
    if release.has_draft_vocab and size < release.config.vocab_size:
        kept = set(read_tensors(release.path / DRAFT_VOCAB)["ids"][:size].tolist())
        lost = sorted(_framing(target, tokenizer) - kept)
        if lost:
            names = ", ".join(map(str, tokenizer.convert_ids_to_tokens(lost[:5])))
            raise _unlike(
                f"{DRAFT_VOCAB} ranks {names} behind the first {size}",
                "end and template tokens among those that are drafted",
                DRAFT_VOCAB,
            )
    return f"{release.wanted.target}, {depth} layers"


def _unlike(found: str, expected: str, file: str) -> ReleaseError:
    fix = "build from a source that was made for this target"
    return ReleaseError("target-match", found, expected, fix, [file])


def _framing(target: Any, tokenizer: Any) -> set[int]:
    """Tokens that end an answer, and the special ones of a chat's frame."""
    stops = target.generation_config.eos_token_id
    found = {stops} if isinstance(stops, int) else set(stops or ())
    if tokenizer.chat_template:
        frame = set(encode(tokenizer, "Hello", raw=False)[0].tolist())
        found |= frame & set(tokenizer.added_tokens_decoder)
    return found


def _pair(release: ReleaseFolder, dtype: str | None) -> tuple[Any, Any, Any]:
    try:
        return load_pair(str(release.wanted.target), release.path, dtype=dtype)
    except ValueError as error:
        raise ReleaseError(
            "target-match",
            str(error),
            "a target that the drafter was made for",
            "name it with --target, or build for this one",
        ) from error


@check(
    "acceptance",
    needs=[*NEEDS, "against_target"],
    asked=lambda wanted: wanted.acceptance and wanted.target is not None,
)
def acceptance(release: ReleaseFolder) -> str:
    """The card's greedy acceptance, measured again on its own prompts."""
    told = []
    for measured in read_measurements(release.path):
        setting = greedy_setting(measured)
        if setting is None:
            continue
        pair = _pair(release, measured.protocol.get("dtype"))
        again = measure_again(pair, measured, setting, release.path, release.wanted.prompts)
        if not again.reproduces:
            raise ReleaseError(
                "acceptance",
                f"{again}, {again.stated:.2f} in {measured.name}",
                f"the same within {again.allowed:.2f}",
                "look for another target, template or damaged weights; or measure anew with "
                "`flashmap train eval`",
                [measured.name],
            )
        told.append(f"{again}, stated {again.stated:.2f}, {again.allowed:.2f} apart allowed")
    if not told:
        raise ReleaseError(
            "acceptance",
            f"no greedy acceptance in {EVAL}/",
            "a number to reproduce",
            "measure with `flashmap train eval RECIPE --json`, and build again",
        )
    return "; ".join(told)
