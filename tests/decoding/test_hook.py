"""`generate(custom_generate=flashmap_decoding)` gives what plain `generate` gives with the same
settings: tokens, scores, streams.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from support import toys
from support.oracle import padded
from support.toys import VOCAB, greedy, hook_count, prompt
from support.words import tokenizer
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteria,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

from flashmap.modeling.hook_flashmap import flashmap_decoding

LENGTH, NUM_TOKENS = 7, 14


@functools.cache
def target() -> Any:
    return toys.llama()


@functools.cache
def text() -> list[int]:
    return greedy(target(), prompt(LENGTH), NUM_TOKENS)


def batch() -> dict[str, Tensor]:
    """Three prompts, padded on the left with a token that texts hold too."""
    ids, mask = padded([prompt(n, seed=n) for n in (3, 9, 5)], "left", pad=text()[0], more=1)
    return {"input_ids": ids, "attention_mask": mask}


def single() -> dict[str, Tensor]:
    ids = prompt(LENGTH)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def knowing(ids: Tensor) -> Any:
    """Drafts most of a text (P + n) right."""
    script = {place: int(token) for place, token in enumerate(ids) if place % 6 != 4}
    return toys.scripted(script)


def generate(inputs: dict[str, Tensor], **settings: Any) -> Any:
    """Plain, with a padding token, for `NUM_TOKENS` unless another end is set."""
    ends = {"max_length", "max_new_tokens", "generation_config"}
    if not ends & settings.keys():
        settings["max_new_tokens"] = NUM_TOKENS
    if "generation_config" not in settings:
        settings.setdefault("pad_token_id", 0)
    return target().generate(**inputs, **settings)


def hooked(inputs: dict[str, Tensor], drafter: Any = None, **settings: Any) -> Any:
    """The same with the callable."""
    settings.setdefault("custom_generate", flashmap_decoding)
    return generate(inputs, draft_model=drafter or toys.drafter(), **settings)


class ByPrefix(LogitsProcessor):
    """Moves the scores along by what each whole row adds up to."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        places = torch.arange(1, input_ids.shape[1] + 1)
        bonus = torch.zeros_like(scores)
        for row, total in enumerate((input_ids * places).sum(dim=1).tolist()):
            bonus[row, total % 5 :: 5] = 3.0
        return scores + bonus


class ByRow(LogitsProcessor):
    """Has something for each row of the batch, as transformers' own processors may."""

    def __init__(self, num_rows: int) -> None:
        self.bonus = torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(1)) * 3

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + self.bonus


class Multiple(StoppingCriteria):
    """Ends a row once its sum is a multiple of a number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return input_ids.sum(dim=1) % self.number == 0


def allowed(row: int, ids: Tensor) -> list[int]:
    return list(range(row, VOCAB, 3)) if len(ids) % 2 else list(range(1, VOCAB, 2))


# Settings of `generate` by what they are; the greedy text is plain `generate`'s under each.
SETTINGS: dict[str, Callable[[], dict[str, Any]]] = {
    "nothing": dict,
    "length": lambda: {"max_length": 19},
    "criterion of length": lambda: {"stopping_criteria": [MaxLengthCriteria(15)]},
    "one beyond the length": lambda: {
        "stopping_criteria": [MaxLengthCriteria(15)], "max_new_tokens": 2
    },
    "no time": lambda: {"max_time": 1e-9},
    "one token": lambda: {"max_new_tokens": 1},
    "end tokens": lambda: {"eos_token_id": [60, text()[6]]},
    "repetition": lambda: {"repetition_penalty": 1.4},
    "no ngrams": lambda: {"no_repeat_ngram_size": 1},
    "prompt's tokens": lambda: {"encoder_repetition_penalty": 2.0},
    "prompt's ngrams": lambda: {"encoder_no_repeat_ngram_size": 1},
    "bad words": lambda: {"bad_words_ids": [[text()[1]], [text()[2], text()[3]]]},
    "at least": lambda: {"eos_token_id": text()[4], "min_new_tokens": 9},
    "at least in all": lambda: {"eos_token_id": text()[4], "min_length": 15},
    "forced end": lambda: {"forced_eos_token_id": 5},
    "suppressed": lambda: {"suppress_tokens": text()[2:4], "begin_suppress_tokens": text()[:1]},
    "bias": lambda: {"sequence_bias": [[[text()[5]], -9.0], [[text()[1], 7], 9.0]]},
    "length penalty": lambda: {
        "eos_token_id": 5, "exponential_decay_length_penalty": (4, 1.5),
    },
    "by row": lambda: {"prefix_allowed_tokens_fn": allowed},
    "processor": lambda: {"logits_processor": LogitsProcessorList([ByPrefix()])},
    "criteria": lambda: {"stopping_criteria": [Multiple(7)], "eos_token_id": 60},
    "configuration": lambda: {
        "generation_config": GenerationConfig(
            max_new_tokens=12, repetition_penalty=1.3, eos_token_id=text()[9], pad_token_id=0
        )
    },
    "several": lambda: {
        "repetition_penalty": 1.2, "bad_words_ids": [[text()[1]]], "eos_token_id": 11,
        "min_new_tokens": 3, "logits_processor": LogitsProcessorList([ByPrefix()]),
        "num_steps": 2, "num_draws": 2,
    },
}  # fmt: skip
OURS = {"num_steps", "num_draws"}


@pytest.mark.parametrize("inputs", [single, batch])
@pytest.mark.parametrize("setting", SETTINGS)
def test_greedy_text_is_plain_generates(setting: str, inputs: Any) -> None:
    given = SETTINGS[setting]()
    plain = generate(inputs(), **{name: given[name] for name in given if name not in OURS})
    assert hooked(inputs(), **SETTINGS[setting]()).equal(plain)
    if inputs is single:
        assert hooked(inputs(), knowing(plain[0]), **SETTINGS[setting]()).equal(plain)
        assert (plain[0, LENGTH:].tolist() == text()) == (setting == "nothing")
    assert hook_count(target()) == 0


@pytest.mark.parametrize("num_tokens", [1, 2, 4, 5, 6, 9])
def test_exactly_so_many_tokens(num_tokens: int) -> None:
    found = hooked(single(), knowing(generate(single())[0]), max_new_tokens=num_tokens)
    assert found[0, LENGTH:].tolist() == text()[:num_tokens]


@pytest.mark.parametrize("make", [toys.gemma2, toys.gpt2, toys.qwen3])
def test_other_targets_beyond_their_window(make: Any) -> None:
    ids, other = prompt(13), make()
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 9, "pad_token_id": 0}
    found = other.generate(
        ids, custom_generate=flashmap_decoding, draft_model=toys.drafter(), **settings
    )
    assert found.equal(other.generate(ids, **settings))


def test_padding_on_the_right_is_text_as_without() -> None:
    ids, mask = padded([prompt(n, seed=n) for n in (3, 9)], "right")
    found = hooked({"input_ids": ids, "attention_mask": mask})
    for row, length in enumerate((3, 9)):
        alone = generate({"input_ids": prompt(length, seed=length)})
        assert found[row, 9:].tolist() == alone[0, length:].tolist()


def test_processors_see_their_own_row() -> None:
    both = {"logits_processor": LogitsProcessorList([ByRow(3)]), "max_new_tokens": 9}
    assert hooked(batch(), **both).equal(generate(batch(), **both))


@pytest.mark.parametrize("inputs", [single, batch])
@pytest.mark.parametrize("setting", ["nothing", "end tokens", "repetition", "several"])
def test_scores_and_logits_are_plain_generates(setting: str, inputs: Any) -> None:
    given, more = SETTINGS[setting](), {"return_dict_in_generate": True}
    more |= {"output_scores": True, "output_logits": True}
    plain = generate(inputs(), **{n: given[n] for n in given if n not in OURS}, **more)
    found = hooked(inputs(), **SETTINGS[setting](), **more)
    assert type(found) is GenerateDecoderOnlyOutput
    assert found.sequences.equal(plain.sequences)
    ids = inputs()["input_ids"]
    new = found.sequences[:, ids.shape[1] :]
    ends = torch.tensor(given.get("eos_token_id", []))
    over = torch.isin(new, ends).cumsum(dim=1) - torch.isin(new, ends).long() > 0
    for name in ("scores", "logits"):
        ours, theirs = found[name], plain[name]
        assert len(ours) == len(theirs) == new.shape[1]
        for step, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            running = ~over[:, step]
            assert one.dtype == torch.float32
            torch.testing.assert_close(one[running], other[running], atol=1e-4, rtol=1e-4)
            assert not one[~running].any()


def test_scores_of_sampled_tokens_are_those_that_a_pass_over_them_gives() -> None:
    settings = {"do_sample": True, "temperature": 0.8, "top_k": 9, "top_p": 0.95, "seed": 4}
    found = hooked(
        single(), **settings, repetition_penalty=1.2, return_dict_in_generate=True,
        output_scores=True,
    )  # fmt: skip
    with torch.no_grad():
        logits = target()(found.sequences).logits[0, LENGTH - 1 : -1]
    listed = LogitsProcessorList([
        transformers.RepetitionPenaltyLogitsProcessor(1.2),
        transformers.TemperatureLogitsWarper(0.8),
        transformers.TopKLogitsWarper(9),
        transformers.TopPLogitsWarper(0.95),
    ])  # fmt: skip
    for step, one in enumerate(found.scores):
        expected = listed(found.sequences[:, : LENGTH + step], logits[step : step + 1])
        torch.testing.assert_close(one, expected, atol=1e-4, rtol=1e-4)
        assert one[0, found.sequences[0, LENGTH + step]] > float("-inf")


def test_without_scores_the_output_has_none() -> None:
    found = hooked(single(), return_dict_in_generate=True)
    assert found.scores is None
    assert found.logits is None
    assert found.sequences.equal(generate(single()))


def test_criteria_see_the_scores_if_they_are_kept() -> None:
    class Sure(StoppingCriteria):
        """Ends a row at its second token that is likelier than a bound."""

        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            best = torch.stack([torch.softmax(one, dim=-1).amax(-1) for one in scores])
            return (best > 0.3).sum(dim=0) >= 2

    more = {"stopping_criteria": [Sure()], "eos_token_id": 60, "output_scores": True}
    more["return_dict_in_generate"] = True
    for inputs in (single, batch):
        plain = generate(inputs(), **more).sequences
        assert hooked(inputs(), **more).sequences.equal(plain)
    assert plain.shape[1] < batch()["input_ids"].shape[1] + NUM_TOKENS


class TestSeeds:
    def test_a_seed_repeats_the_run_and_rows_have_their_own(self) -> None:
        sampled = {"do_sample": True, "top_k": 0}
        first = hooked(batch(), seed=3, **sampled)
        assert first.equal(hooked(batch(), seed=[3, 4, 5], **sampled))
        assert not first.equal(hooked(batch(), seed=4, **sampled))

    def test_torchs_own_seed_repeats_it_too(self) -> None:
        found = []
        for _ in range(2):
            torch.manual_seed(5)
            found.append(hooked(single(), do_sample=True, top_k=0))
        assert found[0].equal(found[1])
        assert not found[0].equal(hooked(single(), do_sample=True, top_k=0))

    def test_it_is_spec_generates_text(self) -> None:
        ids = prompt(LENGTH)
        out = toys.drafter().spec_generate(target(), ids, NUM_TOKENS, 0.8, seed=6, top_k=9)
        found = hooked(single(), do_sample=True, temperature=0.8, top_k=9, seed=6)
        assert found.equal(out.sequences)


class TestStopStrings:
    def test_with_a_bound_tokenizer(self) -> None:
        words = tokenizer()
        stop = "".join(words.convert_ids_to_tokens(text()))[9:12]
        plain = generate(single(), stop_strings=[stop], tokenizer=words)
        bound = functools.partial(flashmap_decoding, tokenizer=words)
        found = hooked(single(), stop_strings=stop, custom_generate=bound)
        assert found.equal(plain)
        assert found.shape[1] < LENGTH + NUM_TOKENS

    def test_without_one(self) -> None:
        with pytest.raises(ValueError, match="stop_strings='ab' needs the target's tokenizer"):
            hooked(single(), stop_strings="ab", tokenizer=tokenizer())


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


def test_the_drafter_carries_the_callable() -> None:
    drafter = toys.drafter()
    found = generate(single(), custom_generate=drafter.flashmap_decoding, draft_model=drafter)
    assert found[0, LENGTH:].tolist() == text()


REFUSED: dict[str, dict[str, Any]] = {
    "num_beams=2": {"num_beams": 2},
    "num_return_sequences=2": {"num_return_sequences": 2, "do_sample": True},
    "penalty_alpha=0.6": {"penalty_alpha": 0.6, "top_k": 4},
    "dola_layers='low'": {"dola_layers": "low"},
    "prompt_lookup_num_tokens=3": {"prompt_lookup_num_tokens": 3},
    "assistant_early_exit=1": {"assistant_early_exit": 1},
    "guidance_scale=1.5": {"guidance_scale": 1.5},
    "cache_implementation='static'": {"cache_implementation": "static"},
    "output_attentions=True": {"output_attentions": True, "return_dict_in_generate": True},
    "output_hidden_states=True": {"output_hidden_states": True, "return_dict_in_generate": True},
    "past_key_values does": {"past_key_values": transformers.DynamicCache()},
    "position_ids are not": {"position_ids": torch.arange(1, LENGTH + 1)[None]},
    "num_draws=0": {"num_draws": 0},
    "num_steps": {"num_steps": 9},
    "seed": {"seed": "x"},
    "draft_model is a str": {"draft_model": "smollm2-135m"},
}


@pytest.mark.parametrize("named", REFUSED)
def test_what_cannot_be_honoured_is_named(named: str) -> None:
    settings = {"draft_model": toys.drafter(), "custom_generate": flashmap_decoding}
    with pytest.raises(ValueError) as caught:
        generate(single(), **{**settings, **REFUSED[named]})
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)
    assert hook_count(target()) == 0


def test_a_missing_drafter_is_named() -> None:
    with pytest.raises(ValueError, match="draft_model is missing, expected a FlashMap drafter"):
        generate(single(), custom_generate=flashmap_decoding)


def test_embeddings_in_the_place_of_tokens_are_refused() -> None:
    embeds = target().get_input_embeddings()(prompt(LENGTH)).detach()
    with pytest.raises(ValueError, match="inputs_embeds: flashmap_decoding runs the target on"):
        hooked({"inputs_embeds": embeds})


class TestAssistant:
    @pytest.mark.parametrize("sample", [False, True])
    def test_a_drafter_says_what_to_call_instead(self, sample: bool) -> None:
        with pytest.raises(ValueError, match=r"custom_generate=draft\.flashmap_decoding"):
            generate(single(), assistant_model=toys.drafter(), do_sample=sample)

    def test_it_is_refused_beside_the_callable(self) -> None:
        with pytest.raises(ValueError, match="assistant_model does not go with"):
            hooked(single(), assistant_model=toys.drafter())

    def test_the_guard_is_in_nobodys_way(self, tmp_path: Any) -> None:
        drafter = toys.drafter()
        assert drafter.generation_config.eos_token_id is None
        assert not drafter.can_generate()
        drafter.save_pretrained(tmp_path)
        assert not (tmp_path / "generation_config.json").exists()
        again = type(drafter).from_pretrained(tmp_path)
        assert again.state_dict().keys() == drafter.state_dict().keys()
