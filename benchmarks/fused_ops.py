"""What each fused operation, and the drafting step made of them, takes on a GPU.

    python benchmarks/fused_ops.py [--out benchmarks/results/kernels.csv] [--no-compile] [--no-step]

The shapes are those of Qwen3-8B and a drafter for it, with a context of 512, in bfloat16, with
random numbers. Three versions of an operation: Triton, its plain-torch reference, and torch.compile
of that reference. Every time is a replay of a CUDA graph that holds many calls, so that the host's
launches do not count. Beside the time stands the bandwidth, the bytes that the operation cannot
avoid over Triton's time, and its share of what a copy of 1 GiB reaches in the same run. An
operation of a few kilobytes is bound by its start, one of up to some ten megabytes finds them in
the cache.

`error` is the largest error against float32 operations on the same numbers, relative to the largest
number. The step is timed whole: anchors, one draft, logits. Needs a CUDA device.
"""

import argparse
import datetime
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from decode_cpu import append_rows, commit
from torch import Tensor, nn

from flashmap.kernels.fused_flashmap import rope_table
from flashmap.kernels.reference_flashmap import EAGER_OPS, kv_layout
from flashmap.kernels.sampling import (
    sample_tokens,
    scatter_rows,
    triton_sample_tokens,
    triton_scatter_rows,
)
from flashmap.kernels.select_flashmap import TRITON_OPS
from flashmap.modeling.modeling_flashmap import FlashMapDraftModel
from flashmap.modeling.step_flashmap import ContextRows, DenseContext, FusedStep

DEVICE = "cuda"
CONTEXT, DRAFT_VOCAB, VERIFIED = 512, 32768, 17
SHAPE: dict[str, Any] = {"target_layer_ids": [1, 9, 17, 25, 33]}  # all else: the configuration's
BATCHES = (1, 8)
_INCOMPARABLE = (
    "write_context", "scatter_rows", "sample_tokens", "quantize_rows", "linears", "rotate_into"
)  # fmt: skip


class Case(NamedTuple):
    """One operation on one shape: its versions, arguments, and bytes it has to move."""

    name: str
    shape: str
    triton: Callable[..., Any]
    eager: Callable[..., Any]
    arguments: tuple[Any, ...]
    num_bytes: int


def microseconds(call: Callable[[], Any]) -> float:
    """Time of one call inside a CUDA graph."""
    from triton.testing import do_bench_cudagraph

    return float(do_bench_cudagraph(call, rep=30)) * 1e3


def copy_rate() -> float:
    """GB/s that a copy of 1 GiB reads and writes, outside of a graph: inside one, copies run at two
    thirds of it."""
    from triton.testing import do_bench

    source = torch.empty(2**30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.numel() / float(do_bench(lambda: target.copy_(source))) / 1e6


def numbers(*shape: int) -> Tensor:
    """Random bfloat16 numbers."""
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)


def size(*tensors: Tensor) -> int:
    """Bytes of some tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def operation_cases(config: Any, batch: int) -> Iterator[Case]:
    """Every operation of the step, for the blocks of `batch` sequences."""
    slots, width, heads = config.block_size, config.hidden_size, config.num_attention_heads
    head, target, layers = config.head_size, config.target_hidden_size, config.num_hidden_layers
    rows = batch * slots

    def case(name: str, *arguments: Any, num_bytes: int) -> Case:
        return Case(name, f"batch {batch}", TRITON_OPS[name], EAGER_OPS[name], arguments, num_bytes)

    rope = rope_table(torch.arange(CONTEXT + slots + 1, device=DEVICE), head, config.rope_theta)
    x, branch, row = numbers(rows, width), numbers(rows, width), numbers(width)
    places = torch.arange(slots, device=DEVICE).repeat(batch)
    yield case("rms_norm", x, row, 1e-6, num_bytes=2 * size(x))
    noise, base = numbers(rows, target), numbers(1, target)
    yield case("gated_norm", noise, base[0], 1e-6, row[:1], base, num_bytes=2 * size(noise))
    yield case("adaln", x, row, row, 1e-6, num_bytes=2 * size(x))
    yield case("gated_adaln", x, branch, row, row, row, 1e-6, num_bytes=4 * size(x))
    query, norm = numbers(rows, heads, head), numbers(head)
    yield case("norm_rope", query, norm, 1e-5, rope, places, num_bytes=2 * size(query))
    qkv = numbers(batch, slots, 3, heads, head)
    yield case("block_attention", qkv, norm, norm, 1e-5, rope, places, num_bytes=size(qkv) * 4 // 3)
    blocks, lengths = query.view(batch, slots, heads, head), torch.full((batch,), CONTEXT - 1)
    kv = numbers(2, batch, heads, CONTEXT, head)
    yield case(
        "context_attention", blocks, *kv, lengths.to(DEVICE), num_bytes=size(kv, blocks, blocks)
    )
    new, cache = (
        numbers(batch * VERIFIED, layers, 2, heads, head),
        numbers(2 * layers, *kv.shape[1:]),
    )
    views = [layer.transpose(1, 2) for layer in cache]
    layout = kv_layout(views[:layers], views[layers:])
    at = torch.arange(len(new), device=DEVICE)
    weight = numbers(layers, head)
    yield case("write_context", new, at, at, weight, 1e-5, rope, layout, num_bytes=2 * size(new))
    seeds = torch.arange(batch, device=DEVICE)
    drawn = (seeds, places.view(batch, slots), target, 1, torch.bfloat16)
    yield case("block_noise", *drawn, num_bytes=rows * target * 2)
    yield case("quantize_rows", x, num_bytes=size(x) * 3 // 2)


def pass_cases(batch: int) -> Iterator[Case]:
    """What a layer of a Qwen3-8B makes of a block and its anchor."""
    width, wide, heads, shared, dim = 4096, 12288, 32, 8, 128

    def case(name: str, *arguments: Any, num_bytes: int) -> Case:
        return Case(name, f"batch {batch}", TRITON_OPS[name], EAGER_OPS[name], arguments, num_bytes)

    x, narrow = numbers(batch, VERIFIED, width), numbers(wide, width)
    widths = [heads * dim, shared * dim, shared * dim]
    weights = numbers(sum(widths), width).split(widths)
    yield case("linears", x, weights, [None] * 3, num_bytes=size(*weights))
    y = numbers(batch, VERIFIED, wide)
    yield case("add_linear", x, y, narrow.view(width, wide), None, num_bytes=size(narrow))
    yield case("gated_linear", x, narrow, narrow + 1, num_bytes=2 * size(narrow))
    qkv = numbers(batch, VERIFIED, sum(widths))
    angles = numbers(2, batch, VERIFIED, dim).unbind()
    norms, caches = [numbers(dim), numbers(dim)], numbers(2, batch, shared, 2 * CONTEXT, dim)
    places = torch.arange(VERIFIED, device=DEVICE).expand(batch, -1).contiguous()
    parts = qkv.split(widths, dim=-1)
    yield case("rotate_into", parts, norms, 1e-6, angles, places, *caches, num_bytes=2 * size(qkv))


def sampling_cases(config: Any, batch: int) -> Iterator[Case]:
    """What serving engines need besides, over a draft vocabulary."""
    rows = batch * config.block_size
    logits, tokens = numbers(rows, DRAFT_VOCAB), torch.arange(DRAFT_VOCAB, device=DEVICE) * 2
    at, warm = torch.arange(rows, device=DEVICE), torch.ones(rows, device=DEVICE)
    shape = f"batch {batch}, {DRAFT_VOCAB} tokens"
    arguments: tuple[Any, ...] = (logits, warm, at, at, tokens)
    yield Case(
        "sample_tokens", shape, triton_sample_tokens, sample_tokens, arguments, size(logits, tokens)
    )
    out = numbers(batch, config.block_size, config.vocab_size)
    arguments = (logits, at // config.block_size, at % config.block_size, tokens, out)
    yield Case(
        "scatter_rows", shape, triton_scatter_rows, scatter_rows, arguments, 2 * size(logits)
    )


def relative_error(case: Case) -> float | None:
    """Triton's largest error against the reference in float32; None where nothing comparable is
    returned."""
    if case.name in _INCOMPARABLE:
        return None

    def widened(value: Any) -> Any:
        half = isinstance(value, Tensor) and value.dtype == torch.bfloat16
        return value.float() if half else value

    found, exact = case.triton(*case.arguments), case.eager(*map(widened, case.arguments))
    if isinstance(found, tuple):
        found, exact = found[-1], exact[-1]
    return float((found.float() - exact.float()).abs().max() / exact.float().abs().max())


def measure(case: Case, compiled: bool, copy: float) -> dict[str, Any]:
    """One row of the table."""
    times = {
        version: microseconds(lambda f=function: f(*case.arguments))  # type: ignore[misc]
        for version, function in (("triton", case.triton), ("eager", case.eager))
    }
    if compiled:
        torch.compiler.reset()
        function = torch.compile(case.eager, dynamic=False)
        times["compiled"] = microseconds(lambda: function(*case.arguments))
    rate = case.num_bytes / times["triton"] / 1e3
    return row(case.name, case.shape, times, rate, rate / copy, relative_error(case))


def row(
    name: str, shape: str, times: dict[str, float], rate: float, share: float, error: float | None
) -> dict[str, Any]:
    """The columns of the table, printed too."""
    columns = {
        "operation": name,
        "shape": shape,
        **{f"{key}_us": _number(times.get(key), 2) for key in ("triton", "eager", "compiled")},
        "gb_per_s": _number(rate, 0),
        "of_copy": _number(share, 3),
        "error": "" if error is None else f"{error:.1e}",
    }
    print(
        "  ".join(
            f"{value:>10}" if key != "operation" else f"{value:<18}"
            for key, value in columns.items()
        )
    )
    return columns


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


class Steps:
    """A drafter of random weights beside the target's embedding and head, and steps of it."""

    def __init__(self, config: Any) -> None:
        self.config = config
        torch.manual_seed(0)
        with torch.device(DEVICE):
            self.model = FlashMapDraftModel(config).to(torch.bfloat16).eval()
            self.head = nn.Linear(config.target_hidden_size, config.vocab_size, bias=False)
        self.head = self.head.to(torch.bfloat16)
        self.embedding = numbers(config.vocab_size, config.target_hidden_size) * 0.02

    def draft(self, batch: int, **options: Any) -> tuple[Callable[[], Tensor], int]:
        """A call of a step with these options, and the bytes of weights and context that one jump
        reads."""
        room = CONTEXT + self.config.block_size + 1
        step = FusedStep(self.model, self.embedding, self.head, room, **options)
        lengths = torch.full((batch,), CONTEXT - 1, device=DEVICE)
        context = DenseContext(step, self.model.new_cache(batch, room).kv, lengths)
        slots = context.slots(lengths.unsqueeze(1)).flatten()
        anchors = ContextRows(self.embedding[:batch], lengths, slots)
        features = numbers(batch * VERIFIED, self.model.fc.in_features)
        places = lengths.unsqueeze(1) - torch.arange(VERIFIED, device=DEVICE) - 1
        new = ContextRows(features, places.flatten(), context.slots(places).flatten())
        seeds = torch.arange(batch, device=DEVICE)

        def call() -> Tensor:
            step.write(context, new, anchors)
            return step.logits(step.hidden(context, lengths, seeds=seeds))

        weights = [one for one in vars(step).values() if hasattr(one, "weight")]
        weights += [one for layer in step.layers for one in layer if hasattr(one, "weight")]
        read = {id(one.weight): size(one.weight) for one in weights}
        factor = self.model.target_constants(self.embedding)[1]
        cache = 2 * self.config.num_hidden_layers * batch * CONTEXT * self.config.hidden_size * 2
        return call, sum(read.values()) + size(factor) + cache

    def rows(self, copy: float) -> Iterator[dict[str, Any]]:
        """The step in the forms it is served in."""
        tokens = torch.arange(DRAFT_VOCAB, device=DEVICE) * 2
        forms: list[tuple[str, dict[str, Any]]] = [
            ("", {}),
            (f", {DRAFT_VOCAB} tokens", {"token_ids": tokens}),
            (", two jumps", {"num_steps": 2}),
            (f", {DRAFT_VOCAB} tokens, fp8", {"token_ids": tokens, "fp8_weights": True}),
        ]
        for batch in BATCHES:
            for label, options in forms if batch == 1 else forms[:1]:
                times, num_bytes = {}, 0
                for kernels in ("triton", "eager"):
                    call, num_bytes = self.draft(batch, kernels=kernels, **options)
                    times[kernels] = microseconds(call)
                num_bytes *= int(options.get("num_steps", 1) == 1)  # several read the embedding too
                rate = num_bytes / times["triton"] / 1e3
                yield row("step", f"batch {batch}{label}", times, rate, rate / copy, None)


def main() -> None:
    """Measure, print, append to the CSV file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="CSV file to append to")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--no-step", action="store_true", help="operations only")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/fused_ops.py needs a CUDA device, and torch sees none.")
    import triton

    config = FlashMapDraftModel.config_class(**SHAPE)  # type: ignore[misc]
    copy = copy_rate()
    print(f"{torch.cuda.get_device_name()}: a copy of 1 GiB moves {copy:.0f} GB/s")
    rows = []
    with torch.no_grad():
        for batch in BATCHES:
            for case in (
                *operation_cases(config, batch), *pass_cases(batch), *sampling_cases(config, batch)
            ):  # fmt: skip
                rows.append(measure(case, batch == 1 and not args.no_compile, copy))
        if not args.no_step:
            rows += Steps(config).rows(copy)
    machine = {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "copy_gb_per_s": f"{copy:.0f}",
    }
    if args.out is not None:
        append_rows(args.out, [{**machine, **one} for one in rows])


if __name__ == "__main__":
    main()
