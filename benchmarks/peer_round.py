"""A round of the published flashmap 0.1.0, in an interpreter that has it; `round_latency.py --peer`
runs this. It prints one JSON object.

    PYTHON benchmarks/peer_round.py '{"target": {}, "drafter": {}, "context": 128, "rounds": 32}'

Nothing here imports this project, whose import name is the same: `round_latency.py` takes from here
what both need.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SHORT = 4  # tokens of the run that is subtracted: prompt, first token, what starts once


def random_target(fields: dict[str, Any]) -> Any:
    """A bfloat16 target of random weights on the GPU, of these fields of a configuration."""
    torch.manual_seed(0)
    fields = {**fields, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = AutoConfig.for_model(**fields)
    with torch.device("cuda"):
        target = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return target.eval()


def random_drafter(cls: Any, fields: dict[str, Any]) -> Any:
    """A bfloat16 drafter of random weights on the GPU."""
    torch.manual_seed(1)
    with torch.device("cuda"):
        drafter = cls(cls.config_class(**fields))
    return drafter.to(torch.bfloat16).eval()


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds until the GPU is done, and the result."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    result = call()
    torch.cuda.synchronize()
    return time.perf_counter() - began, result


def time_rounds(generate: Callable[[int], Any], num_rounds: int) -> dict[str, float]:
    """Milliseconds a round, tokens a round and sequence, and seconds that the first call took more
    than the second, of `generate(max_new_tokens)`: a long run less a short one."""
    first, _ = timed(lambda: generate(SHORT))
    again, short = timed(lambda: generate(SHORT))
    generate(SHORT + num_rounds)  # may move into caches of another size
    whole, long = timed(lambda: generate(SHORT + num_rounds))
    return {
        "round_ms": (whole - again) / (_rounds(long) - _rounds(short)) * 1e3,
        "tokens_per_round": long.acceptance_length,
        "first_call_s": first - again,
    }


def _rounds(output: Any) -> int:
    """Passes of the target, those of the longest sequence."""
    lengths = output.acceptance_lengths
    return max(map(len, lengths)) if lengths and isinstance(lengths[0], list) else len(lengths)


def main() -> None:
    """Build the pair, time it, print."""
    from flashmap import FlashMapDraftModel

    asked = json.loads(sys.argv[1])
    target = random_target(asked["target"])
    drafter = random_drafter(FlashMapDraftModel, asked["drafter"])
    ids = torch.randint(0, target.config.vocab_size, (1, asked["context"]), device="cuda")

    def generate(num_tokens: int) -> Any:
        return drafter.spec_generate(target, ids, max_new_tokens=num_tokens, stop_token_ids=[])

    print(json.dumps(time_rounds(generate, asked["rounds"])))


if __name__ == "__main__":
    main()
