"""Tiny runs of the trainer: recipes, documents, targets, and how their folders are read."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import Tensor

from flashmap import FlashMapDraftModel
from flashmap.training.documents import Document, Documents, pack
from flashmap.training.recipe import DataRecipe, LossRecipe, Recipe, RunRecipe
from flashmap.training.setup import wrap_target
from flashmap.training.trainer import Trainer

from . import toys

CPU = torch.device("cpu")
RUN: dict[str, Any] = {
    "steps": 12,
    "batch_size": 4,
    "blocks": 3,
    "max_length": 20,
    "rate": 3e-3,
    "warm_up": 0.0,
    "dtype": "float32",
    "log_every": 1,
    "evaluate_every": 1000,
    "save_every": 1e9,
    "average": 0.9,
}


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute in one thread: on so small tensors, more of them only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def make_recipe(folder: Path, loss: dict[str, Any] | None = None, **run: Any) -> Recipe:
    """A recipe of few, small steps that keeps its run in `folder`."""
    return Recipe(
        target="toy",
        data=DataRecipe(folder=str(folder / "data")),
        loss=LossRecipe(**(loss or {})),
        run=RunRecipe(**{**RUN, "folder": str(folder), **run}),
    )


def random_documents(count: int = 22, held_out: int = 4, vocab: int = toys.VOCAB) -> Documents:
    """Documents of random tokens and of several lengths; the first `held_out` are greedy ones."""
    generator = torch.Generator().manual_seed(0)

    def tokens(number: int) -> list[int]:
        found: list[int] = torch.randint(0, vocab, (number,), generator=generator).tolist()
        return found

    rows = [
        Document(tokens(2 + index % 4), tokens(5 + index % 9), float(index % 2), index < held_out)
        for index in range(count)
    ]
    rows = [Document(row.prompt, row.answer, 0.0, True) if row.held_out else row for row in rows]
    return pack(rows, vocab)


def make_trainer(
    recipe: Recipe,
    model: FlashMapDraftModel | None = None,
    documents: Documents | None = None,
    target: Any = None,
    said: list[str] | None = None,
) -> Trainer:
    """A trainer on the CPU, with models made anew as a new process would."""
    model = model or toys.drafter(1)
    distils = recipe.loss.objective == "distillation"
    teacher = toys.drafter(2).requires_grad_(False) if distils else None
    return Trainer(
        recipe,
        wrap_target((target or toys.llama()).requires_grad_(False), model.config),
        model,
        teacher,
        documents or random_documents(),
        Accelerator(cpu=True),
        (said if said is not None else []).append,
    )


def steps_of(folder: Path) -> list[int]:
    """Steps of the checkpoints in a run's folder, in order."""
    return sorted(int(path.name[5:]) for path in (folder / "checkpoints").glob("step-*"))


def state_of(folder: Path) -> dict[str, Tensor]:
    """Tensors of a run's newest checkpoint."""
    path = folder / "checkpoints" / f"step-{steps_of(folder)[-1]:08d}" / "state.safetensors"
    found: dict[str, Tensor] = load_file(path)
    return found


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Rows of a run's log that hold a loss, without what the clock decides."""
    lines = (folder / "log.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    clock = "slots_per_second"
    return [{key: row[key] for key in row if key != clock} for row in rows if "loss" in row]


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Both states hold the same bits."""
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


# A target whose every token follows from the one before the last, by a permutation. Half of what a
# drafter needs then stands in the features, the other half in the anchor.

LETTERS = 16
_HEAD, _HEADS = 8, 4
AFTER = [(5 * token + 3) % LETTERS for token in range(LETTERS)]


def echo_target() -> Any:
    """A Llama of two layers in which token t + 1 is AFTER[token t - 1].

    Its first layer copies the token before into the second half of the residual stream, by heads
    whose queries and keys are constants, turned so that distance 1 scores highest. Its second layer
    adds nothing.
    """
    width = 2 * LETTERS
    config = transformers.LlamaConfig(
        vocab_size=LETTERS, hidden_size=width, intermediate_size=8, num_hidden_layers=2,
        num_attention_heads=_HEADS, num_key_value_heads=_HEADS, head_dim=_HEAD,
        attention_bias=True, rope_theta=10.0, tie_word_embeddings=False, eos_token_id=None,
        bos_token_id=None, pad_token_id=None, max_position_embeddings=256,
    )  # fmt: skip
    if toys.IS_V5:
        config.rope_parameters = {"rope_type": "default", "rope_theta": 10.0}
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight.zero_()
        model.model.embed_tokens.weight[:, :LETTERS] = torch.eye(LETTERS)
        attention = model.model.layers[0].self_attn
        half = _HEAD // 2
        angles = 10.0 ** (-torch.arange(half) / half)
        query = torch.cat((torch.ones(half), torch.zeros(half)))
        key = torch.cat((angles.cos(), angles.sin()))
        attention.q_proj.bias.copy_(30.0 * query.repeat(_HEADS))
        attention.k_proj.bias.copy_(30.0 * key.repeat(_HEADS))
        places = torch.arange(LETTERS)
        attention.v_proj.weight[places, places] = 1.0
        attention.o_proj.weight[LETTERS + places, places] = 1.0
        model.lm_head.weight[torch.tensor(AFTER), LETTERS + places] = 8.0
    return model.eval()


def echo_text(first: list[int], length: int) -> list[int]:
    """`first` and what follows from its last two tokens, `length` in all."""
    text = list(first)
    while len(text) < length:
        text.append(AFTER[text[-2]])
    return text


def echo_documents(count: int, seed: int, length: int = 28) -> Documents:
    """Texts of that target after random prompts of 4 to 7 tokens; every 16th is held out."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for index in range(count):
        size = 4 + index % 4
        prompt = torch.randint(0, LETTERS, (size,), generator=generator).tolist()
        answer = echo_text(prompt, length)[size:]
        rows.append(Document(prompt, answer, 0.0, index % 16 == 0))
    return pack(rows, LETTERS)
