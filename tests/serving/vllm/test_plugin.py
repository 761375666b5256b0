"""The plugin inside vLLM: found by its entry point, refused in one message, taken out again."""

import json
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import vllm_cpu
from support.engine_pairs import BLOCK
from support.engines import engine

from flashmap.serving import hooking, registration
from flashmap.serving.vllm_plugin import hooks, register

DEFAULTS = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 128}


@pytest.fixture(autouse=True)
def ready() -> None:
    vllm_cpu.prepare()


def configure(pair: Path, draft: dict[str, Any], **settings: Any) -> Any:
    """VLLM's configuration as `vllm serve` makes it, without an engine."""
    from vllm import EngineArgs

    speculative = {"model": str(pair / "draft"), **draft}
    arguments = {**DEFAULTS, **settings, "speculative_config": speculative}
    return EngineArgs(model=str(pair / "target"), **arguments).create_engine_config()


def hooked() -> list[Any]:
    """Everything of vLLM that the plugin touches, as it is now."""
    functions = [hooking.find(hook.module, hook.name)[2] for hook in hooks.HOOKS]
    functions = [getattr(function, "__func__", function) for function in functions]
    return functions + [
        sorted(hooking.find(entry.module, entry.name)[2]) for entry in hooks.ENTRIES
    ]


def test_a_folder_is_all_that_has_to_be_said(right: Path) -> None:
    config = configure(right, {})
    speculative = config.speculative_config
    assert (speculative.method, speculative.num_speculative_tokens) == ("dflash", BLOCK)
    assert speculative.draft_sample_method == "probabilistic"
    assert speculative.draft_model_config.architectures == ["FlashMapDraftModel"]
    assert config.use_v2_model_runner


@pytest.mark.parametrize("name", ["draft_sample_method", "draft-sample-method"])
def test_what_is_asked_for_stays(name: str, right: Path) -> None:
    config = configure(right, {name: "greedy"}, max_num_seqs=8, max_num_batched_tokens=64)
    assert config.speculative_config.draft_sample_method == "greedy"
    assert config.scheduler_config.max_num_batched_tokens == 64


def test_there_is_room_for_every_requests_block(right: Path) -> None:
    config = configure(right, {}, max_num_seqs=1500)
    assert config.scheduler_config.max_num_batched_tokens == 1500 * BLOCK


Refusal = tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]
REFUSED: dict[str, Refusal] = {  # of --speculative-config, other flags, the draft's config.json
    "too many drafts": (
        {"num_speculative_tokens": 5},
        {},
        {},
        "num_speculative_tokens is 5, .* have 4 tokens",
    ),
    "pipeline parallel": ({}, {"pipeline_parallel_size": 2}, {}, "pipeline_parallel_size is 2"),
    "tensor parallel": ({}, {"tensor_parallel_size": 2}, {}, "tensor_parallel_size is 2"),
    "method": ({"method": "eagle3"}, {}, {}, "method 'eagle3' is asked for"),
    "vocabulary": ({}, {}, {"vocab_size": 48}, "drafts from 48 tokens and the target has 32"),
    "first stage": ({}, {}, {"flow_map": False}, "flow_map is false"),
    "no ranking": ({}, {}, {"draft_vocab_size": 9}, "9 of 32 .*holds no draft_vocab.safetensors"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_one_message_before_anything_is_loaded(case: str, right: Path, tmp_path: Path) -> None:
    draft, settings, fields, words = REFUSED[case]
    raw = json.loads((right / "draft/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | fields))  # and no weights
    with pytest.raises(ValueError, match=words):
        configure(right, {"model": str(tmp_path), **draft}, **settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"enable_lora": True}, "leave out --enable-lora"),
        ({"max_num_seqs": 40}, "40 requests draft 160 slots.*--max-num-batched-tokens 160"),
    ],
    ids=["adapters", "room"],
)
def test_one_message_before_weights_are_loaded(
    settings: dict[str, Any], words: str, right: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    def load(self: Any, *args: Any, **kwargs: Any) -> None:
        pytest.fail("weights are loaded")

    monkeypatch.setattr(GPUModelRunner, "load_model", load)
    with pytest.raises(ValueError, match=words), engine(right, {}, **settings):
        pass


def test_another_draft_is_configured_as_without_the_plugin(right: Path) -> None:
    draft = {"model": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    register.register()
    found = configure(right, draft).speculative_config
    register.unregister()
    expected = configure(right, draft).speculative_config
    register.register()
    assert (found.method, found.prompt_lookup_max) == ("ngram", 4)
    assert found.compute_hash() == expected.compute_hash()
    assert found.num_speculative_tokens == expected.num_speculative_tokens


def test_another_speculator_gets_what_was_asked_for() -> None:
    seen: list[Any] = []
    wrapped = hooks.choosing(lambda *args, **kwargs: seen.append((args, kwargs)))
    draft = SimpleNamespace(architectures=["DFlashDraftModel"])
    config = SimpleNamespace(speculative_config=SimpleNamespace(draft_model_config=draft))
    wrapped(config, "device", "request states", more=1)
    assert seen == [((config, "device", "request states"), {"more": 1})]


def test_hooks_go_in_once_and_come_out() -> None:
    register.unregister()
    before = hooked()
    register.register()
    during = hooked()
    register.register()
    assert hooked() == during
    assert all(new != old for new, old in zip(during, before, strict=True))
    register.unregister()
    assert hooked() == before
    register.register()


@pytest.mark.parametrize("case", ["version", "namesake", "signature"])
def test_an_unfit_vllm_is_told_once_and_left_alone(
    case: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import vllm

    register.unregister()
    before = hooked()
    if case == "version":
        monkeypatch.setattr(vllm, "__version__", "0.99.1")
    elif case == "namesake":
        look_up = registration.metadata.version
        monkeypatch.setattr(
            registration.metadata,
            "version",
            lambda name: "9" if name == "flashmap" else look_up(name),
        )
    else:
        hook = hooks.HOOKS[-1]
        changed = hooking.Hook(hook.module, hook.name, ("nothing",), hook.wrapper, hook.why)
        monkeypatch.setattr(hooks, "HOOKS", (*hooks.HOOKS[:-1], changed))
    with caplog.at_level(logging.WARNING, logger=registration.__name__):
        register.register()
    words = {"version": "0.31 .*0.32", "namesake": "flashmap 9 and flashmap-hub", "signature": "no"}
    [record] = [record for record in caplog.records if record.name == registration.__name__]
    assert record.levelno == logging.WARNING
    assert re.search(words[case], record.getMessage())
    assert hooked() == before
    monkeypatch.undo()
    register.register()
