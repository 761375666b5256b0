"""One prompt through the drafter and, for comparison, through the target alone; both timed the same
way.

Seconds are wall clock from the encoded prompt to the last token, the prompt's own forward pass
included on both sides.
"""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Decoded:
    """A finished continuation.

    Attributes:
        token_ids: the new tokens, an end token included.
        acceptance_lengths: tokens committed by each verification pass; empty for plain decoding.
        seconds: wall clock.
        seed: the seed used.
    """

    token_ids: list[int]
    acceptance_lengths: list[int]
    seconds: float
    seed: int

    @property
    def tokens_per_second(self) -> float:
        """Rate of the returned tokens."""
        return len(self.token_ids) / self.seconds

    @property
    def acceptance_length(self) -> float:
        """Mean tokens committed a verification pass; 0.0 if none ran."""
        return sum(self.acceptance_lengths) / max(len(self.acceptance_lengths), 1)


def decode_with_drafter(
    target: Any,
    draft: Any,
    input_ids: "Tensor",
    *,
    max_new_tokens: int,
    temperature: float,
    num_steps: int | None = None,
    seed: int | None = None,
    streamer: Any = None,
    **options: Any,
) -> Decoded:
    """Continue ``input_ids`` (1, P) with FlashMap; ``options`` are further settings of
    `spec_generate`. Raises ValueError for arguments out of range."""
    start = _now(target)
    out = draft.spec_generate(
        target,
        input_ids.to(target.device),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        num_steps=num_steps,
        seed=seed,
        streamer=streamer,
        **options,
    )
    seconds = _now(target) - start
    new_ids = out.sequences[0, input_ids.shape[1] :].tolist()
    return Decoded(new_ids, list(out.acceptance_lengths), seconds, out.seeds[0])


def decode_plainly(
    target: Any, input_ids: "Tensor", *, max_new_tokens: int, temperature: float, seed: int
) -> Decoded:
    """Continue ``input_ids`` (1, P) with ``target.generate`` alone, from the same distribution.

    The target's own generation settings (top-k, penalties) are set aside: FlashMap decodes the bare
    distribution, and only the same work may be compared. Only the ids of special tokens are kept.
    """
    import torch
    from transformers import GenerationConfig

    config_class: Any = GenerationConfig  # untyped in some versions

    own = target.generation_config
    target.generation_config = config_class(
        bos_token_id=own.bos_token_id, eos_token_id=own.eos_token_id, pad_token_id=_pad_id(own)
    )
    sampling = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature > 0 else {}
    ids = input_ids.to(target.device)
    torch.manual_seed(seed % 2**64)  # all that torch's generators take
    try:
        start = _now(target)
        out = target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            do_sample=temperature > 0,
            **sampling,
        )
        seconds = _now(target) - start
    finally:
        target.generation_config = own
    return Decoded(out[0, ids.shape[1] :].tolist(), [], seconds, seed)


def _pad_id(config: Any) -> int | None:
    """generate() warns on every call where no padding token is named, although one prompt needs
    none."""
    if config.pad_token_id is not None:
        return int(config.pad_token_id)
    ends = config.eos_token_id
    first = ends[0] if isinstance(ends, list) and ends else ends
    return first if isinstance(first, int) else None


def _now(target: Any) -> float:
    if target.device.type == "cuda":
        import torch

        torch.cuda.synchronize(target.device)  # kernels run on after the call returns
    return time.perf_counter()
