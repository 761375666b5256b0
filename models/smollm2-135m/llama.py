"""The target as plain functions on its weights, so that CUDA graphs can hold a whole pass.

Launching kernels one by one keeps a GPU waiting for the CPU at this model size. transformers'
modules remain the reference: `python llama.py TARGET_FOLDER` compares the two.

Legend: B sequences, T positions of a pass, S cache size, A query heads, G key-value heads, d head
width, n tapped layers, H hidden width, V vocabulary.
"""

import sys

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM


class Llama:
    """Weights of a Llama checkpoint, for whole sequences or for one token against a cache."""

    def __init__(self, folder: str, device: str, dtype: torch.dtype) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
        self.config = model.config
        self.embedding = model.get_input_embeddings().weight.detach()
        self.norm = model.model.norm.weight.detach()
        self.layers = [
            {name: weight.detach() for name, weight in layer.named_parameters()}
            for layer in model.model.layers
        ]
        theta = model.config.rope_parameters["rope_theta"]
        exponents = torch.arange(0, model.config.head_dim, 2, device=device).float()
        self.frequencies = 1.0 / theta ** (exponents / model.config.head_dim)

    @torch.no_grad()
    def features(self, ids_BT: Tensor, taps: list[int]) -> Tensor:
        """Outputs (B, T, n H) of the tapped layers for whole sequences."""
        positions = torch.arange(ids_BT.shape[1], device=ids_BT.device).expand(ids_BT.shape)
        x, kept = F.embedding(ids_BT, self.embedding), []
        for index, weights in enumerate(self.layers[: max(taps) + 1]):
            query, key, value = self._project(x, weights, positions)
            x = self._finish(x, _causal_attention(query, key, value), weights)
            if index in taps:
                kept.append(x)
        return torch.cat(kept, dim=-1)

    def new_cache(self, batch_size: int, size: int) -> Tensor:
        """Zeros (layers, 2, B, G, S, d)."""
        config = self.config
        heads, width = config.num_key_value_heads, config.head_dim
        shape = (len(self.layers), 2, batch_size, heads, size, width)
        return torch.zeros(shape, device=self.embedding.device, dtype=self.embedding.dtype)

    @torch.no_grad()
    def prefill(self, ids_BT: Tensor, cache: Tensor) -> None:
        """Write keys and values of right-padded prompts; padding is overwritten before seen."""
        length = ids_BT.shape[1]
        positions = torch.arange(length, device=ids_BT.device).expand(ids_BT.shape)
        x = F.embedding(ids_BT, self.embedding)
        for weights, (keys, values) in zip(self.layers, cache, strict=True):
            query, key, value = self._project(x, weights, positions)
            keys[:, :, :length], values[:, :, :length] = key, value
            x = self._finish(x, _causal_attention(query, key, value), weights)

    @torch.no_grad()
    def step(self, ids_B: Tensor, positions_B: Tensor, cache: Tensor) -> Tensor:
        """Logits (B, V) after token `ids_B` at `positions_B`, written to the cache."""
        x = F.embedding(ids_B[:, None], self.embedding)
        rows = torch.arange(ids_B.shape[0], device=ids_B.device)
        times = torch.arange(cache.shape[4], device=ids_B.device)
        mask = (times <= positions_B[:, None])[:, None, None]
        for weights, (keys, values) in zip(self.layers, cache, strict=True):
            query, key, value = self._project(x, weights, positions_B[:, None])
            keys[rows, :, positions_B] = key[:, :, 0]
            values[rows, :, positions_B] = value[:, :, 0]
            # The query heads of a group are queries of one head: no key is copied.
            grouped = query.view(query.shape[0], key.shape[1], -1, query.shape[-1])
            attended = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
            x = self._finish(x, attended.view(query.shape), weights)
        return self._norm(x[:, 0], self.norm) @ self.embedding.T

    def _project(
        self, x: Tensor, weights: dict[str, Tensor], positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        h = self._norm(x, weights["input_layernorm.weight"])
        query, key, value = (
            (h @ weights[f"self_attn.{name}_proj.weight"].T)
            .unflatten(-1, (-1, self.config.head_dim))
            .transpose(1, 2)
            for name in "qkv"
        )
        angles = positions[:, None, :, None].float() * self.frequencies
        cos, sin = (torch.cat((f, f), -1).to(x.dtype) for f in (angles.cos(), angles.sin()))
        query, key = (part * cos + _rotate_half(part) * sin for part in (query, key))
        return query, key, value

    def _finish(self, x: Tensor, attended: Tensor, weights: dict[str, Tensor]) -> Tensor:
        x = x + attended.transpose(1, 2).flatten(2) @ weights["self_attn.o_proj.weight"].T
        h = self._norm(x, weights["post_attention_layernorm.weight"])
        gate, up = h @ weights["mlp.gate_proj.weight"].T, h @ weights["mlp.up_proj.weight"].T
        return x + (F.silu(gate) * up) @ weights["mlp.down_proj.weight"].T

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        eps = self.config.rms_norm_eps
        return weight * F.rms_norm(x.float(), x.shape[-1:], eps=eps).to(x.dtype)


def _causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def _rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def compare(folder: str) -> None:
    """Print the largest relative difference from transformers, for features and a decoding step."""
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model = Llama(folder, "cpu", torch.float32)
    ids, taps = torch.randint(0, 1000, (2, 24)), [1, 14, 27]
    with torch.no_grad():
        expected = reference(ids, output_hidden_states=True)
    hidden = torch.cat([expected.hidden_states[tap + 1] for tap in taps], dim=-1)
    cache = model.new_cache(2, 32)
    model.prefill(torch.cat((ids[:, :-1], ids[:, :3]), 1), cache)  # the last three are padding
    logits = model.step(ids[:, -1], torch.tensor([23, 23]), cache)
    for name, found, wanted in (
        ("features", model.features(ids, taps), hidden),
        ("logits", logits, expected.logits[:, -1]),
    ):
        print(f"{name}: {float((found - wanted).abs().max() / wanted.abs().max()):.1e}")


if __name__ == "__main__":
    compare(sys.argv[1])
