"""sglang engines on a CPU for tests: built, asked, taken down."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from . import sglang_cpu

PROMPTS = [[3, 9, 30], [5], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]]
LENGTH = 9  # interpreted kernels are slow
_SETTINGS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "attention_backend": "triton",
    "sampling_backend": "pytorch", "grammar_backend": "none", "skip_tokenizer_init": True,
    "disable_cuda_graph": True, "mem_fraction_static": 0.05, "max_running_requests": 16,
    "max_total_tokens": 4096, "context_length": 128, "log_level": "error", "random_seed": 7,
}  # fmt: skip
_ON_GPU: dict[str, Any] = {
    "device": "cuda", "dtype": "bfloat16", "mem_fraction_static": 0.4, "disable_cuda_graph": False,
    "disable_prefill_cuda_graph": True, "cuda_graph_bs_decode": [1, 2, 4, 8],
}  # fmt: skip


@contextmanager
def engine(pair: Path, draft: bool = False, **settings: Any) -> Iterator[Any]:
    """An engine of the target in `pair`; with `draft`, it drafts with the drafter there."""
    import torch

    sglang_cpu.prepare()
    import sglang

    if draft:
        settings = {
            "speculative_algorithm": "DSPARK",
            "speculative_draft_model_path": str(pair / "draft"),
            "speculative_draft_attention_backend": "triton",
            **settings,
        }
    base = _SETTINGS | (_ON_GPU if torch.cuda.is_available() else {})
    kept = os.environ.get("PYTHONPATH")
    with TemporaryDirectory() as folder:
        os.environ["PYTHONPATH"] = sglang_cpu.boot(Path(folder))
        try:
            llm = sglang.Engine(**{"model_path": str(pair / "target"), **base, **settings})
        finally:
            os.environ.pop("PYTHONPATH")
            if kept is not None:
                os.environ["PYTHONPATH"] = kept
        try:
            yield llm
        finally:
            llm.shutdown()


def ask(llm: Any, prompts: Sequence[Sequence[int]], **sampling: Any) -> list[dict[str, Any]]:
    """Sglang's answer to each prompt; one of `sampling`'s values may be a list, one a prompt."""
    lists = {name: value for name, value in sampling.items() if isinstance(value, list)}
    common = {"ignore_eos": True, **sampling}
    parameters = [
        {**common, **{name: value[row] for name, value in lists.items()}}
        for row in range(len(prompts))
    ]
    answers: list[dict[str, Any]] = llm.generate(
        input_ids=[list(prompt) for prompt in prompts], sampling_params=parameters
    )
    return answers


def texts(llm: Any, prompts: Sequence[Sequence[int]], **sampling: Any) -> list[list[int]]:
    """The tokens of each answer."""
    return [list(answer["output_ids"]) for answer in ask(llm, prompts, **sampling)]


def acceptance(answers: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """Drafted and accepted tokens of these answers."""
    metas = [answer["meta_info"] for answer in answers]
    drafted = sum(meta["spec_num_proposed_drafts"] for meta in metas)
    return drafted, sum(meta["spec_num_correct_drafts"] for meta in metas)
