"""What sglang's configuration of a draft holds, and what is refused before weights are loaded.
sglang's own classes are stood in for by plain objects, so no engine is needed."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import engine_pairs
from support.engine_pairs import BLOCK, VOCAB, WIDTH

from flashmap.serving.drafter import read_config
from flashmap.serving.options import VARIABLE
from flashmap.serving.sglang_plugin import start
from flashmap.serving.sglang_plugin.trees import full_mask, refuse
from flashmap.serving.sglang_plugin.view import FlashMapReleaseConfig, draft_fields
from flashmap.vocabulary import write_draft_vocab


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    engine_pairs.right_drafter().save_pretrained(tmp_path / "draft")
    return tmp_path / "draft"


def target(**changes: Any) -> Any:
    """Sglang's configuration of a target, by default the one that the drafter was made for."""
    fields = {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": 3, **changes}
    return SimpleNamespace(hf_text_config=SimpleNamespace(**fields))


def settings(draft: Path, **changes: Any) -> Any:
    """Sglang's arguments."""
    values = {
        "speculative_draft_model_path": str(draft), "speculative_draft_model_revision": None,
        "speculative_dspark_block_size": None, "speculative_draft_kv_cache_dtype": None,
        "kv_cache_dtype": "auto", "tp_size": 1, "pp_size": 1, "model_path": "a target",
    }  # fmt: skip
    return SimpleNamespace(**{**values, **changes})


def check(draft: Path, aim: Any = None, **changes: Any) -> None:
    start.check(
        settings(draft, **changes), aim or target(), read_config(str(draft), None), "0.5.20"
    )


def test_a_release_that_fits_is_served(draft: Path) -> None:
    check(draft)
    check(draft, speculative_dspark_block_size=2, kv_cache_dtype="fp8_e4m3")
    check(draft, target(vocab_size=VOCAB + 32))  # a padded vocabulary: its first rows count


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = {
    "vocabulary": ({}, {"vocab_size": 31}, {}, "32 tokens .* has 31"),
    "width": ({}, {"hidden_size": 96}, {}, "states of 64 numbers, not 96"),
    "depth": ({}, {"num_hidden_layers": 1}, {}, "layer 1 .* last is 0"),
    "muP": ({}, {"logits_mup_width_multiplier": 4.0}, {}, "multiplier=4.0 .* not supported"),
    "first stage": ({}, {}, {"flow_map": False}, "flow_map is false"),
    "no ranking": ({}, {}, {"draft_vocab_size": 9}, "9 of 32 .* no draft_vocab.safetensors"),
    "too many drafts": ({"speculative_dspark_block_size": 5}, {}, {}, "is 5, .* have 4 tokens"),
    "tensor parallel": ({"tp_size": 2}, {}, {}, "tp_size is 2.*--tensor-parallel-size 1"),
    "pipeline parallel": ({"pp_size": 2}, {}, {}, "pp_size is 2"),
    "pool": ({"kv_cache_dtype": "fp8_e5m2"}, {}, {}, "kept as fp8_e5m2, .* bfloat16"),
    "draft's pool": (
        {"speculative_draft_kv_cache_dtype": "fp4_e2m1"}, {}, {}, "kept as fp4_e2m1"
    ),
    "bad field": ({}, {}, {"noise_gate": "loud"}, "noise_gate='loud' is not valid"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_served_is_refused(case: str, draft: Path) -> None:
    arguments, text, fields, words = REFUSED[case]
    path = draft / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(ValueError, match=words):
        check(draft, target(**text), **arguments)


def test_options_are_read(draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, '{"num_steps": 3}')
    with pytest.raises(ValueError, match="num_steps=3 has no jump grid"):
        check(draft)
    monkeypatch.setenv(VARIABLE, '{"draft_vocab_size": 9}')
    write_draft_vocab(draft / "draft_vocab.safetensors", torch.arange(VOCAB), {})
    check(draft)
    monkeypatch.setenv(VARIABLE, '{"tree_candidates": 3, "num_steps": 2}')
    with pytest.raises(ValueError, match="tree_candidates drafts in one jump, and num_steps is 2"):
        check(draft)
    monkeypatch.setenv(VARIABLE, '{"tree_candidates": 3}')
    check(draft)
    raw = read_config(str(draft), None)
    with pytest.raises(ValueError, match=r"for sglang 0.5.20, and this is 0.5.21"):
        start.check(settings(draft), target(), raw, "0.5.21")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"top_k": 1, "temperature": 1.0}, None),
        ({"top_k": 1 << 30}, "a temperature above 0"),
        ({"json_schema": "{}", "regex": "a"}, "json_schema, regex"),
    ],
)
def test_what_trees_cannot_serve_ends_on_arrival(
    changes: dict[str, Any], words: str | None
) -> None:
    told: list[str] = []
    sampling = SimpleNamespace(**{"top_k": 1, "regex": None, **changes})
    req = SimpleNamespace(
        sampling_params=sampling, return_logprob=False, finished=lambda: False,
        set_finish_with_abort=told.append,
    )  # fmt: skip
    refuse(req)
    assert len(told) == (words is not None)
    assert sampling.top_k == 1
    assert words is None or words in told[0]


def test_a_mask_opens_the_prefix_and_what_each_node_sees() -> None:
    visible = torch.tensor([[[1, 0], [1, 1]], [[0, 1], [1, 0]]], dtype=torch.bool)
    mask = full_mask(visible, torch.tensor([1, 3]), total=4).int().tolist()
    first, second = mask[:6], mask[6:]
    assert first == [1, 1, 0, 1, 1, 1]
    assert second == [1, 1, 1, 0, 1, 1, 1, 1, 1, 0]


def test_sglangs_words_for_a_release(draft: Path) -> None:
    fields = draft_fields(read_config(str(draft), None))
    assert fields["architectures"] == ["FlashMapDraftModel"]
    assert (fields["num_key_value_heads"], fields["head_dim"]) == (BLOCK, 32)
    assert (fields["block_size"], fields["num_hidden_layers"]) == (BLOCK, 2)
    assert fields["target_layer_ids"] == [0, 1]  # sglang itself counts one on
    assert (fields["markov_rank"], fields["markov_head_type"]) == (1, "vanilla")
    assert fields["mask_token_id"] == 0
    config = FlashMapReleaseConfig.from_pretrained(draft)
    assert config.model_type == "flashmap"
    own = engine_pairs.right_drafter().config
    assert type(own)(**config.flashmap).jump_grids == own.jump_grids
