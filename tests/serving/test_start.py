"""What vLLM's configuration is filled with, and what is refused before weights are loaded. vLLM's
own classes are stood in for by plain objects, so no engine is needed."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import checkpoints, engine_pairs
from support.engine_pairs import BLOCK, VOCAB, WIDTH

from flashmap.serving.drafter import read_config
from flashmap.serving.options import VARIABLE, DraftOptions, read_options
from flashmap.serving.vllm_plugin import start
from flashmap.serving.vllm_plugin.view import draft_fields, fill_speculators
from flashmap.vocabulary import write_draft_vocab


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    engine_pairs.right_drafter().save_pretrained(tmp_path / "draft")
    return tmp_path / "draft"


def speculative(draft: Path | str, **changes: Any) -> Any:
    """What vLLM has read of --speculative-config, for a target that the drafter was made for."""
    text = SimpleNamespace(vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=3)
    values = {
        "model": str(draft), "revision": None, "method": None, "num_speculative_tokens": None,
        "target_model_config": SimpleNamespace(hf_text_config=text, model="a target"),
        "target_parallel_config": SimpleNamespace(tensor_parallel_size=1),
    }  # fmt: skip
    return SimpleNamespace(**{**values, **changes})


def run(config: Any) -> Any:
    """Run the wrapper as vLLM does; what it calls is told on `config`."""
    start.filling(lambda self: setattr(self, "called", True))(config)
    return config


def edit(draft: Path, **changes: Any) -> None:
    """Change fields of the drafter's config.json."""
    path = draft / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_method_and_number_of_drafts_are_filled_in(draft: Path) -> None:
    config = run(speculative(draft))
    assert (config.method, config.num_speculative_tokens, config.called) == ("dflash", BLOCK, True)
    asked = run(speculative(draft, num_speculative_tokens=2, method="dflash"))
    assert asked.num_speculative_tokens == 2


@pytest.mark.parametrize("model", [None, "ngram", "a.module.Proposer", "/nowhere"])
def test_other_drafts_are_left_alone(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def read(model: str, revision: str | None) -> dict[str, Any]:
        asked.append(model)
        raise OSError("no such folder")

    monkeypatch.setattr(start, "read_config", read)
    config = run(speculative("", model=model))
    assert asked == ([model] if model == "/nowhere" else [])
    assert (config.method, config.num_speculative_tokens, config.called) == (None, None, True)


def test_another_models_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert run(speculative(tmp_path)).method is None


TARGETS = {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": 3}


def target(**changes: int) -> Any:
    """A target's configuration that differs."""
    text = SimpleNamespace(**{**TARGETS, **changes})
    return SimpleNamespace(hf_text_config=text, model="a target")


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "vocabulary": (
        {"target_model_config": target(vocab_size=31)},
        {},
        "32 tokens .* has 31",
    ),
    "width": ({"target_model_config": target(hidden_size=96)}, {}, "states of 64 numbers, not 96"),
    "depth": ({"target_model_config": target(num_hidden_layers=1)}, {}, "layer 1 .* last is 0"),
    "first stage": ({}, {"flow_map": False}, "flow_map is false"),
    "no ranking": (
        {},
        {"draft_vocab_size": 9},
        "9 of 32 .* no draft_vocab.safetensors",
    ),
    "too many drafts": ({"num_speculative_tokens": 5}, {}, "is 5, .* blocks have 4 tokens"),
    "tensor parallel": (
        {"target_parallel_config": SimpleNamespace(tensor_parallel_size=2)},
        {},
        "tensor_parallel_size is 2.*--tensor-parallel-size 1",
    ),
    "pipeline parallel": (
        {"target_parallel_config": SimpleNamespace(pipeline_parallel_size=2)},
        {},
        "pipeline_parallel_size is 2",
    ),
    "another method": ({"method": "eagle3"}, {}, "method 'eagle3' is asked for"),
    "bad field": ({}, {"noise_gate": "loud"}, "noise_gate='loud' is not valid"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_served_is_refused(case: str, draft: Path) -> None:
    changes, fields, words = REFUSED[case]
    edit(draft, **fields)
    config = speculative(draft, **changes)
    with pytest.raises(ValueError, match=words):
        run(config)
    assert not hasattr(config, "called")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "holds no JSON"),
        ("[]", "expected a JSON object"),
        ('{"num_step": 2}', "some of num_steps, draft_vocab_size"),
        ('{"num_steps": 0}', "num_steps=0 is not valid"),
        ('{"num_steps": 3}', "num_steps=3 has no jump grid"),
        ('{"draft_vocab_size": true}', "draft_vocab_size=True is not valid"),
        ('{"draft_vocab_size": 33}', "draft_vocab_size is 33, and the drafter knows 32"),
        ('{"fp8_weights": 1}', "fp8_weights=1 is not valid"),
        ('{"fold_noise": "no"}', "fold_noise='no' is not valid"),
        ('{"kernels": null}', "kernels=None is not valid"),
        ('{"fused_sampler": 1}', "fused_sampler=1 is not valid"),
        ('{"tree_candidates": -1}', "tree_candidates=-1 is not valid.*at least 0"),
        ('{"jump_topk": 0}', "jump_topk=0 is not valid.*at least 1"),
    ],
)
def test_bad_options(text: str, words: str, draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(ValueError, match=words):
        run(speculative(draft))


def test_options_have_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert read_options() == DraftOptions()
    monkeypatch.setenv(VARIABLE, '{"num_steps": 2, "fp8_weights": true}')
    assert read_options() == DraftOptions(num_steps=2, fp8_weights=True)


def test_a_ranking_makes_a_draft_vocabulary(draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_draft_vocab(draft / "draft_vocab.safetensors", torch.arange(VOCAB), {})
    monkeypatch.setenv(VARIABLE, '{"draft_vocab_size": 9}')
    assert run(speculative(draft)).called


def test_vllms_words_for_a_release(draft: Path) -> None:
    fields = draft_fields(read_config(str(draft), None))
    config = engine_pairs.right_drafter().config
    assert fields["architectures"] == ["FlashMapDraftModel"]
    assert (fields["num_key_value_heads"], fields["head_dim"]) == (BLOCK, 32)
    assert fields["eagle_aux_hidden_state_layer_ids"] == [1, 2]
    assert fields["dflash_config"]["target_layer_ids"] == [0, 1]
    assert fields["rope_parameters"]["rope_theta"] == 1e12
    assert fields["draft_vocab_size"] == fields["vocab_size"] == VOCAB
    assert type(config)(**fields["flashmap"]).jump_grids == config.jump_grids


def test_both_vocabularies_say_the_same(tmp_path: Path) -> None:
    folder = checkpoints.write_speculators(tmp_path / "foreign")
    foreign = read_config(str(folder), None)
    filled = {"hidden_size": "what the layer's own configuration says"}
    fill_speculators(foreign, filled)
    assert filled["eagle_aux_hidden_state_layer_ids"] == foreign["aux_hidden_state_layer_ids"]
    assert filled["max_position_embeddings"] == 777
    assert filled["draft_vocab_size"] == len(checkpoints.MEMBERS)
    assert filled["flashmap"]["cond_dim"] == foreign["timestep_embed_dim"]
    assert filled["flashmap"]["time_embed_dim"] == foreign["timestep_frequency_dim"]
