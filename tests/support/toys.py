"""Tiny models that behave like large ones: targets of several families, and drafters for them.

Random weights of the usual size make a tiny model repeat one token and ignore its context. These
are larger, so that tokens vary, depend on the whole prefix, and a wrong cache or position shows.
"""

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from flashmap import FlashMapConfig, FlashMapDraftModel

VOCAB = 61
WIDTH = 24
IS_V5 = int(transformers.__version__.split(".")[0]) >= 5


def liven(model: Any, seed: int, std: float = 0.35, embedding_std: float | None = None) -> Any:
    """Give every matrix of `model` normal weights of this size (others stay), in eval mode."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.copy_(torch.randn(weight.shape, generator=generator) * std)
        if embedding_std is not None:
            model.get_input_embeddings().weight.mul_(embedding_std / std)
    return model.eval()


_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def _sizes(**changes: Any) -> dict[str, Any]:
    return {**_SIZES, **changes}


def llama(seed: int = 0, **changes: Any) -> Any:
    """A Llama target."""
    config = transformers.LlamaConfig(**_sizes(**changes))
    return liven(transformers.LlamaForCausalLM(config), seed)


def qwen3(seed: int = 0, **changes: Any) -> Any:
    """A Qwen3 target (norms of queries and keys)."""
    config = transformers.Qwen3Config(**_sizes(head_dim=12, **changes))
    return liven(transformers.Qwen3ForCausalLM(config), seed)


def gemma2(seed: int = 0, **changes: Any) -> Any:
    """A Gemma 2 target: scaled embedding, capped logits, every other layer with a window of 8."""
    sizes = _sizes(head_dim=12, sliding_window=8, **changes)
    config = transformers.Gemma2Config(**sizes)
    return liven(transformers.Gemma2ForCausalLM(config), seed, embedding_std=0.1)


def gemma3(seed: int = 0, **changes: Any) -> Any:
    """A Gemma 3 target whose first two layers see a window of 8."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    sizes = _sizes(head_dim=12, sliding_window=8, layer_types=kinds)
    config = transformers.Gemma3TextConfig(**{**sizes, **changes})
    return liven(transformers.Gemma3ForCausalLM(config), seed, embedding_std=0.1)


def gpt2(seed: int = 0, positions: int = 64, **changes: Any) -> Any:
    """A GPT-2 target: a learned position table, tied embedding."""
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=WIDTH, n_layer=3, n_head=2, n_positions=positions,
        bos_token_id=None, eos_token_id=None, pad_token_id=None, **changes,
    )  # fmt: skip
    return liven(transformers.GPT2LMHeadModel(config), seed, std=0.25)


def gpt_neo(seed: int = 0, positions: int = 64, local: int = 2) -> Any:
    """A GPT-Neo target: masks of its own, and windows of 8 in its last layers."""
    kinds = ["global"] * (3 - local) + ["local"] * local
    config = transformers.GPTNeoConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, num_layers=3, num_heads=2, intermediate_size=32,
        attention_types=[[kinds, 1]], window_size=8, max_position_embeddings=positions,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return liven(transformers.GPTNeoForCausalLM(config), seed, std=0.25)


def _sines(seed: int, model_class: Any, config_class: Any, num_heads: int) -> Any:
    config = config_class(
        vocab_size=VOCAB, n_embd=WIDTH, n_layer=3, n_head=num_heads, n_positions=32, rotary_dim=4,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return liven(model_class(config), seed, std=0.25)


def gptj(seed: int = 0) -> Any:
    """A GPT-J target: a rotary embedding with a table of 32 positions."""
    return _sines(seed, transformers.GPTJForCausalLM, transformers.GPTJConfig, 2)


def codegen(seed: int = 0) -> Any:
    """A CodeGen target, likewise."""
    return _sines(seed, transformers.CodeGenForCausalLM, transformers.CodeGenConfig, 4)


def qwen3_next(seed: int = 0) -> Any:
    """A Qwen3-Next target: gated delta-rule layers with a full-attention layer between."""
    sizes = _sizes(
        head_dim=12, layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8,
        linear_value_head_dim=8, linear_conv_kernel_dim=3, num_experts=0, moe_intermediate_size=8,
        num_experts_per_tok=1, shared_expert_intermediate_size=8, mlp_only_layers=[0, 1, 2],
    )  # fmt: skip
    config = transformers.Qwen3NextConfig(**sizes)
    return liven(transformers.Qwen3NextForCausalLM(config), seed)


def lfm2(seed: int = 0) -> Any:
    """An LFM2 target: short convolutions with a full-attention layer between."""
    kinds = ["conv", "full_attention", "conv"]
    sizes = _sizes(layer_types=kinds, block_auto_adjust_ff_dim=False, conv_L_cache=3)
    return liven(transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**sizes)), seed)


def falcon_h1(seed: int = 0) -> Any:
    """A Falcon-H1 target: every layer has attention and a state-space branch."""
    sizes = _sizes(
        head_dim=12, mamba_d_ssm=24, mamba_n_heads=3, mamba_d_head=8, mamba_n_groups=1,
        mamba_d_state=8, mamba_d_conv=3, mamba_chunk_size=8,
    )  # fmt: skip
    config = transformers.FalconH1Config(**sizes)
    return liven(transformers.FalconH1ForCausalLM(config), seed)


def mamba2(seed: int = 0) -> Any:
    """A Mamba 2 target: nothing but state-space layers."""
    config = transformers.Mamba2Config(
        vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=3, state_size=8, head_dim=8,
        num_heads=6, expand=2, n_groups=1, conv_kernel=3, chunk_size=8,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return liven(transformers.Mamba2ForCausalLM(config), seed)


def mamba(seed: int = 0) -> Any:
    """A Mamba target: nothing but state-space layers, of the first kind."""
    config = transformers.MambaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=3, state_size=8,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return liven(transformers.MambaForCausalLM(config), seed)


def rwkv(seed: int = 0) -> Any:
    """An RWKV target, which hands its state from call to call in an argument of its own."""
    config = transformers.RwkvConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=3, attention_hidden_size=WIDTH,
        intermediate_size=32, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return liven(transformers.RwkvForCausalLM(config), seed)


def jamba(seed: int = 0) -> Any:
    """A Jamba target: state-space layers with an attention layer between."""
    sizes = _sizes(
        use_mamba_kernels=False, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8,
        mamba_dt_rank=4, num_experts=2, expert_layer_period=4, expert_layer_offset=3,
    )  # fmt: skip
    return liven(transformers.JambaForCausalLM(transformers.JambaConfig(**sizes)), seed)


def recurrent_gemma(seed: int = 0) -> Any:
    """A RecurrentGemma target: recurrent layers and one of local attention."""
    sizes = _sizes(
        lru_width=WIDTH, attention_window_size=8, conv1d_width=3, head_dim=12,
        block_types=["recurrent", "recurrent", "attention"],
    )  # fmt: skip
    del sizes["max_position_embeddings"]
    config = transformers.RecurrentGemmaConfig(**sizes)
    return liven(transformers.RecurrentGemmaForCausalLM(config), seed)


def drafter_config(**changes: Any) -> FlashMapConfig:
    """Configuration of a tiny drafter for these targets, with grids for one to four jumps."""
    fields: dict[str, Any] = {
        "target_model": "toy", "target_hidden_size": WIDTH, "vocab_size": VOCAB,
        "target_layer_ids": [0, 1], "block_size": 3, "hidden_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 2, "intermediate_size": 24, "cond_dim": 12, "time_embed_dim": 8,
        "jump_grids": {
            "1": [0.0, 1.0], "2": [0.0, 0.5, 1.0], "3": [0.0, 0.4, 0.7, 1.0],
            "4": [0.0, 0.3, 0.5, 0.8, 1.0],
        },
    }  # fmt: skip
    return FlashMapConfig(**{**fields, **changes})


def drafter(seed: int = 1, cls: Any = FlashMapDraftModel, **changes: Any) -> Any:
    """A drafter with random weights, norms and biases too: its output depends on all of them."""
    model = liven(cls(drafter_config(**changes)), seed)
    generator = torch.Generator().manual_seed(seed + 1000)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.add_(torch.randn(weight.shape, generator=generator) * 0.1)
    return model


def prompt(length: int, seed: int = 0, vocab: int = VOCAB) -> Tensor:
    """Random token ids (1, length)."""
    return torch.randint(0, vocab, (1, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def greedy(target: Any, ids: Tensor, num_tokens: int) -> list[int]:
    """The target's own greedy continuation, by transformers' `generate`, without a stop token."""
    out = target.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False,
        max_new_tokens=num_tokens, min_new_tokens=num_tokens,
    )  # fmt: skip
    new: list[int] = out[0, ids.shape[1] :].tolist()
    assert len(new) == num_tokens
    return new


class Scripted(FlashMapDraftModel):
    """A drafter that is told what to propose.

    `script` maps the absolute position of a slot to a token; slots it does not name keep the
    network's own proposal. `calls` counts drafts.
    """

    def __init__(self, config: FlashMapConfig) -> None:
        super().__init__(config)
        self.script: dict[int, int] = {}
        self.calls = 0

    def draft(self, anchor_ids: Tensor, cache: Any, *args: Any, **kwargs: Any) -> Tensor:
        """The network's logits, with the scripted tokens far above all others."""
        self.calls += 1
        logits = super().draft(anchor_ids, cache, *args, **kwargs).float()
        for slot in range(logits.shape[-2]):
            token = self.script.get(cache.length + 1 + slot)
            if token is not None:
                logits[..., slot, token] = logits[..., slot, :].max() + 1e4
        return logits


def scripted(script: dict[int, int], seed: int = 1, **changes: Any) -> Scripted:
    """A `Scripted` drafter with this script."""
    model: Scripted = drafter(seed, cls=Scripted, **changes)
    model.script = script
    return model


def text_of(output: Any, ids: Tensor) -> list[int]:
    """The new tokens of a result, after checking that it starts with the prompt."""
    assert output.sequences[:, : ids.shape[1]].equal(ids)
    new: list[int] = output.sequences[0, ids.shape[1] :].tolist()
    assert len(new) == output.num_new_tokens
    return new


def hook_count(model: nn.Module) -> int:
    """Forward hooks that are registered anywhere in `model`."""
    return sum(len(module._forward_hooks) for module in model.modules())


def scaled_rope(kind: str, original: int) -> Any:
    """A target whose rotary frequencies change beyond `original` positions."""
    scaling: dict[str, Any] = {"rope_type": kind}
    if kind == "dynamic":
        scaling["factor"] = 2.0
    else:
        scaling |= {"short_factor": [1.0] * 6, "long_factor": [4.0] * 6}
    changes: dict[str, Any] = {"rope_scaling": scaling}
    if IS_V5:
        scaling |= {"rope_theta": 10000.0, "original_max_position_embeddings": original}
        changes = {"rope_parameters": scaling}
    if kind == "dynamic":
        scaling.pop("original_max_position_embeddings", None)
        sizes = _sizes(max_position_embeddings=original)
        return liven(transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **changes)), 0)
    if not IS_V5:
        changes["rope_scaling"] = {"type": kind, **{k: v for k, v in scaling.items() if "fac" in k}}
    sizes = _sizes(original_max_position_embeddings=original)
    return liven(transformers.Phi3ForCausalLM(transformers.Phi3Config(**sizes, **changes)), 0)
