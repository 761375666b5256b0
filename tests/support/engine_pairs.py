"""Tiny pairs of a target and a drafter as folders that an engine can serve on a CPU.

In the right pair the target's next token is a fixed function of the last one, and the drafter knows
it: every draft has to be accepted. In the random pair hardly any is.

Legend: V vocabulary, H target hidden width, D drafter width, A heads, d head width, K slots.
"""

from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

from flashmap import FlashMapConfig, FlashMapDraftModel

from . import toys

VOCAB, WIDTH, HEAD = 32, 64, 32  # heads of 32 are the smallest that vLLM's CPU backend takes
BLOCK = 4
_SHARP = 40.0  # score of the entry that a head looks at; others get 0 or much less
# With one radian a slot, cos(k - j) is at most 0.54 unless k = j; this stands between.
_BETWEEN = 0.77
_NORMED = WIDTH**0.5  # the one number of a token's state, after the target's last norm


def next_token(token: int) -> int:
    """What the right target says after `token`."""
    return (5 * token + 3) % VOCAB


def _target_config(**changes: Any) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(
        **{
            "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 64,
            "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1,
            "head_dim": HEAD, "max_position_embeddings": 256, "tie_word_embeddings": False,
            "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, **changes,
        }
    )  # fmt: skip


def _drafter_config(**changes: Any) -> FlashMapConfig:
    fields: dict[str, Any] = {
        "target_model": "toy", "target_hidden_size": WIDTH, "vocab_size": VOCAB,
        "target_layer_ids": [0, 1], "block_size": BLOCK, "hidden_size": BLOCK * HEAD,
        "num_hidden_layers": 2, "num_attention_heads": BLOCK, "intermediate_size": 32,
        "cond_dim": 16, "time_embed_dim": 8,
        "jump_grids": {"1": [0.0, 1.0], "2": [0.0, 0.6, 1.0]}, "max_position_embeddings": 256,
    }  # fmt: skip
    return FlashMapConfig(**{**fields, **changes})


def write_random(folder: Path, **changes: Any) -> Path:
    """A pair with random weights, as target/ and draft/ of a folder."""
    target = toys.liven(transformers.LlamaForCausalLM(_target_config()), 0, std=0.25)
    target.save_pretrained(folder / "target")
    model = toys.liven(FlashMapDraftModel(_drafter_config(**changes)), 1, std=0.25)
    model.save_pretrained(folder / "draft")
    return folder


def write_tokenizer(folder: Path) -> None:
    """A tokenizer whose words are the tokens' numbers."""
    words = {str(token): token for token in range(VOCAB)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="0"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=model).save_pretrained(folder)


@torch.no_grad()
def write_right(folder: Path, logit: float = 32.0, certainty: float = 8.0) -> Path:
    """The pair of which every greedy draft is right, as target/ and draft/ of a folder.

    The target gives its next token this logit and the others 0; `certainty` scales the drafter's.
    """
    target = transformers.LlamaForCausalLM(_target_config())
    for layer in target.model.layers:  # so that a token's state is its embedding
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    target.model.embed_tokens.weight.copy_(torch.eye(VOCAB, WIDTH))
    target.lm_head.weight.zero_()
    for token in range(VOCAB):
        target.lm_head.weight[next_token(token), token] = logit / _NORMED
    target.save_pretrained(folder / "target")
    right_drafter(certainty).save_pretrained(folder / "draft")
    return folder


@torch.no_grad()
def right_drafter(certainty: float = 8.0) -> FlashMapDraftModel:
    """A drafter whose head j of the first layer attends to the anchor from slot j alone, and hands
    on the token that comes j + 1 after it."""
    config = _drafter_config(rope_theta=1e12)
    model = FlashMapDraftModel(config).eval()
    for name, weight in model.named_parameters():
        if not name.endswith("norm.weight"):
            weight.zero_()
    first = model.layers[0]
    # The first of D numbers is the token-free constant that queries and keys are made of.
    width = config.hidden_size
    shift, gate = slice(width, 2 * width), slice(2 * width, None)
    first.cross_attn_adaln.linear.bias[shift][0] = 1.0
    first.cross_attn_adaln.linear.bias[gate].fill_(1.0)
    # Anchors: token v is coordinate 1 + v, beside the constant.
    model.anchor_proj.weight[1 : 1 + VOCAB, :VOCAB].copy_(torch.eye(VOCAB))
    model.anchor_proj.bias[0] = 1.0
    cross = first.cross_attn
    far = 2 * (HEAD // 2 - 1)  # a pair that hardly turns
    for head in range(BLOCK):
        row = head * HEAD
        slot = torch.tensor(float(head + 1))
        # Score: cos(k - slot) from the first pair, less `_BETWEEN` from the one that stands still.
        cross.k_proj.weight[row, 0] = 1.0
        cross.k_proj.weight[row + far, 0] = 1.0
        cross.q_proj.weight[row, 0] = slot.cos()
        cross.q_proj.weight[row + 1, 0] = -slot.sin()
        cross.q_proj.weight[row + far, 0] = -_BETWEEN
        cross.v_proj.weight[row : row + HEAD, 1 : 1 + VOCAB].copy_(torch.eye(VOCAB))
        for token in range(VOCAB):
            said = token
            for _ in range(head + 1):
                said = next_token(said)
            cross.o_proj.weight[said, row + token] = 1.0
    cross.q_norm.weight.fill_(_SHARP**0.5)
    cross.k_norm.weight.fill_(_SHARP**0.5)
    # The head asks the target's vocabulary head, whose token next_token(v) answers to v.
    for token in range(VOCAB):
        model.head.weight[token, next_token(token)] = certainty
    return model
