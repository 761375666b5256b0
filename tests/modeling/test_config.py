"""Each rule of the configuration refuses its breach in one message: field, value and rule."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import transformers
from support import toys

from flashmap import FlashMapConfig

NAN, INF = float("nan"), float("inf")
WHOLE = (0, -1, 2.0, "3", True, None)
PUBLISHED = {
    "1": [0.0, 1.0],
    "2": [0.0, 0.8172569274902344, 1.0],
    "3": [0.0, 0.8010796308517456, 0.8310279846191406, 1.0],
    "4": [0.0, 0.7906050682067871, 0.8172569274902344, 0.8379518389701843, 1.0],
}

BREACHES: list[tuple[str, Any, str]] = [
    *(("target_model", value, "non-empty") for value in ("", 7, None)),
    *(("noise_gate", value, "jump.*constant") for value in ("jumpy", "Jump", "", None, 1)),
    *(("time_schedule", value, "decoding_error") for value in ("cosine", "Decoding_error", "", 1)),
    *(
        (name, value, "at least 1")
        for name in (
            "target_hidden_size", "block_size", "hidden_size", "num_hidden_layers",
            "num_attention_heads", "intermediate_size", "cond_dim", "time_embed_dim", "num_steps",
        )
        for value in WHOLE
    ),
    *(("vocab_size", value, "at least 2") for value in (1, 0, -5, True, 3.0)),
    *(
        (name, 10**30, "at most 16777216")
        for name in (
            "target_hidden_size", "block_size", "hidden_size", "num_attention_heads",
            "intermediate_size", "cond_dim", "time_embed_dim", "num_steps", "vocab_size",
        )
    ),
    ("num_hidden_layers", 1025, "at most 1024"),
    *(
        (name, value, r"at most 1e\+30")
        for name in ("time_scale", "rope_theta", "rms_norm_eps", "qk_norm_eps", "layer_norm_eps")
        for value in (1e31, 10**400)
    ),
    ("target_layer_ids", [0, 10**30], "strictly increasing"),
    ("jump_grids", {"9" * 5000: [0.0, 1.0]}, "written as strings"),
    *(
        (name, value, "above 0")
        for name in ("time_scale", "rope_theta", "rms_norm_eps", "qk_norm_eps", "layer_norm_eps")
        for value in (0, 0.0, -1e-6, NAN, INF, "1", True, None)
    ),
    ("hidden_size", 15, "divisible by num_attention_heads=2"),
    ("hidden_size", 18, "even multiple"),
    ("time_embed_dim", 9, "even"),
    ("tie_word_embeddings", True, "false"),
    *(
        ("target_layer_ids", value, "non-empty, strictly increasing")
        for value in ([], [-1, 2], [1, 1], [3, 1], [0, 1.0], [0, True], ["0"], "01", 3, None)
    ),
    *(("jump_grids", value, "mapping") for value in ({}, [[0.0, 1.0]], "1")),
    *(
        ("jump_grids", value, "written as strings")
        for value in ({1: [0.0, 1.0]}, {"0": [0.0]}, {"01": [0.0, 1.0]}, {"one": [0.0, 1.0]},
                      {"-1": [0.0, 1.0]}, {"1.0": [0.0, 1.0]})
    ),
    *(
        ("jump_grids", {"1": [0.0, 1.0], "2": grid}, "3 times")
        for grid in ([0.0, 1.0], [0.0, 0.2, 0.4, 1.0], [], None, "0.5", [0.0, "0.5", 1.0],
                     [0.0, NAN, 1.0], [0.0, None, 1.0])
    ),
    *(
        ("jump_grids", {"1": [0.0, 1.0], "2": grid}, "strictly increasing from 0.0 to 1.0")
        for grid in ([0.1, 0.5, 1.0], [0.0, 0.5, 0.9], [0.0, 0.0, 1.0], [0.0, 1.0, 1.0],
                     [0.0, 1.5, 1.0], [0.0, -0.5, 1.0], [1.0, 0.5, 0.0])
    ),
    ("num_steps", 9, "1, 2, 3, 4"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "rule"), BREACHES)
def test_a_breach_names_field_value_and_rule(name: str, value: Any, rule: str) -> None:
    with pytest.raises(ValueError) as caught:
        toys.drafter_config(**{name: value})
    message = str(caught.value)
    assert name in message
    assert re.search(rule, message), message
    shown = value["2"] if isinstance(value, dict) and "2" in value else value
    assert repr(shown) in message or repr(list(shown) if shown else shown) in message
    assert "\n" not in message


def test_the_defaults_are_the_published_ones() -> None:
    config = FlashMapConfig()
    expected = {
        "target_model": "Qwen/Qwen3-8B", "target_hidden_size": 4096, "vocab_size": 151936,
        "target_layer_ids": [1, 9, 17, 25, 33], "block_size": 16, "hidden_size": 2048,
        "num_hidden_layers": 6, "num_attention_heads": 16, "intermediate_size": 8192,
        "cond_dim": 256, "time_embed_dim": 256, "time_scale": 1000.0, "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6, "qk_norm_eps": 1e-5, "layer_norm_eps": 1e-6, "noise_gate": "jump",
        "time_schedule": "decoding_error", "num_steps": 1, "jump_grids": PUBLISHED,
        "tie_word_embeddings": False,
    }  # fmt: skip
    assert {name: getattr(config, name) for name in expected} == expected
    assert config.model_type == "flashmap"
    assert config.head_size == 128


def test_the_published_grids_are_for_their_vocabulary_only() -> None:
    assert FlashMapConfig(vocab_size=151936).jump_grids == PUBLISHED
    for vocab_size in (151935, 151669, 49152, 2):
        assert FlashMapConfig(vocab_size=vocab_size).jump_grids == {"1": [0.0, 1.0]}
        with pytest.raises(ValueError, match="num_steps"):
            FlashMapConfig(vocab_size=vocab_size, num_steps=2)


def test_configurations_share_no_lists() -> None:
    first, second = FlashMapConfig(), FlashMapConfig()
    first.jump_grids["1"].append(2.0)
    first.target_layer_ids.append(99)
    assert second.jump_grids == FlashMapConfig().jump_grids == PUBLISHED
    assert second.target_layer_ids == [1, 9, 17, 25, 33]
    taps, grids = [0, 1], {"1": [0.0, 1.0]}
    config = toys.drafter_config(target_layer_ids=taps, jump_grids=grids)
    taps.append(5)
    grids["1"][0] = 0.5
    assert config.target_layer_ids == [0, 1]
    assert config.jump_grids == {"1": [0.0, 1.0]}
    assert toys.drafter_config(target_layer_ids=(0, 2)).target_layer_ids == [0, 2]


def test_a_folder_gives_back_every_field(tmp_path: Path) -> None:
    config = toys.drafter_config(
        noise_gate="constant", num_steps=3, time_scale=500.0, target_layer_ids=[0, 2],
        draft_vocab_size=32, speculators_model_type="flashmap",
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    loaded = FlashMapConfig.from_pretrained(tmp_path)
    drop = {"transformers_version", "_name_or_path"}
    before, after = [
        {name: value for name, value in item.to_dict().items() if name not in drop}
        for item in (config, loaded)
    ]
    assert before == after
    assert after["draft_vocab_size"] == 32
    assert FlashMapConfig.from_json_file(tmp_path / "config.json").to_dict()["num_steps"] == 3


def test_a_file_states_every_field_that_defaults_could_change(tmp_path: Path) -> None:
    FlashMapConfig().save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["target_layer_ids"] == [1, 9, 17, 25, 33]
    assert written["jump_grids"] == PUBLISHED
    assert FlashMapConfig.from_pretrained(tmp_path).jump_grids == PUBLISHED


def test_a_folder_without_target_layers_is_refused(tmp_path: Path) -> None:
    config = toys.drafter_config()
    config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    del fields["target_layer_ids"]
    path.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="target_layer_ids"):
        FlashMapConfig.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="target_layer_ids"):
        FlashMapConfig.from_dict(fields)


@pytest.mark.parametrize(
    "override",
    [{"num_steps": 9}, {"noise_gate": "jumpy"}, {"target_layer_ids": [2, 1]}, {"block_size": 0},
     {"jump_grids": {"1": [0.0, 0.5]}}, {"rope_theta": -1.0}],
)  # fmt: skip
def test_a_wrong_override_of_a_folder_is_refused(tmp_path: Path, override: dict[str, Any]) -> None:
    toys.drafter_config().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=next(iter(override))):
        FlashMapConfig.from_pretrained(tmp_path, **override)
    with pytest.raises(ValueError, match=next(iter(override))):
        FlashMapConfig.from_pretrained(tmp_path, return_unused_kwargs=True, **override)


def test_a_right_override_of_a_folder_is_taken(tmp_path: Path) -> None:
    toys.drafter_config().save_pretrained(tmp_path)
    assert FlashMapConfig.from_pretrained(tmp_path, num_steps=2).num_steps == 2


def test_a_model_is_not_built_from_fields_that_were_broken_later() -> None:
    config = toys.drafter_config()
    config.num_steps = 7
    with pytest.raises(ValueError, match="num_steps=7"):
        toys.FlashMapDraftModel(config)


def test_grid_lookup() -> None:
    config = toys.drafter_config(num_steps=2)
    assert config.grid() == config.grid(2) == [0.0, 0.5, 1.0]
    assert config.grid(1) == [0.0, 1.0]
    for value in (5, 0, -1, True, "x", 1.5):
        with pytest.raises(ValueError, match="1, 2, 3, 4"):
            config.grid(value)


def test_it_is_an_ordinary_configuration_of_transformers() -> None:
    base = getattr(transformers, "PretrainedConfig", None) or transformers.PreTrainedConfig
    assert isinstance(toys.drafter_config(), base)
    assert "flashmap" in repr(toys.drafter_config())
    assert FlashMapConfig().to_diff_dict()["model_type"] == "flashmap"
