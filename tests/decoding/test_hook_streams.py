"""A streamer of `generate(custom_generate=flashmap_decoding)` sees the prompt, then exactly the
committed tokens, then one end, whichever way it was given.
"""

import functools
import threading
from typing import Any

import pytest
import torch
import transformers
from support import toys
from support.hooked import LENGTH, hooked, single, target, text
from support.toys import hook_count, prompt
from support.words import tokenizer
from torch import Tensor

from flashmap.modeling.hook_flashmap import flashmap_decoding


class Recorder:
    """Remembers every call in order, and may fail at the n-th value."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.values: list[Tensor] = []
        self.ends, self.fail_at = 0, fail_at

    def put(self, value: Tensor) -> None:
        assert self.ends == 0, "a value after the end"
        if len(self.values) == self.fail_at:
            raise ConnectionError("the reader went away")
        self.values.append(value)

    def end(self) -> None:
        self.ends += 1


def bound(streamer: Any) -> dict[str, Any]:
    return {"custom_generate": functools.partial(flashmap_decoding, streamer=streamer)}


WAYS = {"by its name": lambda streamer: {"streamer": streamer}, "bound": bound}


@pytest.mark.parametrize("way", WAYS)
class TestStreamer:
    def test_prompt_then_tokens_then_one_end(self, way: str) -> None:
        streamer = Recorder()
        found = hooked(single(), **WAYS[way](streamer))
        assert streamer.values[0].equal(prompt(LENGTH))
        assert torch.cat(streamer.values[1:]).tolist() == found[0, LENGTH:].tolist() == text()
        assert streamer.ends == 1

    def test_one_end_when_the_reader_fails(self, way: str) -> None:
        streamer = Recorder(fail_at=3)
        with pytest.raises(ConnectionError):
            hooked(single(), **WAYS[way](streamer))
        assert streamer.ends == 1
        assert hook_count(target()) == 0

    def test_one_end_when_a_setting_is_refused(self, way: str) -> None:
        streamer = Recorder()
        with pytest.raises(ValueError, match="prompt_lookup_num_tokens"):
            hooked(single(), **WAYS[way](streamer), prompt_lookup_num_tokens=2)
        assert streamer.ends == 1

    def test_a_thread_reads_the_text(self, way: str) -> None:
        words = tokenizer()
        streamer = transformers.TextIteratorStreamer(words, skip_prompt=True, timeout=60)
        worker = threading.Thread(target=hooked, args=(single(),), kwargs=WAYS[way](streamer))
        worker.start()
        shown = "".join(streamer)
        worker.join()
        assert shown == words.decode(text())

    def test_a_thread_that_reads_ends_when_the_target_fails(self, way: str) -> None:
        own, passes = toys.llama(), iter(range(2))

        def fail(*args: Any) -> None:
            if next(passes, None) is None:
                raise RuntimeError("out of memory")

        own.model.layers[-1].register_forward_hook(fail)
        words, raised = tokenizer(), []
        streamer = transformers.TextIteratorStreamer(words, skip_prompt=True, timeout=60)
        settings = {"custom_generate": flashmap_decoding, **WAYS[way](streamer)}

        def work() -> None:
            try:
                own.generate(**single(), draft_model=toys.drafter(), max_new_tokens=9, **settings)
            except RuntimeError as error:
                raised.append(str(error))

        worker = threading.Thread(target=work)
        worker.start()
        shown = "".join(streamer)
        worker.join()
        assert raised == ["out of memory"]
        assert shown
        assert words.decode(text()).startswith(shown)


def test_text_streamer_prints_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    hooked(single(), streamer=transformers.TextStreamer(tokenizer(), skip_prompt=True))
    assert capsys.readouterr().out.strip() == tokenizer().decode(text())
