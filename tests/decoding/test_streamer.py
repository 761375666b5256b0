"""A streamer sees the prompt, then exactly the committed tokens, then one end."""

import threading
from typing import Any

import pytest
import torch
import transformers
from support import toys
from support.toys import greedy, prompt, text_of


class Recorder:
    """Remembers every call in order."""

    def __init__(self) -> None:
        self.values: list[torch.Tensor] = []
        self.ends = 0

    def put(self, value: torch.Tensor) -> None:
        assert self.ends == 0, "a value after the end"
        self.values.append(value)

    def end(self) -> None:
        self.ends += 1


def knowing(target: Any, ids: torch.Tensor, num_tokens: int) -> toys.Scripted:
    text = greedy(target, ids, num_tokens)
    return toys.scripted({ids.shape[1] + i: token for i, token in enumerate(text)})


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_tokens", [1, 2, 5, 6, 20])
def test_the_prompt_then_the_committed_tokens_then_the_end(
    num_tokens: int, temperature: float
) -> None:
    target, ids, streamer = toys.llama(), prompt(6), Recorder()
    out = knowing(target, ids, 20).spec_generate(
        target, ids, max_new_tokens=num_tokens, temperature=temperature, seed=0, streamer=streamer
    )
    first, *rest = streamer.values
    assert first.equal(ids)
    assert all(value.device.type == "cpu" for value in streamer.values)
    assert all(value.dim() == 1 or value.shape[0] == 1 for value in rest)
    assert torch.cat([value.flatten() for value in rest]).tolist() == text_of(out, ids)
    assert all(value.numel() > 0 for value in rest)
    assert streamer.ends == 1


def test_tokens_arrive_block_by_block() -> None:
    target, ids, streamer = toys.llama(), prompt(6), Recorder()
    knowing(target, ids, 20).spec_generate(target, ids, max_new_tokens=9, streamer=streamer)
    assert [value.numel() for value in streamer.values] == [6, 1, 4, 4]


@pytest.mark.parametrize("index", [0, 2, 4, 6])
def test_tokens_after_a_stop_token_are_not_shown(index: int) -> None:
    target, ids, streamer = toys.llama(), prompt(11), Recorder()
    text = greedy(target, ids, 9)
    knowing(target, ids, 20).spec_generate(
        target, ids, max_new_tokens=20, stop_token_ids=text[index], streamer=streamer
    )
    assert torch.cat(streamer.values[1:]).tolist() == text[: index + 1]
    assert streamer.ends == 1


@pytest.mark.parametrize("arguments", [{"max_new_tokens": 0}, {"num_steps": 9}, {"seed": "x"}])
def test_a_refused_call_ends_the_stream_without_a_value(arguments: dict[str, Any]) -> None:
    streamer = Recorder()
    with pytest.raises(ValueError):
        toys.drafter().spec_generate(toys.llama(), prompt(6), streamer=streamer, **arguments)
    assert streamer.values == []
    assert streamer.ends == 1


class Letters:
    """A tokenizer with a letter for every token, as far as streamers need one."""

    def decode(self, token_ids: Any, **arguments: Any) -> str:
        return "".join(chr(0x4E00 + int(token)) for token in token_ids)


def test_an_iterator_reads_the_text_in_another_thread() -> None:
    target, ids = toys.llama(), prompt(6)
    text = greedy(target, ids, 20)
    streamer = transformers.TextIteratorStreamer(Letters(), skip_prompt=True, timeout=60)
    drafter = knowing(target, ids, 20)
    worker = threading.Thread(
        target=drafter.spec_generate, args=(target, ids, 20), kwargs={"streamer": streamer}
    )
    worker.start()
    pieces = list(streamer)
    worker.join()
    assert "".join(pieces) == Letters().decode(text)
    assert len(pieces) > 3


def test_an_iterator_ends_when_the_target_fails() -> None:
    target, ids = toys.llama(), prompt(6)
    drafter = knowing(target, ids, 20)
    passes = iter(range(2))

    def fail(*args: Any) -> None:
        if next(passes, None) is None:
            raise RuntimeError("out of memory")

    target.model.layers[-1].register_forward_hook(fail)
    streamer = transformers.TextIteratorStreamer(Letters(), skip_prompt=True, timeout=60)
    raised: list[BaseException] = []

    def work() -> None:
        try:
            drafter.spec_generate(target, ids, 20, streamer=streamer)
        except RuntimeError as error:
            raised.append(error)

    worker = threading.Thread(target=work)
    worker.start()
    shown = "".join(streamer)
    worker.join()
    assert Letters().decode(greedy(toys.llama(), ids, 20)).startswith(shown)
    assert str(raised[0]) == "out of memory"
