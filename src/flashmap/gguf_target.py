"""Turns one Llama GGUF file into a plain transformers folder.

transformers reads the quantised weights, but what it then saves differs between its lines (4.57 and
5.x build other tokenizers from the same file, 5.x names a tokenizer class that 4.57 lacks, the rope
keys have moved), and the model keeps a ``quantization_config`` that engines refuse. So only the
dequantised tensors are taken from transformers; the configuration, the tokenizer and the chat
template are written here from the file's own header. The folder is the same, byte for byte,
whichever line made it, and both lines read it.
"""

import importlib.util
import json
import logging
from pathlib import Path
from typing import Any

from .quiet import quiet

GPT2_PRETOKENIZERS = {
    "smollm": True,
    "gpt-2": False,
}  # the header's name -> are digits split one by one?
ARCHITECTURE = "llama"
CONTROL_TOKEN = 3  # GGUF token type of a special token
log = logging.getLogger(__name__)


def convert_llama_gguf(gguf_file: Path, out: Path, stop_tokens: list[str]) -> None:
    """Write the model of ``gguf_file`` to the existing folder ``out`` as a bfloat16
    LlamaForCausalLM with tokenizer.

    ``stop_tokens`` become the generation config's eos ids, in that order; the first also ends a
    turn for the tokenizer. Raises ValueError if the gguf package is missing or the file is not the
    kind described above.
    """
    if importlib.util.find_spec("gguf") is None:
        raise ValueError(
            f"reading {gguf_file.name} needs the gguf package, which is not installed; "
            'install it with: pip install "flashmap-hub[demo]"'
        )
    header = _read_header(gguf_file)
    ids = _token_ids(header, stop_tokens)
    _write_tokenizer(header, out, stop_tokens[0])
    config = _write_config(header, out, ids)
    _write_weights(gguf_file, out, tied=bool(config["tie_word_embeddings"]))


def _read_header(gguf_file: Path) -> dict[str, Any]:
    """The header's fields by name, and the set of tensor names under ``tensors``."""
    from gguf import GGUFReader  # an optional package: the `demo` extra

    reader = GGUFReader(gguf_file)
    header: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
    header["tensors"] = {tensor.name for tensor in reader.tensors}
    wanted = {
        "general.architecture": [ARCHITECTURE],
        "tokenizer.ggml.pre": sorted(GPT2_PRETOKENIZERS),
    }
    for key, allowed in wanted.items():
        if header.get(key) not in allowed:
            raise ValueError(
                f"{gguf_file}: {key} is {header.get(key)!r}; this converter reads "
                f"{', '.join(allowed)} only"
            )
    return header


def _token_ids(header: dict[str, Any], tokens: list[str]) -> list[int]:
    vocabulary: list[str] = header["tokenizer.ggml.tokens"]
    missing = [token for token in tokens if token not in vocabulary]
    if missing:
        raise ValueError(
            f"the file's vocabulary of {len(vocabulary)} tokens lacks the stop tokens {missing}"
        )
    return [vocabulary.index(token) for token in tokens]


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(
        json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def _write_tokenizer(header: dict[str, Any], out: Path, end_of_turn: str) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = header["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in header["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    )
    splits: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    if GPT2_PRETOKENIZERS[header["tokenizer.ggml.pre"]]:
        splits.insert(0, pre_tokenizers.Digits(individual_digits=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    tokenizer.decoder = decoders.ByteLevel()
    kinds = header["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in special]
    )
    tokenizer.save(str(out / "tokenizer.json"))
    _write_json(
        out / "tokenizer_config.json",
        {
            # The base class: the one fast tokenizer that both transformers lines know by name.
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[header["tokenizer.ggml.bos_token_id"]],
            "eos_token": end_of_turn,
            "pad_token": tokens[header["tokenizer.ggml.padding_token_id"]],
            "unk_token": tokens[header["tokenizer.ggml.unknown_token_id"]],
            "clean_up_tokenization_spaces": False,
            # Left out, 4.57 adds token_type_ids, which a Llama model refuses.
            "model_input_names": ["input_ids", "attention_mask"],
            "model_max_length": header["llama.context_length"],
        },
    )
    (out / "chat_template.jinja").write_text(header["tokenizer.chat_template"], encoding="utf-8")


def _write_config(header: dict[str, Any], out: Path, eos_ids: list[int]) -> dict[str, Any]:
    heads = header["llama.attention.head_count"]
    theta = float(header["llama.rope.freq_base"])
    special = {
        "bos_token_id": header["tokenizer.ggml.bos_token_id"],
        "pad_token_id": header["tokenizer.ggml.padding_token_id"],
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",  # what 4.57 reads
        "eos_token_id": eos_ids[0],
        "head_dim": header["llama.embedding_length"] // heads,
        "hidden_act": "silu",
        "hidden_size": header["llama.embedding_length"],
        "initializer_range": 0.02,
        "intermediate_size": header["llama.feed_forward_length"],
        "max_position_embeddings": header["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": header["llama.block_count"],
        "num_key_value_heads": header["llama.attention.head_count_kv"],
        "rms_norm_eps": float(header["llama.attention.layer_norm_rms_epsilon"]),
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        "rope_theta": theta,  # what 4.57 reads
        "tie_word_embeddings": "output.weight" not in header["tensors"],
        "use_cache": True,
        "vocab_size": len(header["tokenizer.ggml.tokens"]),
        **special,
    }
    _write_json(out / "config.json", config)
    _write_json(out / "generation_config.json", {"eos_token_id": eos_ids, **special})
    return config


def _write_weights(gguf_file: Path, out: Path, *, tied: bool) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    with quiet(bars=True):
        model = AutoModelForCausalLM.from_pretrained(
            str(gguf_file.parent), gguf_file=gguf_file.name, dtype=torch.float32
        )
    tensors = {
        name: tensor.to(torch.bfloat16).contiguous().clone()
        for name, tensor in sorted(model.state_dict().items())
        if not (tied and name == "lm_head.weight")
    }
    broken = [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]
    if broken:
        raise ValueError(
            f"{gguf_file}: {len(broken)} dequantised tensors are not finite, the first is "
            f"{broken[0]}"
        )
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    log.debug("wrote %d tensors of %s", len(tensors), gguf_file)
