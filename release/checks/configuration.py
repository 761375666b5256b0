"""Checks of config.json: valid, complete for every reader, and true to target and vocabulary."""

import inspect
import re

from flashmap.checkpoint import CONFIG
from flashmap.references import HUB_ID

from ..checking import ReleaseFolder, check
from ..errors import ReleaseError
from ..grid_modes import LARGEST_ERROR, grid_error, grid_mode

# Keys that stand for something in every release, whatever the drafter.
CONSTANT = {
    "model_type": "flashmap",
    "speculators_model_type": "flashmap",
    "tie_word_embeddings": False,
}
# transformers takes these out of a configuration without a word.
GENERATION = {
    "bad_words_ids", "diversity_penalty", "do_sample", "early_stopping",
    "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "forced_bos_token_id",
    "forced_eos_token_id", "length_penalty", "max_length", "max_new_tokens", "min_length", "min_p",
    "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences",
    "output_scores", "remove_invalid_values", "repetition_penalty", "return_dict_in_generate",
    "suppress_tokens", "temperature", "top_k", "top_p", "typical_p", "use_cache",
}  # fmt: skip
SHA256 = re.compile(r"[0-9a-f]{64}")


def _fail(name: str, problems: list[str], expected: str, fix: str = "build again") -> None:
    if problems:
        raise ReleaseError(name, "; ".join(problems[:4]), expected, fix, [CONFIG])


@check("config")
def valid(release: ReleaseFolder) -> str:
    """Every field of the drafter, by its own rules."""
    config = release.config
    return f"valid, target_layer_ids {config.target_layer_ids}, block_size {config.block_size}"


@check("config-complete")
def complete(release: ReleaseFolder) -> str:
    """Every field written out, so that no reader's default matters."""
    raw = release.raw_config
    fields = list(inspect.signature(type(release.config).__init__).parameters)[1:-1]
    problems = [
        f"no {name}" for name in (*fields, *CONSTANT, "flashmap_version") if name not in raw
    ]
    problems += [
        f"{name} is {raw[name]!r} instead of {value!r}"
        for name, value in CONSTANT.items()
        if name in raw and raw[name] != value
    ]
    _fail("config-complete", problems, "every field of the drafter and its kind")
    return f"{len(fields)} fields, {len(raw)} keys"


@check("config-keys")
def keys(release: ReleaseFolder) -> str:
    """Keys that some transformers takes for generation settings and drops."""
    found = sorted(GENERATION & release.raw_config.keys())
    _fail("config-keys", [f"{', '.join(found)}"] * bool(found), "no generation settings",
          "remove them: they belong to the target's generation_config.json")  # fmt: skip
    return "no generation settings"


@check("engine-keys")
def engine_keys(release: ReleaseFolder) -> str:
    """Keys by which serving engines size their caches and accept the drafter."""
    raw, config = release.raw_config, release.config
    wanted = {
        "num_key_value_heads": config.num_attention_heads,
        "head_dim": config.hidden_size // config.num_attention_heads,
        "markov_rank": 1,
        "markov_head_type": "vanilla",
    }
    problems = [
        f"{name} is {raw.get(name)!r} instead of {value!r}"
        for name, value in wanted.items()
        if raw.get(name) != value
    ]
    ranges = {
        "mask_token_id": range(config.vocab_size),
        "max_position_embeddings": range(config.block_size + 1, 2**31),
        "num_target_layers": range(max(config.target_layer_ids) + 1, 2**31),
    }
    problems += [
        f"{name} is {raw.get(name)!r}, not from {allowed.start} to {allowed.stop - 1}"
        for name, allowed in ranges.items()
        if type(raw.get(name)) is not int or raw[name] not in allowed
    ]
    _fail("engine-keys", problems, "what vLLM and sglang read",
          "state num_target_layers in the source's config.json, and build again")  # fmt: skip
    return ", ".join((*wanted, *ranges))


@check("stage")
def stage(release: ReleaseFolder) -> str:
    """A flow map, not the flow that a first stage of training leaves."""
    value = release.raw_config.get("flow_map", True)
    _fail("stage", [f"flow_map is {value!r}"] * (value is not True), "a flow map",
          "release the second training stage's weights")  # fmt: skip
    return "flow map"


@check("target")
def target(release: ReleaseFolder) -> str:
    """Which target, in which revision: acceptance holds for that one alone."""
    raw, name = release.raw_config, release.config.target_model
    revision, vocabulary = raw.get("target_revision"), raw.get("target_vocab_hash")
    problems = []
    if not HUB_ID.fullmatch(name):
        problems.append(f"target_model {name!r} is no Hub id")
    if not isinstance(revision, str) or not revision.strip():
        problems.append(f"target_revision is {revision!r}")
    if not isinstance(vocabulary, str) or not SHA256.fullmatch(vocabulary):
        problems.append(f"target_vocab_hash is {vocabulary!r}")
    _fail("target", problems, "the target's id, its revision, and the sha256 of its vocabulary",
          "state them in the source's config.json, and build again (the sha256 is in the file that "
          "`flashmap release vocab` writes)")  # fmt: skip
    for key in ("target_model", "target_revision", "target_vocab_hash"):
        if release.record.get(key) != raw.get(key):
            text = f"{key} is {raw.get(key)!r}, and in the record {release.record.get(key)!r}"
            _fail("target", [text], "one target")
    return f"{name}, {revision}"


@check("grids")
def grids(release: ReleaseFolder) -> str:
    """Jump times that belong to this vocabulary, by their definition."""
    config = release.config
    error, where = grid_error(config.jump_grids, config.vocab_size)
    mode = grid_mode(config.jump_grids, config.vocab_size)
    problems = [f"{where}, for {config.vocab_size} tokens"] * (error > LARGEST_ERROR)
    _fail("grids", problems, f"times within {LARGEST_ERROR:g} of the definition",
          "take them from `flashmap release grids`, and build again")  # fmt: skip
    return f"{mode}, for {', '.join(sorted(config.jump_grids, key=int))} jumps"
