"""What the generated parts of a model card say. Each function takes the facts and the licence of
the weights, and returns its part as Markdown, or None where there is nothing to say: then what
stands there stays.
"""

import re
from collections.abc import Callable, Mapping
from importlib import resources
from typing import TYPE_CHECKING, Any

from flashmap.vocabulary import FILE as DRAFT_VOCAB

from .card_results import results
from .contents import CUSTOM_GENERATE, EVAL, GENERATE, GOLDEN, LICENCE, PICTURE, RECIPE, RECORD

if TYPE_CHECKING:
    from .card import Facts

COMMIT = re.compile(r"[0-9a-f]{40}")
FOLDER = "path/to/this/folder"  # what a snippet loads before the repository's name is known
CITATION = """```bibtex
@misc{flashmap,
  title  = {FlashMap: flow map speculative decoding},
  author = {Shen, Jeff and Zhou, Zhejian and Lee, Ryan and May, Jonathan and Ho, Shirley},
  url    = {https://jshen.net/flashmap}
}
@misc{flowmaplm,
  title = {Flow Map Language Models},
  note  = {arXiv:2602.16813},
  url   = {https://arxiv.org/abs/2602.16813}
}
```"""


def overview(facts: "Facts", licence: str) -> str:
    """The drafter in a list."""
    config = facts.config
    target = f"[{config.target_model}](https://huggingface.co/{config.target_model})"
    revision = facts.raw.get("target_revision")
    depth = facts.raw.get("num_target_layers")
    layers = ", ".join(map(str, config.target_layer_ids))
    steps = ", ".join(sorted(config.jump_grids, key=int))
    dtype = facts.raw.get("dtype") or facts.raw.get("torch_dtype")
    size = f"{facts.num_parameters:,} parameters, {facts.num_bytes / 1e6:.0f} MB in {dtype}"
    rows = {
        "Target": target + (f", revision `{revision}`" if revision else ""),
        "Architecture": f"FlashMap, {config.num_hidden_layers} layers, width {config.hidden_size}, "
        f"{config.num_attention_heads} heads, {size}",
        "Block": f"{config.block_size} tokens; jumps a draft: {config.num_steps}, with grids for "
        f"{steps} ({facts.grid_mode} for {config.vocab_size:,} tokens)",
        "Taps": f"outputs of decoder layers {layers}{f' of {depth}' if depth else ''}, counted "
        "from 0 (`hidden_states[i + 1]`)",
    }
    if DRAFT_VOCAB in facts.files:
        drafted = facts.raw.get("draft_vocab_size") or config.vocab_size
        rows["Draft vocabulary"] = (
            f"{drafted:,} of {config.vocab_size:,} tokens; `{DRAFT_VOCAB}` ranks all of them"
        )
    return "\n".join(f"- **{name}**: {text}" for name, text in rows.items())


def usage(facts: "Facts", licence: str) -> str:
    """Quick starts that work as they stand, for every way of running the drafter."""
    target = facts.config.target_model
    revision = str(facts.raw.get("target_revision"))
    pin = f', revision="{revision}"' if COMMIT.fullmatch(revision) else ""
    if facts.tag:
        loaded = (
            f'\n    DRAFT, revision="{facts.tag}", trust_remote_code=True, dtype=torch.bfloat16\n'
        )
    else:
        loaded = "DRAFT, trust_remote_code=True, dtype=torch.bfloat16"
    parts = [
        f"""## Use

With transformers 4.57 or newer and torch 2.9 or newer; nothing else has to be installed.

```python
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

DRAFT, TARGET = "{facts.repo_id or FOLDER}", "{target}"
draft = AutoModel.from_pretrained({loaded})
target = AutoModelForCausalLM.from_pretrained(TARGET{pin}, dtype=torch.bfloat16)
tokenizer = AutoTokenizer.from_pretrained(TARGET{pin})
chat = [{{"role": "user", "content": "List five tips for better sleep."}}]
inputs = tokenizer.apply_chat_template(
    chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
)
out = draft.spec_generate(target, inputs["input_ids"], max_new_tokens=256)
print(tokenizer.decode(out.sequences[0], skip_special_tokens=True))
print(f"{{out.acceptance_length:.2f}} tokens a pass of the target")
```

`temperature`, `top_k`, `top_p`, `seed`, `streamer` and batches work as usual."""
    ]
    if GENERATE in facts.files:
        place = f'DRAFT, revision="{facts.tag}"' if facts.tag else "DRAFT"
        parts.append(
            f"""The same from the target's side, with everything else that `generate` takes:

```python
out = target.generate(
    **inputs, custom_generate={place}, trust_remote_code=True, max_new_tokens=256
)
```"""
        )
    return "\n\n".join([*parts, *(_engine(facts, *engine) for engine in ENGINES)])


ENGINES = (
    (
        "vLLM",
        "vllm",
        'vllm serve {target} \\\n    --speculative-config \'{{"model": "{draft}", '
        '"num_speculative_tokens": {block}{vllm_tag}}}\'',
    ),
    (
        "sglang",
        "sglang",
        "python -m sglang.launch_server --model-path {target} \\\n"
        "    --speculative-algorithm DSPARK --speculative-draft-model-path {draft}{sglang_tag}",
    ),
)


def has_plugin(name: str) -> bool:
    """Whether this version brings a plugin for an engine."""
    return resources.files("flashmap").joinpath("serving", f"{name}_plugin").is_dir()


def _engine(facts: "Facts", title: str, name: str, command: str) -> str:
    """How to serve with an engine, or that this version cannot: no command that does not work."""
    from flashmap import __version__

    if not has_plugin(name):
        return f"{title}: flashmap-hub {__version__} brings no plugin for it yet."
    shown = command.format(
        target=facts.config.target_model,
        draft=facts.repo_id or FOLDER,
        block=facts.config.block_size,
        vllm_tag=f', "revision": "{facts.tag}"' if facts.tag else "",
        sglang_tag=f" \\\n    --speculative-draft-model-revision {facts.tag}" if facts.tag else "",
    )
    return (
        f"{title}, with flashmap-hub {__version__}, which says in `flashmap doctor` the versions "
        f"of it that it knows:\n\n```\npip install 'flashmap-hub[{name}]=={__version__}'\n"
        f"{shown}\n```"
    )


def training(facts: "Facts", licence: str) -> str | None:
    """The recipe's main settings."""
    if not facts.recipe:
        return None
    return (
        f"## Recipe\n\n[`{RECIPE}`]({RECIPE}) decides data, losses and run; `flashmap train data`,"
        f" `train run` and `train eval`\nfollow it:\n\n{told_recipe(facts.recipe)}"
    )


def told_recipe(recipe: Mapping[str, Any]) -> str:
    """A recipe's main settings as a list. Raises ValueError, TypeError or AttributeError where they
    are not of the types that training reads."""
    data, loss, run = (recipe.get(table, {}) for table in ("data", "loss", "run"))
    if not all(isinstance(table, Mapping) for table in (data, loss, run)):
        raise TypeError("data, loss and run have to be tables")
    asked = {
        "requests from templates": data.get("num_prompts"),
        "requests that the target made up": data.get("num_own_prompts"),
        "files of own texts": len(data.get("files", [])) or None,
    }
    requests = ", ".join(f"{count:,} {what}" for what, count in asked.items() if count)
    shares = ", ".join(
        f"{float(share):.0%} at {temperature}"
        for temperature, share in data.get("temperatures", {}).items()
    )
    rows = {
        "Data": requests,
        "And the documents in": ", ".join(f"`{one}`" for one in data.get("other_folders", [])),
        "Temperatures of the target's answers": shares,
        "Longest answer": _named(data, max_new_tokens="{:,} tokens"),
        "Objective": _named(
            loss,
            objective="{}",
            cross_entropy="{:g} cross-entropy",
            total_variation="{:g} total variation",
            slot_weights="slots weighted by {}",
        ),
        "Planned run": _named(
            run,
            start="from `{}`",
            steps="{:,} steps",
            batch_size="{} texts",
            blocks="{} blocks each",
            max_length="up to {} tokens",
            rate="rate {:g}",
        ),
    }
    return "\n".join(f"- **{name}**: {text}" for name, text in rows.items() if text)


def _named(table: "dict[str, object]", **formats: str) -> str:
    return ", ".join(text.format(table[key]) for key, text in formats.items() if key in table)


def limits(facts: "Facts", licence: str) -> str:
    """What to expect, and what not."""
    config = facts.config
    longest = facts.recipe.get("run", {}).get("max_length")
    trained = (
        f"- It learnt from texts of up to {longest} tokens; acceptance in longer ones was not "
        "measured.\n"
        if longest
        else ""
    )
    return f"""## Limits

- It drafts for one target: it reads that model's hidden states and speaks with its vocabulary. A
  target of other sizes is refused; other weights of the same sizes, or another chat template, cost
  acceptance, not correctness.
- Greedy decoding in float32 gives the tokens of plain decoding, one by one, and sampling the
  target's distribution. In bfloat16 a greedy text may part from plain decoding where the target's
  two best tokens are tied within rounding.
- A pass of the target verifies {config.block_size + 1} tokens. Where that takes much longer than
  one over a single token, drafting does not pay.
{trained}- A batch needs a target whose layers all see the whole text. Targets with recurrent layers
  need transformers 5 and decode one text at a time."""


def files(facts: "Facts", licence: str) -> str:
    """What lies in the folder, and what running its code means."""
    rows = {
        "`config.json`, `*.safetensors`": "the drafter, every setting written out",
        "`*_flashmap.py`": "its code, which `trust_remote_code=True` runs",
        f"`{CUSTOM_GENERATE}/`": "the same from the target's `generate`",
        f"`{DRAFT_VOCAB}`": "the target's tokens by frequency, for engines that draft from the "
        "first of them",
        f"`{EVAL}/`": f"measurements, their prompts, and golden outputs (`{GOLDEN}`)",
        f"`{RECIPE}`, `{PICTURE}`": "how it was trained, and the picture above",
        f"`{RECORD}`": "sha256 of every file, versions, commit",
    }
    there = {f"`{CUSTOM_GENERATE}/`": GENERATE,
             f"`{DRAFT_VOCAB}`": DRAFT_VOCAB,
             f"`{RECIPE}`, `{PICTURE}`": RECIPE}  # fmt: skip
    table = "\n".join(
        f"| {name} | {text} |"
        for name, text in rows.items()
        if name not in there or there[name] in facts.files
    )
    pin = f'`revision="{facts.tag}"`' if facts.tag else "a revision"
    return f"""## Files

| file | content |
|---|---|
{table}

`trust_remote_code=True` runs this folder's Python files with your rights. They import torch,
transformers and the standard library only. Read them, and pin {pin}, so that
what you read is what runs. `flashmap release check DIR` compares a copy with its record."""


def terms(facts: "Facts", licence: str) -> str:
    """Licences and citation."""
    weights = f"the weights `{licence}`" if licence else "the weights' licence is not stated"
    return f"""## Licence and citation

The code is licensed MIT (`{LICENCE}`), {weights}. The target belongs to its authors, under the
licence that its own card states.

{CITATION}"""


Section = Callable[["Facts", str], str | None]
SECTIONS: dict[str, Section] = {
    "overview": overview,
    "usage": usage,
    "results": results,
    "training": training,
    "limits": limits,
    "files": files,
    "terms": terms,
}
