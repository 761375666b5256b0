"""The embedded pair in vLLM, on the CPU: the drafter that this project trained earns its keep."""

import json
from pathlib import Path

import pytest
from support.engines import acceptance, engine, texts
from transformers import AutoTokenizer

from flashmap.embedded import embedded_target

DRAFTER = Path(__file__).resolve().parents[3] / "models/smollm2-135m"
LENGTH = 40


@pytest.mark.slow
def test_the_embedded_pair(tmp_path: Path) -> None:
    target = embedded_target()
    (tmp_path / "target").symlink_to(target)
    (tmp_path / "draft").symlink_to(DRAFTER)
    tokenizer = AutoTokenizer.from_pretrained(target)
    lines = (DRAFTER / "eval_prompts.jsonl").read_text().splitlines()[::28]
    chats = [[{"role": "user", "content": json.loads(line)["prompt"]}] for line in lines]
    prompts = [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)
        for chat in chats
    ]
    asked = [prompt["input_ids"] for prompt in prompts]
    with engine(tmp_path, max_model_len=512) as llm:
        plain = texts(llm, asked, temperature=0.0, max_tokens=LENGTH)
    with engine(tmp_path, {}, max_model_len=512) as llm:
        assert texts(llm, asked, temperature=0.0, max_tokens=LENGTH) == plain
        drafted, accepted = acceptance(llm)
    assert 1.0 + accepted / (drafted / 8) > 1.6  # tokens a pass of the target
