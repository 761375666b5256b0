"""How well a drafter does on prompts that it never saw: acceptance lengths by slot, domain,
temperature, jumps and draws.

Two ways of counting. The walk replays the rounds along texts that the target wrote, all prompts at
once, and covers every setting. The loop decodes the prompts with `spec_generate`, in batches: what
users run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from flashmap.loops import ends_in_loop
from flashmap.modeling.modeling_flashmap import FlashMapDraftModel
from flashmap.prompts import ALL, Prompt, encode_many, pad_left

from .blocks import Target
from .documents import Document, pack
from .generation import end_tokens, make_decoder
from .recipe import EvaluationRecipe
from .walk import mean_length, slot_rates, walk

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BATCH_SIZE = 128
LOOP_BATCH = 14
Progress = Callable[[str, int, int], None]  # stage, done, of how many


@dataclass(frozen=True)
class Text:
    """An answer of the target to a prompt of some domain, a few tokens longer than what counts."""

    domain: str
    prompt: list[int]
    answer: list[int]
    looped: bool


def write_texts(
    target: Target,
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Sequence[Prompt],
    recipe: EvaluationRecipe,
    block_size: int,
    temperature: float,
    seed: int,
    progress: Progress,
) -> list[Text]:
    """The target's answers to `prompts`; several to each above temperature 0."""
    encoded = encode_many(tokenizer, [prompt.text for prompt in prompts])
    samples = recipe.samples if temperature > 0.0 else 1
    asked = [(prompt.domain, ids) for prompt, ids in zip(prompts, encoded, strict=True)] * samples
    size = min(BATCH_SIZE, len(asked))
    decoder = make_decoder(
        target.model, size, max(map(len, encoded)), recipe.max_new_tokens + block_size + 1
    )
    stops = end_tokens(target.model)
    texts = []
    for start in range(0, len(asked), size):
        part = asked[start : start + size]
        answers = decoder.run([ids for _, ids in part], [temperature] * len(part), seed + start)
        for (domain, ids), answer in zip(part, answers, strict=True):
            looped = ends_in_loop(answer[: recipe.max_new_tokens], stops)
            texts.append(Text(domain, ids, answer, looped))
        progress(f"texts at temperature {temperature:g}", start + len(part), len(asked))
    return texts


def walk_texts(
    drafter: FlashMapDraftModel,
    target: Target,
    texts: Sequence[Text],
    recipe: EvaluationRecipe,
    temperature: float,
    seed: int = 0,
    progress: Progress = lambda stage, done, total: None,
) -> list[dict[str, Any]]:
    """A row for every number of jumps and of draws, see `summary`, along texts that the target
    wrote at `temperature`."""
    config, rows = drafter.config, []
    documents = pack(
        [Document(text.prompt, text.answer, temperature, True) for text in texts], config.vocab_size
    )
    settings = list(product(recipe.num_steps, recipe.num_draws))
    for number, (steps, draws) in enumerate(settings):
        found = walk(
            drafter,
            target,
            documents,
            temperature=temperature,
            num_steps=steps,
            num_draws=draws,
            seed=seed,
            max_new_tokens=recipe.max_new_tokens,
        )
        row = {"temperature": temperature, "num_steps": steps, "num_draws": draws}
        rows.append(row | summary(texts, found.lengths, config.block_size))
        progress(f"walks at temperature {temperature:g}", number + 1, len(settings))
    return rows


def evaluate_walks(
    drafter: FlashMapDraftModel,
    target: Target,
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Sequence[Prompt],
    recipe: EvaluationRecipe,
    seed: int = 0,
    progress: Progress = lambda stage, done, total: None,
) -> list[dict[str, Any]]:
    """A row for every temperature, number of jumps and number of draws, see `summary`."""
    rows = []
    for temperature in recipe.temperatures:
        texts = write_texts(
            target,
            tokenizer,
            prompts,
            recipe,
            drafter.config.block_size,
            temperature,
            seed,
            progress,
        )
        rows += walk_texts(drafter, target, texts, recipe, temperature, seed, progress)
    return rows


def evaluate_loop(
    drafter: FlashMapDraftModel,
    target: Target,
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Sequence[Prompt],
    recipe: EvaluationRecipe,
    seed: int = 0,
    progress: Progress = lambda stage, done, total: None,
) -> list[dict[str, Any]]:
    """A row for every temperature, number of jumps and of draws, measured with `spec_generate`."""
    stops = end_tokens(target.model)
    rows = []
    for temperature in recipe.temperatures:
        for steps, draws in product(recipe.num_steps, recipe.num_draws):
            texts: list[Text] = []
            lengths: list[list[int]] = []
            for start in range(0, len(prompts), LOOP_BATCH):
                part = prompts[start : start + LOOP_BATCH]
                encoded = encode_many(tokenizer, [prompt.text for prompt in part])
                ids, mask = pad_left(encoded, target.embedding.device)
                out = drafter.spec_generate(
                    target.model,
                    ids,
                    max_new_tokens=recipe.max_new_tokens,
                    temperature=temperature,
                    num_steps=steps,
                    num_draws=draws,
                    attention_mask=mask,
                    seed=[seed + start + row for row in range(len(part))],
                )
                single = len(part) == 1
                counts = [out.num_new_tokens] if single else out.num_new_tokens
                lengths += [out.acceptance_lengths] if single else out.acceptance_lengths
                width = ids.shape[1]
                for prompt, tokens, row, count in zip(
                    part, encoded, out.sequences.tolist(), counts, strict=True
                ):
                    answer = row[width : width + count]
                    looped = ends_in_loop(answer, stops)
                    texts.append(Text(prompt.domain, tokens, answer, looped))
                progress(f"loop at temperature {temperature:g}", start + len(part), len(prompts))
            row = {"temperature": temperature, "num_steps": steps, "num_draws": draws}
            rows.append(row | summary(texts, lengths, drafter.config.block_size))
    return rows


def summary(texts: Sequence[Text], lengths: list[list[int]], block_size: int) -> dict[str, Any]:
    """What is reported of some texts and the rounds along them.

    `acceptance_length` is tokens a pass of the target, over all texts; looping ones are left out of
    `acceptance_length_without_looped` and of `slots`, the acceptance of each slot where it was
    reached.
    """

    def row(domain: str) -> dict[str, Any]:
        chosen = [
            (text, rounds)
            for text, rounds in zip(texts, lengths, strict=True)
            if domain in (ALL, text.domain)
        ]
        straight = [rounds for text, rounds in chosen if not text.looped]
        return {
            "domain": domain,
            "texts": len(chosen),
            "looped": len(chosen) - len(straight),
            "rounds": sum(len(rounds) for _, rounds in chosen),
            "acceptance_length": mean_length([rounds for _, rounds in chosen]),
            "acceptance_length_without_looped": mean_length(straight),
            "slots": slot_rates(straight, block_size),
        }

    domains = list(dict.fromkeys(text.domain for text in texts))
    return {"domains": [row(domain) for domain in domains], "overall": row(ALL)}
