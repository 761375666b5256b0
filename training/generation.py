"""Answers of the target to many prompts at once: a drafter must predict what the target says.

The target runs as transformers gives it, with a static cache and prompts padded on the left, so
that every step has the same shape. On a GPU the step is captured in a CUDA graph: launching its
kernels one by one would take longer than running them.

Legend: B prompts, P padded prompt length, T positions of the cache, V vocabulary.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, StaticCache

from .attention import GROUPED, attention, is_plain

CHECK_EVERY = 16  # steps between looks whether every prompt is answered
WARM_UP_STEPS = 3


class Decoder(Protocol):
    """Answers many prompts."""

    batch_size: int
    max_prompt: int

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        temperatures: Sequence[float],
        seed: int,
        min_p: float = 0.0,
        max_new: int | None = None,
    ) -> list[list[int]]:
        """See `BatchDecoder.run`."""


def make_decoder(
    target: PreTrainedModel, batch_size: int, max_prompt: int, max_new: int
) -> Decoder:
    """The fastest decoder for this kind of target."""
    kind = BatchDecoder if is_plain(target) else GenerateDecoder
    return kind(target, batch_size, max_prompt, max_new)


def end_tokens(target: PreTrainedModel) -> list[int]:
    """The tokens that end the target's answers. Raises ValueError if it names none."""
    stops: Any = getattr(target.generation_config, "eos_token_id", None)
    if stops is None:
        raise ValueError(
            "The target's generation configuration names no end token (eos_token_id): without one"
            " no answer ends."
        )
    return [stops] if isinstance(stops, int) else list(stops)


class GenerateDecoder:
    """The same by transformers' `generate`, for targets with windows, recurrent layers and so
    on; slower."""

    def __init__(
        self, target: PreTrainedModel, batch_size: int, max_prompt: int, max_new: int
    ) -> None:
        self.target, self.batch_size = target, batch_size
        self.max_prompt, self.max_new = max_prompt, max_new
        self.stops = end_tokens(target)

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        temperatures: Sequence[float],
        seed: int,
        min_p: float = 0.0,
        max_new: int | None = None,
    ) -> list[list[int]]:
        """See `BatchDecoder.run`."""
        torch.manual_seed(seed)
        answers: list[list[int]] = [[] for _ in prompts]
        for temperature in sorted(set(temperatures)):
            rows = [row for row, one in enumerate(temperatures) if one == temperature]
            width = max(len(prompts[row]) for row in rows)
            padded = torch.zeros(len(rows), width, dtype=torch.long)
            visible = torch.zeros_like(padded)
            for place, row in enumerate(rows):
                padded[place, width - len(prompts[row]) :] = torch.tensor(prompts[row])
                visible[place, width - len(prompts[row]) :] = 1
            with self._bare():
                out: Any = self.target.generate(  # type: ignore[operator]
                    padded.to(self.target.device),
                    attention_mask=visible.to(self.target.device),
                    generation_config=self._settings(temperature, min_p, max_new),
                )
            for row, tokens in zip(rows, out[:, width:].cpu().tolist(), strict=True):
                answers[row] = _until_stop(tokens, set(self.stops))
        return answers

    @contextmanager
    def _bare(self) -> Iterator[None]:
        """Set the target's own settings (penalties, top-k) aside: `generate` would fill ours up
        with them, and speculative decoding has none."""
        own: Any = self.target.generation_config
        config: Any = GenerationConfig  # untyped in some versions
        self.target.generation_config = config()
        try:
            yield
        finally:
            self.target.generation_config = own

    def _settings(self, temperature: float, min_p: float, max_new: int | None) -> GenerationConfig:
        sampling = {"temperature": temperature, "top_k": 0, "top_p": 1.0, "min_p": min_p or None}
        config: Any = GenerationConfig
        settings: GenerationConfig = config(
            max_new_tokens=min(max_new or self.max_new, self.max_new),
            do_sample=temperature > 0.0,
            eos_token_id=self.stops,
            pad_token_id=self.stops[0],
            **(sampling if temperature > 0.0 else {}),
        )
        return settings


class BatchDecoder:
    """Answers up to `batch_size` prompts of up to `max_prompt` tokens at once.

    For targets whose layers all attend to every position before their own; see `make_decoder`.
    """

    def __init__(
        self, target: PreTrainedModel, batch_size: int, max_prompt: int, max_new: int
    ) -> None:
        self.target, self.batch_size = target, batch_size
        self.max_prompt, self.max_new = max_prompt, max_new
        device = target.device
        self.stops = torch.tensor(end_tokens(target), device=device)
        length = max_prompt + max_new
        self.cache = StaticCache(config=target.config, max_cache_len=length)
        self.visible = torch.zeros(batch_size, 1, 1, length, dtype=torch.bool, device=device)
        self.ids = torch.zeros(batch_size, 1, dtype=torch.long, device=device)
        self.positions = torch.zeros_like(self.ids)
        self.place = torch.zeros(1, dtype=torch.long, device=device)
        self.temperature = torch.zeros(batch_size, 1, device=device)
        self.done = torch.zeros(batch_size, dtype=torch.bool, device=device)
        self.floor = torch.zeros(batch_size, 1, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        names = inspect.signature(target.forward).parameters
        self.takes_place = "cache_position" in names or "cache_position" in _inner_names(target)
        self.cache_name = "past_key_values" if "past_key_values" in names else "cache"

    @torch.inference_mode(False)
    @torch.no_grad()
    def run(
        self,
        prompts: Sequence[Sequence[int]],
        temperatures: Sequence[float],
        seed: int,
        min_p: float = 0.0,
        max_new: int | None = None,
    ) -> list[list[int]]:
        """Answers to at most a batch of prompts, each ended by an end token or after `max_new`.

        Args:
            prompts: token ids, each 1 to `max_prompt` of them.
            temperatures: one a prompt; 0 decodes greedily.
            seed: of the sampled tokens.
            min_p: tokens less likely than this share of the likeliest are never sampled.
            max_new: fewer tokens than the decoder was made for.
        """
        torch.manual_seed(seed)
        limit = min(max_new or self.max_new, self.max_new)
        device, count = self.ids.device, len(prompts)
        padded = torch.zeros(self.batch_size, self.max_prompt, dtype=torch.long)
        starts = torch.full((self.batch_size,), self.max_prompt - 1)
        for row, prompt in enumerate(prompts):
            starts[row] = self.max_prompt - len(prompt)
            padded[row, starts[row] :] = torch.tensor(prompt)
        self.temperature.zero_()
        self.temperature[:count, 0] = torch.tensor(temperatures, device=device)
        self.floor.fill_(min_p).log_()
        self.done.fill_(False)
        self.done[count:] = True
        answers = torch.zeros(limit, self.batch_size, dtype=torch.long, device=device)
        with attention(self.target, GROUPED):
            self._prefill(padded.to(device), starts.to(device))
            answers[0] = self.ids[:, 0]
            for step in range(1, limit):
                if step % CHECK_EVERY == 0 and bool(self.done.all()):
                    break
                self._step()
                answers[step] = self.ids[:, 0]
        stops = set(self.stops.tolist())
        return [_until_stop(row, stops) for row in answers[:, :count].T.cpu().tolist()]

    def _prefill(self, padded: Tensor, starts: Tensor) -> None:
        """Run the prompts and choose each answer's first token."""
        places = torch.arange(self.max_prompt, device=padded.device)
        self.cache.reset()
        self.visible.fill_(False)
        self.visible[:, 0, 0, : self.max_prompt] = places >= starts[:, None]
        causal = places[:, None] >= places
        mask = F.pad(self.visible[..., : self.max_prompt] & causal, (0, self.max_new), value=False)
        mask = mask | (torch.eye(self.max_prompt, mask.shape[-1], device=mask.device) > 0)
        positions = (places - starts[:, None]).clamp(min=0)
        self._choose(self._forward(padded, positions, mask, places))
        self.positions.copy_(self.max_prompt - starts[:, None])
        self.place.fill_(self.max_prompt)

    def _step(self) -> None:
        if not self.ids.is_cuda:
            self._decode()
            return
        if self.graph is None:
            self._capture()
        assert self.graph is not None
        self.graph.replay()

    def _capture(self) -> None:
        """Record a step; what the trial steps changed is put back."""
        state = [self.ids, self.positions, self.place, self.visible, self.done]
        state += [tensor for layer in self.cache.layers for tensor in _counters(layer)]
        saved = [tensor.clone() for tensor in state]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP_STEPS):
                self._decode()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        for tensor, value in zip(state, saved, strict=True):
            tensor.copy_(value)
        with torch.cuda.graph(self.graph):
            self._decode()

    def _decode(self) -> None:
        """One token for every prompt; nothing here leaves the device."""
        self.visible.index_fill_(3, self.place, True)
        logits = self._forward(self.ids, self.positions, self.visible, self.place)
        self.positions += 1
        self.place += 1
        self._choose(logits)

    def _choose(self, logits: Tensor) -> None:
        """Sample by Gumbel's trick: the largest of logits / temperature + noise."""
        scores = logits[:, -1].float()
        cold = self.temperature == 0.0
        scaled = scores / torch.where(cold, 1.0, self.temperature)
        likely = scaled >= scaled.amax(dim=-1, keepdim=True) + self.floor
        noise = -torch.log(torch.empty_like(scaled).exponential_().clamp(min=1e-30))
        sampled = torch.where(likely, scaled + noise, float("-inf"))
        self.ids.copy_(torch.where(cold, scores, sampled).argmax(dim=-1, keepdim=True))
        self.done |= (self.ids == self.stops).any(dim=-1)

    def _forward(self, ids: Tensor, positions: Tensor, mask: Tensor, places: Tensor) -> Tensor:
        extra: dict[str, Any] = {"cache_position": places} if self.takes_place else {}
        out = self.target(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{self.cache_name: self.cache},
            **extra,
        )
        logits: Tensor = out.logits
        return logits


def _counters(layer: Any) -> list[Tensor]:
    counter = getattr(layer, "cumulative_length", None)
    return [counter] if isinstance(counter, Tensor) else []


def _inner_names(target: PreTrainedModel) -> Sequence[str]:
    decoder = target.get_decoder() if hasattr(target, "get_decoder") else None
    return list(inspect.signature(decoder.forward).parameters) if decoder is not None else []


def _until_stop(tokens: list[int], stops: set[int]) -> list[int]:
    end = next((place for place, token in enumerate(tokens) if token in stops), None)
    return tokens if end is None else tokens[: end + 1]
