"""Checks of the weights and of the draft vocabulary: the files, the tensors in them, their
numbers."""

from flashmap.checkpoint import CONFIG, INDEX
from flashmap.vocabulary import FILE as DRAFT_VOCAB

from ..checking import ReleaseFolder, check
from ..contents import read_json
from ..draft_vocab import drafted_tokens, require_valid_ranking
from ..errors import ReleaseError
from ..weights import (
    read_headers,
    read_tensors,
    require_finite,
    require_one_dtype,
    require_tensors,
    weight_paths,
)

STORED = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}


def _names(release: ReleaseFolder) -> list[str]:
    return [path.name for path in weight_paths(release.path)]


@check("weight-files")
def weight_files(release: ReleaseFolder) -> str:
    """The files that are read are the ones that are there: engines read every safetensors file."""
    names = _names(release)
    there = {n for n, row in release.files.items() if n.endswith(".safetensors") and "size" in row}
    extra = sorted(there - {*names, DRAFT_VOCAB})
    if extra:
        raise ReleaseError(
            "weight-files",
            f"{', '.join(extra[:3])}, which {INDEX if len(names) > 1 else 'no loader'} names",
            f"{', '.join(names)} and no other weights",
            "remove what an earlier save left",
            extra,
        )
    held: dict[str, str] = {}
    for name in names:
        headers, metadata = read_headers(release.path / name)
        if metadata.get("format") != "pt":
            raise ReleaseError(
                "weight-files",
                f"{name} with metadata {metadata}",
                "format: pt, without which transformers refuses it",
                "build again",
                [name],
            )
        held |= dict.fromkeys(headers, name)
    if (release.path / INDEX).exists():
        listed = read_json(release.path, INDEX, "weight-files")["weight_map"]
        wrong = sorted(name for name in listed.keys() | held if listed.get(name) != held.get(name))
        if wrong:
            raise ReleaseError(
                "weight-files",
                f"{INDEX} puts {wrong[0]} into {listed.get(wrong[0])}, it is in "
                f"{held.get(wrong[0])} ({len(wrong)} such tensors)",
                "an index of what the files hold",
                "build again",
                [INDEX],
            )
    return ", ".join(names)


@check("weights")
def tensors(release: ReleaseFolder) -> str:
    """Every tensor that the configuration asks for, in its shape, and no other."""
    try:
        require_tensors(release.config, {name: h[0] for name, h in release.headers.items()})
    except ReleaseError as error:
        if error.check == "weights":
            error.files = frozenset([*_names(release), CONFIG])
        raise
    return f"{len(release.headers)} tensors, names and shapes complete"


@check("finite")
def finite(release: ReleaseFolder) -> str:
    """No NaN and no infinity."""
    _stored_dtype(release)  # others have none
    for name in _names(release):
        try:
            require_finite(read_tensors(release.path / name).items())
        except ReleaseError as error:
            raise ReleaseError(
                error.check, error.found, error.expected, error.fix, [name]
            ) from error
    return f"{len(release.headers)} tensors"


def _stored_dtype(release: ReleaseFolder) -> str:
    if not release.headers:
        raise ReleaseError("weights", "no tensors", "those of the configuration", "build again")
    found = {STORED.get(header[1], header[1]) for header in release.headers.values()}
    try:
        return require_one_dtype(found, release.path)
    except ReleaseError as error:
        error.files = frozenset(_names(release))
        raise


@check("dtype")
def dtype(release: ReleaseFolder) -> str:
    """The one dtype of the weights, stated for old and new readers."""
    stored = _stored_dtype(release)
    stated = {key: release.raw_config.get(key) for key in ("dtype", "torch_dtype")}
    wrong = [f"{key} is {value!r}" for key, value in stated.items() if value != stored]
    if wrong:
        raise ReleaseError(
            "dtype", f"{' and '.join(wrong)} for {stored} weights", stored, "build again", [CONFIG]
        )
    return stored


@check("draft-vocab")
def draft_vocab(release: ReleaseFolder) -> str:
    """The ranking of the target's tokens, and how many of them the drafter may say."""
    size = release.config.vocab_size
    drafted = drafted_tokens(release.raw_config, size)
    if release.has_draft_vocab:
        require_valid_ranking(release.path / DRAFT_VOCAB, size)
        return f"{drafted:,} of {size:,} tokens, all ranked"
    if drafted < size:
        raise ReleaseError(
            "draft-vocab",
            f"draft_vocab_size {drafted} without {DRAFT_VOCAB}",
            f"{DRAFT_VOCAB}, which says which tokens they are",
            "make it with `flashmap release vocab`, put it beside the source's weights, and build "
            "again",
            [DRAFT_VOCAB, CONFIG],
        )
    return f"all {size:,} tokens, no ranking"
