"""The plugin inside sglang: found by its entry point, refused in one message, taken out again."""

import functools
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashmap.serving import hooking, registration
from flashmap.serving.sglang_plugin import hooks, register


@pytest.fixture(autouse=True)
def registered() -> Any:
    import sglang.srt.managers.scheduler  # noqa: F401 - as in the process that drafts

    register.unregister()
    register.register()
    yield
    register.unregister()
    register.register()


@functools.cache
def configuration(folder: Path) -> Any:
    """What sglang reads of a folder."""
    from sglang.srt.utils.hf_transformers_utils import get_config

    return get_config(str(folder), trust_remote_code=False)


def hooked() -> list[Any]:
    """Everything of sglang that the plugin touches, as it is now."""
    every = (*hooks.HOOKS, *hooks.WORKER_HOOKS)
    functions = [hooking.find(hook.module, hook.name)[2] for hook in every]
    tables = [hooking.find(entry.module, entry.name)[2] for entry in hooks.ENTRIES]
    return functions + [sorted(table) for table in tables]


def test_a_releases_config_is_read_in_dsparks_words(right: Path) -> None:
    from sglang.srt.speculative.dspark_components.dspark_config import parse_dspark_draft_config

    parsed = parse_dspark_draft_config(draft_hf_config=configuration(right / "draft"))
    assert (parsed.gamma, parsed.target_layer_ids, parsed.mask_token_id) == (4, [0, 1], 0)
    assert parsed.require_markov()


def test_the_draft_model_is_built_by_its_architecture(right: Path) -> None:
    from sglang.srt.models.registry import ModelRegistry

    wrapped = hooks.announcing(lambda model_config: ModelRegistry.models["FlashMapDraftModel"])
    config = configuration(right / "draft")
    model = wrapped(SimpleNamespace(hf_config=config))(config=config)
    assert (model.gamma, model.num_stages, model.sample_from_anchor) == (4, 2, True)


def test_the_markov_head_adds_nothing(right: Path) -> None:
    import torch

    from flashmap.serving.sglang_plugin.model import SglangDraftModel

    head = SglangDraftModel(configuration(right / "draft")).markov_head
    for weight in head.parameters():
        weight.data.zero_()  # as `attach_shared_modules` does, whatever a loader put there
    logits = torch.randn(3, 4, 32)
    logits[..., 5] = float("-inf")
    tokens, corrected = head.sample_block(
        logits,
        first_prev_tokens=torch.tensor([1, 2, 3]),
        hidden_states=None,
        sampler=lambda step_logits, step: step_logits.argmax(dim=-1),
    )
    assert corrected.equal(logits)
    assert tokens.equal(logits.argmax(dim=-1))


def test_another_draft_gets_what_was_asked_for() -> None:
    seen: list[Any] = []

    def original(*args: Any, **kwargs: Any) -> Any:
        seen.append((args, kwargs))
        return SimpleNamespace(draft_model="another", attn_backend=None)

    worker = SimpleNamespace(
        draft_model="another",
        draft_model_runner=SimpleNamespace(attn_backend="draft's"),
        model_runner=SimpleNamespace(attn_backend="target's"),
    )
    for wrapper in (hooks.resting, hooks.sampling):
        wrapper(original)(worker, more=1)
    hooks.binding(original)(more=1)
    hooks.announcing(original)(SimpleNamespace(hf_config=SimpleNamespace(architectures=None)))
    assert [kwargs for _, kwargs in seen] == [{"more": 1}] * 3 + [{}]


def test_hooks_go_in_once_and_come_out() -> None:
    during = hooked()
    register.register()
    assert hooked() == during
    register.unregister()
    before = hooked()
    assert all(new != old for new, old in zip(during, before, strict=True))


def test_every_signature_is_there() -> None:
    """`install` raises where one is not."""
    register.unregister()
    for undo in hooks.install():
        undo()


@pytest.mark.parametrize("case", ["version", "namesake", "signature"])
def test_an_unfit_sglang_is_told_once_and_left_alone(
    case: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import sglang

    register.unregister()
    before = hooked()
    if case == "version":
        monkeypatch.setattr(sglang, "__version__", "0.5.99")
    elif case == "namesake":
        known = registration.metadata.version
        monkeypatch.setattr(
            registration.metadata,
            "version",
            lambda name: "9" if name == "flashmap" else known(name),
        )
    else:
        hook = hooks.HOOKS[-1]
        changed = hooking.Hook(hook.module, hook.name, ("nothing",), hook.wrapper, hook.why)
        monkeypatch.setattr(hooks, "HOOKS", (*hooks.HOOKS[:-1], changed))
    with caplog.at_level(logging.WARNING, logger=registration.__name__):
        register.register()
    words = {"version": r"0.5.20 .*0.5.23", "namesake": "flashmap 9 and flashmap-hub"}
    [record] = [record for record in caplog.records if record.name == registration.__name__]
    assert re.search(words.get(case, "has no nothing"), record.getMessage())
    assert hooked() == before
