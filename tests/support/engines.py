"""vLLM engines on a CPU for tests: built, asked, taken down.

Nothing here imports vLLM before `vllm_cpu.prepare`.
"""

import gc
import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from . import vllm_cpu

HAS_VLLM = importlib.util.find_spec("vllm") is not None
_SETTINGS: dict[str, Any] = {
    "dtype": "float32", "enforce_eager": True, "skip_tokenizer_init": True, "max_model_len": 128,
    "max_num_seqs": 8, "max_num_batched_tokens": 128, "disable_log_stats": False,
    "enable_prefix_caching": False,
}  # fmt: skip


@contextmanager
def engine(pair: Path, draft: dict[str, Any] | None = None, **settings: Any) -> Iterator[Any]:
    """An LLM of the target in `pair`; with `draft`, a speculative configuration whose model is the
    drafter there unless it says otherwise."""
    vllm_cpu.prepare()
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    from flashmap.serving.vllm_plugin.register import register

    register()  # as vLLM does, where the package is not installed but on the path
    if draft is not None:
        settings["speculative_config"] = {"model": str(pair / "draft"), **draft}
    llm = LLM(str(pair / "target"), **{**_SETTINGS, **settings})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def texts(llm: Any, prompts: Sequence[Sequence[int]], **sampling: Any) -> list[list[int]]:
    """What the engine says to each prompt; one of `sampling`'s values may be a list, one a
    prompt."""
    from vllm import SamplingParams

    lists = {name: value for name, value in sampling.items() if isinstance(value, list)}
    common = {"detokenize": False, "ignore_eos": True, **sampling}
    parameters = [
        SamplingParams(**{**common, **{name: value[row] for name, value in lists.items()}})
        for row in range(len(prompts))
    ]
    asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    outputs = llm.generate(asked, parameters, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def metric(llm: Any, name: str) -> int:
    """A counter of the engine's whole life."""
    values = [entry.value for entry in llm.get_metrics() if entry.name == f"vllm:{name}"]
    return int(sum(values))


def acceptance(llm: Any) -> tuple[int, int]:
    """Drafted and accepted tokens of the engine's whole life."""
    names = ("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")
    drafted, accepted = (metric(llm, name) for name in names)
    return drafted, accepted


def speculator(llm: Any) -> Any:
    """The speculator of an engine that runs in this process."""
    core = llm.llm_engine.engine_core.engine_core
    return core.model_executor.driver_worker.worker.model_runner.speculator
