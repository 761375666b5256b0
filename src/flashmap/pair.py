"""Loads a target and its drafter, ready to decode: the one entry for the command line, scripts and
tests.

Both models end on one device in one dtype. Everything that could make decoding crash or quietly
lose its speed (damaged weights, another vocabulary, another tokenizer) is refused here with a
sentence that says what to do.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .checkpoint import CONFIG, read_json, require_all_loaded, require_finite, weight_files
from .quiet import quiet
from .references import drafter_folder, target_folder

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from .modeling.modeling_flashmap import FlashMapDraftModel

DTYPES = ("auto", "float32", "bfloat16", "float16")
# Embedding tables are padded by some per cent; a tokenizer that covers less than this belongs to
# another model.
LEAST_COVERAGE = 0.75
# torch itself wraps an index beyond 127 round to another one.
DEVICE = re.compile(r"cpu(?::0)?|cuda(?::(?P<index>[0-9]{1,9}))?")
MEND = "; its files are damaged, or this transformers does not know them: fetch or copy them again"
# Whatever the folder says, and whoever answers a prompt: none of its Python runs.
NO_CODE = {"trust_remote_code": False}


def load_pair(
    target: "str | Path",
    draft: "str | Path",
    device: "str | torch.device | None" = None,
    dtype: "str | torch.dtype | None" = None,
) -> "tuple[PreTrainedModel, FlashMapDraftModel, PreTrainedTokenizerBase]":
    """Load a target, its drafter and its tokenizer.

    >>> target, draft, tokenizer = load_pair("smollm2-135m", "smollm2-135m")  # doctest: +SKIP

    Args:
        target: a local folder, a Hub id with an optional ``@revision``, or ``smollm2-135m``.
        draft: the same for the drafter. It runs in this package's class: Python code that comes
            with it is not executed.
        device: "cpu", "cuda" or "cuda:N"; None takes a GPU if there is one.
        dtype: "float32", "bfloat16", "float16", a torch.dtype, or "auto" (None): bfloat16 on a GPU,
            elsewhere what the target is stored in. float32 reproduces plain greedy decoding token
            by token; bfloat16 is faster, and may part from it where two tokens are nearly tied.

    Returns:
        The target and the drafter in evaluation mode, and the target's tokenizer.

    Raises:
        ValueError: a REF cannot be found or fetched, a folder is damaged, the two do not belong
            together, or the device or dtype is not there.
    """
    chosen_device = _resolve_device(device)
    chosen_dtype = _resolve_dtype(dtype, chosen_device)
    draft_folder = drafter_folder(str(draft))
    loaded: Any = load_drafter(draft_folder)
    target_model, tokenizer, folder = _open_target(str(target), chosen_device, chosen_dtype)
    draft_model: FlashMapDraftModel = loaded.to(chosen_device, target_model.dtype).eval()
    draft_model.check_target(target_model)
    check_tokenizer(tokenizer, target_model, draft_model.config, folder)
    return target_model, draft_model, tokenizer


def load_target(
    target: "str | Path",
    device: "str | torch.device | None" = None,
    dtype: "str | torch.dtype | None" = None,
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Load a target in evaluation mode, and its tokenizer; arguments and errors as `load_pair`."""
    chosen = _resolve_device(device)
    model, tokenizer, _ = _open_target(str(target), chosen, _resolve_dtype(dtype, chosen))
    return model, tokenizer


def load_tokenizer(target: "str | Path") -> "tuple[PreTrainedTokenizerBase, Path]":
    """Load the tokenizer of a target without its weights, and the folder it lies in; errors as
    `load_pair`."""
    folder = target_folder(str(target), weights=False)
    _check_target_config(folder)
    return _load_tokenizer(folder), folder


def vocabulary_hash(tokenizer: "PreTrainedTokenizerBase") -> str:
    """sha256 of the tokenizer's (id, token) pairs: ``target_vocab_hash`` in a drafter's config."""
    pairs = sorted((index, token) for token, index in tokenizer.get_vocab().items())
    return hashlib.sha256(
        json.dumps(pairs, ensure_ascii=True, separators=(",", ":")).encode()
    ).hexdigest()


def check_tokenizer(
    tokenizer: "PreTrainedTokenizerBase", target: "PreTrainedModel", draft_config: Any, folder: Path
) -> None:
    """Raise ValueError if ``tokenizer`` cannot be the one that ``target`` and its drafter were
    trained with."""
    from .modeling.target_flashmap import num_embedding_rows

    rows = num_embedding_rows(target)
    vocabulary = tokenizer.get_vocab()
    size, highest = len(vocabulary), max(vocabulary.values(), default=-1)
    found = (
        f"the tokenizer in {folder} has {size} tokens with ids up to {highest}, the target's "
        f"embedding {rows} rows"
    )
    advice = "it belongs to another model family: put the target's own tokenizer files there"
    if highest >= rows or size < LEAST_COVERAGE * rows:
        raise ValueError(f"{found}; {advice}")
    expected = getattr(draft_config, "target_vocab_hash", None)
    if expected and vocabulary_hash(tokenizer) != expected:
        raise ValueError(
            f"{found}, and its vocabulary is not the one the drafter was trained for "
            f"({draft_config.target_model}, "
            f"target_vocab_hash {expected}); {advice}, or use a drafter made for this target"
        )


def _resolve_device(device: "str | torch.device | None") -> "torch.device":
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device is None:
        return torch.device("cuda" if count else "cpu")
    match = DEVICE.fullmatch(str(device))
    if match is None:
        raise ValueError(f"device {str(device)!r} is not known; use cpu, cuda or cuda:N")
    if str(device).startswith("cuda") and int(match["index"] or 0) >= count:
        have = f"{count} GPU(s)" if count else "no GPU that torch can use"
        raise ValueError(
            f"device {str(device)!r} was asked for, but there is {have} (torch "
            f"{torch.__version__}, built for CUDA "
            f"{torch.version.cuda}); use --device cpu, or install a driver and a torch build that "
            f"match"
        )
    return torch.device(device)


def _resolve_dtype(
    dtype: "str | torch.dtype | None", device: "torch.device"
) -> "str | torch.dtype":
    import torch

    if isinstance(dtype, torch.dtype):
        if not dtype.is_floating_point:
            raise ValueError(
                f"dtype {dtype} is not a floating-point type; use one of {', '.join(DTYPES)}"
            )
        return dtype
    if dtype is None or dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else "auto"
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not known; use one of {', '.join(DTYPES)}")
    chosen: torch.dtype = getattr(torch, dtype)
    return chosen


def load_drafter(folder: Path) -> "FlashMapDraftModel":
    """Load a drafter as it is stored, every tensor there and finite; errors as `load_pair`."""
    model_type = read_json(folder / CONFIG).get("model_type")
    if model_type != "flashmap":
        raise ValueError(
            f"{folder / CONFIG}: model_type is {model_type!r}; a FlashMap drafter says 'flashmap'"
        )
    weight_files(folder)
    from .modeling.configuration_flashmap import FlashMapConfig
    from .modeling.modeling_flashmap import FlashMapDraftModel

    with _told(f"{folder / CONFIG}: "):
        config = FlashMapConfig.from_pretrained(folder)
    model: FlashMapDraftModel = _from_pretrained(
        FlashMapDraftModel, folder, strict=True, config=config
    )
    return model


def _open_target(
    reference: str, device: "torch.device", dtype: "str | torch.dtype"
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase, Path]":
    folder = target_folder(reference)
    _check_target_config(folder)
    tokenizer = _load_tokenizer(folder)
    return _load_target(folder, device, dtype), tokenizer, folder


def _check_target_config(folder: Path) -> None:
    """Refuse a configuration that cannot be used, before the tokenizer's loader stumbles over
    it."""
    from transformers import AutoConfig

    if read_json(folder / CONFIG).get("model_type") == "flashmap":
        raise ValueError(f"{folder} is a drafter; --target names the language model it drafts for")
    with _told(f"{folder} cannot be loaded: {CONFIG}: "):
        AutoConfig.from_pretrained(folder, **NO_CODE)


def _load_target(
    folder: Path, device: "torch.device", dtype: "str | torch.dtype"
) -> "PreTrainedModel":
    from transformers import AutoModelForCausalLM

    config = read_json(folder / CONFIG)
    weight_files(folder)
    # A quantised model is put on its device while it loads, and some kinds cannot be moved
    # afterwards.
    placement = {"device_map": {"": device}} if "quantization_config" in config else {}
    model = _from_pretrained(AutoModelForCausalLM, folder, strict=False, dtype=dtype, **placement)
    ready: PreTrainedModel = (model if placement else model.to(device)).eval()
    return ready


def _from_pretrained(auto_class: Any, folder: Path, *, strict: bool, **arguments: Any) -> Any:
    with _told(f"{folder} cannot be loaded: "):
        # Tensors of other shapes are let through here to be named below, with the folder.
        model, info = auto_class.from_pretrained(
            folder, output_loading_info=True, ignore_mismatched_sizes=True, **NO_CODE, **arguments
        )
    require_all_loaded(info, folder, strict=strict)
    require_finite(model, folder)
    return model


def _load_tokenizer(folder: Path) -> "PreTrainedTokenizerBase":
    from transformers import AutoTokenizer

    advice = "; fetch the target again with its tokenizer files"
    with _told(f"{folder} holds no tokenizer that can be loaded: ", advice):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, **NO_CODE)
    return tokenizer


@contextmanager
def _told(found: str, advice: str = MEND) -> Iterator[None]:
    """Turn whatever transformers raises within into one ValueError: ``found``, the reason,
    ``advice``."""
    try:
        with quiet(bars=True):
            yield
        return
    except Exception as error:  # noqa: BLE001 - a damaged file can make it raise anything
        caught = error
    if type(caught).__name__ == "OutOfMemoryError":  # nothing is wrong with the folder
        raise caught
    if "trust_remote_code" in str(caught):
        raise ValueError(
            f"{found}it needs Python code that its author ships, and flashmap runs no model's own "
            f"code (trust_remote_code is off); use one whose architecture transformers has built in"
        ) from caught
    raise ValueError(f"{found}{_first_line(caught)}{advice}") from caught


def _first_line(error: Exception) -> str:
    """The error in one line, with its type where the text alone would say little."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[: 2 if lines[0].endswith(":") else 1]) if lines else ""
    if text and isinstance(error, OSError | ValueError | RuntimeError | ImportError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
