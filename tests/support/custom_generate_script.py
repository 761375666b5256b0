"""Run by tests/release/test_custom_generate.py in a process without flashmap: calls a target's
`generate` with a release's REF and prints what came of it as one JSON line.
"""

import json
import sys
import threading
from typing import Any

from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    TextIteratorStreamer,
)

TARGET, FOLDER, TWIN, REPO = sys.argv[1:]
loads: list[list[Any]] = []
honest = AutoModel.from_pretrained


def counted(repo: str, **arguments: Any) -> Any:
    """Remembers what is loaded."""
    loads.append([repo, arguments.get("revision"), str(arguments.get("dtype"))])
    return honest(repo, **arguments)


AutoModel.from_pretrained = counted
target = AutoModelForCausalLM.from_pretrained(TARGET).eval()
tokenizer = AutoTokenizer.from_pretrained(TARGET)
encoding: dict[str, Any] = {"return_tensors": "pt", "return_token_type_ids": False}
inputs = dict(tokenizer(["Once upon", "a"], padding=True, padding_side="left", **encoding))
single = dict(tokenizer("Once upon", **encoding))


def generate(given: Any = single, **settings: Any) -> list[list[int]]:
    """New tokens."""
    settings = {"max_new_tokens": 12, "pad_token_id": 0, **settings}
    found = target.generate(**given, **settings)
    new: list[list[int]] = found[:, given["input_ids"].shape[1] :].tolist()
    return new


def by(ref: str, given: Any = single, **settings: Any) -> list[list[int]]:
    """The same with a release."""
    return generate(given, custom_generate=ref, trust_remote_code=True, **settings)


def failure(**settings: Any) -> str:
    """The message of a refused call, behind the number of ends its streamer saw."""
    ends = []

    class Recorder:
        put = staticmethod(lambda value: None)
        end = staticmethod(lambda: ends.append(1))

    try:
        by(FOLDER, streamer=Recorder(), **settings)
    except (ValueError, TypeError) as error:
        return f"{len(ends)} {error}"
    return f"{len(ends)} nothing"


def streamed() -> str:
    """The text that another thread reads."""
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    worker = threading.Thread(target=by, args=(FOLDER,), kwargs={"streamer": streamer})
    worker.start()
    shown = "".join(streamer)
    worker.join()
    return shown


def turn() -> dict[str, Any]:
    """The second turn of a chat, plainly and with what the first left, and the tokens that its
    first pass ran."""
    past = honest(FOLDER, trust_remote_code=True).new_past()
    settings = {"max_new_tokens": 12, "pad_token_id": 0}
    first = target.generate(**single, **settings)
    by(FOLDER, past=past)
    second = {"input_ids": first, "attention_mask": first.new_ones(first.shape)}
    sizes: list[int] = []
    handle = target.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    found = by(FOLDER, second, past=past)
    handle.remove()
    return {"turn": [generate(second), found], "first pass of the turn": sizes[0]}


plain, text = generate(), tokenizer.decode(generate()[0])
# Random weights write random bytes: one that is a letter.
stop = next(letter for letter in text[2:] if letter.isascii() and letter.isprintable())
stops = {"stop_strings": stop, "tokenizer": tokenizer}
configured = {
    "generation_config": GenerationConfig(max_new_tokens=9, pad_token_id=0, stop_strings=stop),
    "tokenizer": tokenizer,
}
sampled = {"do_sample": True, "top_k": 0, "seed": 4}
report: dict[str, Any] = {
    "folder": [plain, by(FOLDER)],
    "hub": [plain, by(REPO)],
    "batch": [generate(inputs), by(FOLDER, inputs)],
    "processed": [
        generate(repetition_penalty=1.5, eos_token_id=plain[0][5]),
        by(FOLDER, repetition_penalty=1.5, eos_token_id=plain[0][5]),
    ],
    "tree": [generate(inputs), by(FOLDER, inputs, num_candidates=3)],
    "adaptive": [plain, by(FOLDER, adaptive=(0.4, 0.1), num_draws="auto")],
    **turn(),
    "stop strings": [generate(**stops), by(FOLDER, **stops)],
    "stopped": len(generate(**stops)[0]),
    "configured": [
        target.generate(**single, **configured).tolist(),
        target.generate(
            **single, **configured, custom_generate=FOLDER, trust_remote_code=True
        ).tolist(),
    ],
    "streamed": [tokenizer.decode(plain[0], skip_special_tokens=False), streamed()],
    "loads": loads.copy(),
}
target.to("cpu").double()
by(FOLDER)
drafter = honest(FOLDER, trust_remote_code=True)
target.float()
by(FOLDER, draft_model=drafter)
report["later loads"] = loads[len(report["loads"]) :]
report["seeded"] = [by(FOLDER, **sampled), by(REPO, **sampled)]
report["twin"] = [plain, by(TWIN)]
report["other drafter"] = [plain, by(FOLDER, draft_repo=TWIN)]
report["refused"] = {
    "beams": failure(num_beams=2),
    "assistant": failure(assistant_model=drafter),
    "unknown": failure(num_drafts=3),
    "no drafter": failure(draft_model=TWIN),
    "nothing": failure(max_new_tokens=1),
}
print(json.dumps(report))  # noqa: T201 - what the test reads
