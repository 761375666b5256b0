"""What a training step costs on a GPU, and what bounds it, at the size of the drafter in `models/`.

    python benchmarks/train_step.py [RECIPE] [--steps 100] [--set run.blocks=64] [--out FILE]

The target has SmolLM2-135M's shape and random weights, the documents random tokens, so that nothing
has to be fetched; neither changes what a step computes. The claim is at least 250 thousand slots a
second. Two floors stand beside it: floating-point operations (counted by PyTorch over one step)
over the rate of a large bf16 product on the same GPU, and the bytes of reading and writing the
vocabulary-sized tensors once each over the rate of a large copy. Needs a CUDA device.
"""

import argparse
import datetime
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from decode_cpu import append_rows, commit
from torch.utils.flop_counter import FlopCounterMode

from flashmap.modeling.modeling_flashmap import FlashMapDraftModel
from flashmap.training.documents import Document, pack
from flashmap.training.recipe import Recipe, read_recipe
from flashmap.training.setup import wrap_target
from flashmap.training.trainer import Trainer

RECIPE = Path("training/recipes/smollm2-135m.toml")
LEAST = 250e3
SHAPE: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
    "max_position_embeddings": 2048,
}
PROMPT, ANSWER, DOCUMENTS = 45, 200, 2048


def attention_operations(query: Any, key: Any, *shapes: Any, **options: Any) -> int:
    """Operations of attention forward, for shapes (B, heads, tokens, d); PyTorch's own count
    refuses, before 2.13, keys that heads share."""
    return int(4 * math.prod(query) * key[2])


aten = torch.ops.aten
ATTENTION = {
    aten._scaled_dot_product_cudnn_attention: attention_operations,
    aten._scaled_dot_product_efficient_attention: attention_operations,
    aten._scaled_dot_product_flash_attention: attention_operations,
}


def make_trainer(recipe: Recipe) -> Trainer:
    """A trainer of the recipe's drafter on random weights and documents."""
    device = torch.device("cuda")
    torch.manual_seed(0)
    target = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))
    target = target.to(device, torch.bfloat16).eval().requires_grad_(False)
    config: Any = FlashMapDraftModel.config_class
    fields = dict(recipe.drafter) | {"target_hidden_size": 576, "vocab_size": SHAPE["vocab_size"]}
    drafter = FlashMapDraftModel(config(**fields)).to(device, torch.bfloat16)
    ids = torch.randint(0, SHAPE["vocab_size"], (DOCUMENTS, PROMPT + ANSWER)).tolist()
    documents = [Document(row[:PROMPT], row[PROMPT:], 1.0, False) for row in ids]
    packed = pack(documents, SHAPE["vocab_size"])
    wrapped = wrap_target(target, drafter.config)
    return Trainer(recipe, wrapped, drafter, None, packed, Accelerator())


def count_operations(recipe: Recipe) -> int:
    """Floating-point operations of a step; what is compiled could not be counted."""
    run = replace(recipe.run, compile=False)
    trainer = make_trainer(replace(recipe, run=run))
    with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter:
        trainer.passes(trainer.blocks(0, 0))
    return int(counter.get_total_flops()) * run.num_shards


def rate(work: Callable[[], Any], amount: float, repeats: int = 10) -> float:
    """`amount` a second of `work` on the GPU."""
    work()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(repeats):
        work()
    torch.cuda.synchronize()
    return amount * repeats / (time.perf_counter() - began)


def measure_gpu() -> tuple[float, float]:
    """Operations a second of a bf16 product, and bytes a second of a copy (read plus written)."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    source = torch.randn(2**29, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    return rate(lambda: a @ b, 2 * 8192**3), rate(lambda: target.copy_(source), 4 * 2**29)


def main() -> None:
    """Time the step and its parts, print them beside the floors, write a row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", nargs="?", type=Path, default=RECIPE)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/train_step.csv"))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(0, "train_step needs a CUDA device; skipped\n")
    recipe = read_recipe(args.recipe, [*args.overrides, "run.folder=/tmp/flashmap-train-step"])
    run = recipe.run
    operations = count_operations(recipe)
    trainer = make_trainer(recipe)
    for step in range(5):
        trainer.step(step)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for step in range(args.steps):
        trainer.step(step)
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - began) / args.steps
    slots = run.batch_size * run.blocks * trainer.model.config.block_size
    logits = 2 * slots * SHAPE["vocab_size"]  # bytes in bf16
    # Draft logits written, read, their gradient written, read; the target's written and read.
    moved = 4 * logits + 2 * 2 * run.batch_size * run.max_length * SHAPE["vocab_size"]
    product, copy = measure_gpu()
    row = {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "documents": run.batch_size,
        "blocks": run.blocks,
        "slots_per_second": round(slots / seconds),
        "milliseconds": round(1e3 * seconds, 2),
        "operations": f"{operations:.3e}",
        "operations_floor_milliseconds": round(1e3 * operations / product, 2),
        "bytes_floor_milliseconds": round(1e3 * moved / copy, 2),
        "parameters": sum(weight.numel() for weight in trainer.model.parameters()),
    }
    for name, value in row.items():
        print(f"{name}: {value}")
    append_rows(args.out, [row])
    if slots / seconds < LEAST:
        parser.exit(1, f"{slots / seconds:.0f} slots a second, claimed: at least {LEAST:.0f}\n")


if __name__ == "__main__":
    main()
